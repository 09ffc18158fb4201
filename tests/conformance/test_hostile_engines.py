"""Engines that answer with anything at all: the judge says so, and never passes or breaks."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_engines
import ml_dtypes
import numpy as np
import pytest
from hostile_engines import Hostile, changing, pressing_ctrl_c, raising, returning

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.host_array import Numbers
from kdtr.contract import (
    Acceptance,
    BundleError,
    CacheError,
    DraftTree,
    EngineError,
    LogicalCache,
    Round,
    UnsupportedError,
    Verified,
)

Gate = Callable[..., SimpleNamespace]
FLOATING = Numbers.FLOATING.value
LONG = np.dtype(np.longdouble)


@pytest.fixture
def gate(
    kdtr: Callable[..., SimpleNamespace], small: Path, monkeypatch: pytest.MonkeyPatch
) -> Gate:
    """gate(engine, case, ..., mode="stepwise"): what the command says of it."""

    def gate(engine: Any, *cases: str, mode: str = "") -> SimpleNamespace:
        monkeypatch.setattr(hostile_engines, "NEXT", [engine])
        words = [word for case in cases for word in ("--case", case)]
        words += ["--mode", mode] if mode else []
        return kdtr("gate", small, "--engine", "hostile_engines:make_engine", *words)

    return gate


def stopped(run: SimpleNamespace, text: str) -> bool:
    """Exit code 1, this text in a finding, and nothing of the judge's own insides."""
    assert 1 == run.code, run.out + run.err
    assert "Traceback" not in run.out + run.err
    findings = re.sub(r"^  \w+ .*\n", "", run.out, flags=re.MULTILINE)
    assert text in findings, run.out
    return True


def test_the_wrapper_alone_is_honest(gate: Gate) -> None:
    run = gate(Hostile())

    assert 0 == run.code, run.out


# Raising

IN_A_VERB = (
    ("open", "y", ""),
    ("set_root", "from-root", "stepwise"),
    ("prefill", "y", "stepwise"),
    ("build", "drafted", "stepwise"),
    ("verify", "y", "stepwise"),
    ("accept", "y", "stepwise"),
    ("commit", "y", "stepwise"),
    ("snapshot", "y", "stepwise"),
    ("round", "y", "round"),
    ("decode", "ar", "decode"),
    ("forward_tokens", "y", "forward"),
    ("committed_len", "y", "round"),
    ("root", "y", "round"),
    ("close", "y", "round"),
)


@pytest.mark.parametrize(("verb", "case", "mode"), IN_A_VERB)
def test_an_error_is_told_with_type_text_and_place(
    gate: Gate, verb: str, case: str, mode: str
) -> None:
    run = gate(Hostile({verb: raising(ValueError("no more memory"))}), case, mode=mode)

    assert stopped(run, "the engine raised ValueError: no more memory (at hostile_engines.py:")
    line = int(run.out.split("hostile_engines.py:")[1].split(")")[0])
    source = Path(hostile_engines.__file__).read_text().splitlines()
    assert "raise error" == source[line - 1].strip()


def test_an_engine_error_of_the_engine_s_own_is_its_own(gate: Gate) -> None:
    run = gate(Hostile({"verify": raising(EngineError("no stream"))}), "y", mode="stepwise")

    assert stopped(run, "the engine raised EngineError: no stream (at hostile_engines.py:")


def test_load_raises(gate: Gate) -> None:
    run = gate(Hostile({"load": raising(MemoryError("640K"))}))

    assert stopped(run, "load: load() raised MemoryError: 640K")


def test_closing_the_model_raises(gate: Gate) -> None:
    run = gate(Hostile({"model_close": raising(OSError("device lost"))}), "y")

    assert stopped(run, "close: close() raised OSError: device lost")


def test_what_was_shown_before_the_error_is_judged_first(gate: Gate) -> None:
    """A wrong embedding explains more than the error that follows from it."""

    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        trace(stage, layer, array + 1 if stage == "embedding" else array)
        if stage == "final_hidden":
            raise ZeroDivisionError

    run = gate(Hostile(show=show), "y", mode="stepwise")

    assert stopped(run, "FAIL  y / stepwise / chunk0: embedding: ")
    assert "ZeroDivisionError" not in run.out


@pytest.mark.parametrize("verb", ["load", "open", "prefill", "verify", "close", "model_close"])
@pytest.mark.parametrize("code", [0, None, 3])
def test_sys_exit_in_an_engine_does_not_end_the_judge(gate: Gate, verb: str, code: Any) -> None:
    run = gate(Hostile({verb: raising(SystemExit(code))}), "y")

    assert stopped(run, f"raised SystemExit: {code}")
    assert "gate FAILED" in run.out


@pytest.mark.parametrize("verb", ["load", "open", "verify", "close", "model_close"])
def test_ctrl_c_ends_the_run_and_says_where_it_was(gate: Gate, verb: str) -> None:
    run = gate(Hostile({verb: pressing_ctrl_c()}), "y")

    assert (130, "") == (run.code, run.out)
    call = verb.removeprefix("model_")
    assert re.fullmatch(
        rf"kdtr: interrupted at bundle.kdtr.*: {call}\(\), 0 s after it was called\n", run.err
    ), run.err


class Cancelled(BaseException):
    """As asyncio and trio have it: no Exception."""


@pytest.mark.parametrize("verb", ["load", "open", "verify", "root", "close", "model_close"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, GeneratorExit, Cancelled, BaseException])
def test_what_is_no_exception_is_told_like_one(
    gate: Gate, verb: str, kind: type[BaseException]
) -> None:
    """A KeyboardInterrupt too, that no user has asked for."""
    run = gate(Hostile({verb: raising(kind("at once"))}), "y")

    assert stopped(run, f"raised {kind.__name__}: at once")
    assert "" == run.err


def test_its_place_is_told_too(gate: Gate) -> None:
    run = gate(Hostile({"verify": raising(GeneratorExit("x"))}), "y", mode="stepwise")

    assert stopped(run, "the engine raised GeneratorExit: x (at hostile_engines.py:")


class Exiting:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise GeneratorExit


def test_an_array_whose_copy_is_given_up(gate: Gate) -> None:
    verified = Verified(Exiting(), ())  # type: ignore[arg-type]

    run = gate(Hostile({"verify": returning(verified)}), "y", mode="stepwise")

    assert stopped(run, "verify() logits is a Exiting, which is no array: GeneratorExit")


class Leaving(frozenset[str]):
    def __sub__(self, other: object) -> Any:
        raise SystemExit(0)


def test_sys_exit_where_nothing_else_catches_it_is_no_verdict(gate: Gate) -> None:
    run = gate(Hostile(info=lambda honest: replace(honest, verbs=Leaving(honest.verbs))), "y")

    assert (2, "") == (run.code, run.out)
    assert "kdtr: no verdict: the engine raised SystemExit: 0\n" == run.err


def test_a_very_long_text_is_cut(gate: Gate) -> None:
    run = gate(Hostile({"verify": raising(ValueError("x" * 10**6))}), "y", mode="stepwise")

    assert stopped(run, "x" * 2000 + "... (1000000 characters)")
    assert len(run.out) < 6000


LOUD = "red\x1b[31m\x9b\u202e\nand " + "x" * 10**6
QUIET = "red\\x1b[31m\\x9b\\u202e{}and " + "x" * (2000 - 15) + "... (1000015 characters)"


def test_the_reason_of_a_model_that_is_not_loaded_is_one_line(gate: Gate) -> None:
    run = gate(Hostile({"load": raising(UnsupportedError(LOUD))}), "y")

    assert ": not loaded: " + QUIET.format("\\n") in run.out.replace("\n", "")
    assert len(run.out) < 6000


@pytest.mark.parametrize("error", [ValueError, EngineError, CacheError])
@pytest.mark.parametrize("verb", ["load", "open", "verify"])
def test_nothing_that_an_engine_says_reaches_the_terminal_raw(
    gate: Gate, verb: str, error: type[Exception]
) -> None:
    run = gate(Hostile({verb: raising(error(LOUD))}), "y", mode="stepwise")

    assert stopped(run, f"raised {error.__name__}: " + QUIET.format("\n"))
    assert len(run.out) < 8000


def test_nor_does_what_its_factory_says(
    kdtr: Callable[..., SimpleNamespace], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [])
    monkeypatch.setattr(hostile_engines, "make_engine", partial(raising(EngineError(LOUD)), None))

    run = kdtr("gate", small, "--engine", "hostile_engines:make_engine")

    long = QUIET.format("\n").replace("x" * 1985, "x" * 9985)
    assert (2, f"kdtr: EngineError: {long}\n") == (run.code, run.err)


def test_nor_the_name_of_what_it_raises(gate: Gate) -> None:
    kind = type("E\x1b" + "x" * 10**6, (Exception,), {})

    run = gate(Hostile({"verify": raising(kind("y"))}), "y", mode="stepwise")

    assert stopped(run, "raised E\\x1b" + "x" * 55 + "... (1000005 characters): y (at hostile")


@pytest.mark.parametrize("error", [UnsupportedError, EngineError, ValueError])
@pytest.mark.parametrize("verb", ["load", "verify"])
def test_nor_what_an_x_ray_and_the_engine_against_itself_hear(
    kdtr: Callable[..., SimpleNamespace],
    small: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    error: type[Exception],
) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [Hostile({verb: raising(error(LOUD))})])
    name = ("--engine", "hostile_engines:make_engine")

    xray = kdtr("xray", *name, "--model", "visible")
    itself = kdtr("gate", "--self", "--model", small, "--vocab-size", 37, "--max-len", 60, *name)

    for run in (xray, itself):
        shown = run.out + run.err
        assert "red\\x1b[31m\\x9b\\u202e" in shown
        assert not {"\x1b", "\x9b", "\u202e"} & {*shown}
        assert len(shown) < 20_000


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


@pytest.mark.parametrize("verb", ["load", "verify", "close"])
def test_a_text_that_cannot_be_read(gate: Gate, verb: str) -> None:
    run = gate(Hostile({verb: raising(Unreadable())}), "y", mode="stepwise")

    assert stopped(run, "Unreadable: (its text cannot be read)")


def test_endless_recursion(gate: Gate) -> None:
    def verify(original: Any, tree: Any, **rest: Any) -> Any:
        return verify(original, tree, **rest)

    run = gate(Hostile({"verify": verify}), "y", mode="stepwise")

    assert stopped(run, "the engine raised RecursionError: maximum recursion depth exceeded")


def test_markup_and_control_in_texts_are_shown_as_they_are(gate: Gate) -> None:
    def info(honest: Any) -> Any:
        return replace(honest, name="[/red] :smile:", device="[bold]")

    run = gate(Hostile({"verify": raising(ValueError("[/x] :smile:"))}, info=info), "y")

    assert stopped(run, "ValueError: [/x] :smile:")
    assert run.out.startswith("[/red] :smile: ")


# Answers of the wrong kind


@pytest.mark.parametrize(
    ("verb", "case", "mode", "text"),
    [
        ("load", "y", "", "load() returned a NoneType without open(); expected a model"),
        ("open", "y", "round", "'NoneType' object has no attribute 'prefill'"),
        ("prefill", "y", "round", "prefill() returned None; expected an integer"),
        ("decode", "ar", "decode", "decode() returned None; expected an integer"),
        ("build", "drafted", "stepwise", "build() returned None; expected a DraftTree"),
        ("verify", "y", "stepwise", "verify() returned None; expected a Verified"),
        ("accept", "y", "stepwise", "accept() returned None; expected an Acceptance"),
        ("round", "y", "round", "round() returned None; expected a Round"),
        ("snapshot", "y", "stepwise", "snapshot() returned None; expected a LogicalCache"),
        ("forward_tokens", "y", "forward", "forward_tokens() logits is None, which is no array"),
        ("committed_len", "y", "round", "committed_len returned None; expected an integer"),
        ("root", "y", "round", "root is None after a commit; expected the bonus"),
    ],
)
def test_none_is_no_answer(gate: Gate, verb: str, case: str, mode: str, text: str) -> None:
    run = gate(Hostile({verb: changing(lambda _: None)}), case, mode=mode)

    assert stopped(run, text)


@pytest.mark.parametrize("verb", ["build", "verify", "accept", "round", "snapshot", "prefill"])
@pytest.mark.parametrize("value", ["text", 1.5, [], {}, b"", object(), np.zeros(3), ()])
def test_things_of_another_type(gate: Gate, verb: str, value: Any) -> None:
    run = gate(Hostile({verb: changing(lambda _: value)}), "drafted")

    assert stopped(run, f"{verb}() returned")


@pytest.mark.parametrize("token", [True, False, 1.0, "1", np.float32(1), np.True_, None])
def test_tokens_that_are_no_integers(gate: Gate, token: Any) -> None:
    run = gate(Hostile({"prefill": changing(lambda _: token)}), "y", mode="round")

    assert stopped(run, "prefill() returned ")


@pytest.mark.parametrize("token", [-1, 37, 2**31, 2**63, 2**64, 10**40, -(10**40)])
@pytest.mark.parametrize("verb", ["prefill", "root", "committed_len"])
def test_integers_out_of_all_range(gate: Gate, verb: str, token: int) -> None:
    run = gate(Hostile({verb: changing(lambda _: token)}), "y", mode="round")

    assert stopped(run, "y / round / chunk0: ")


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_prefill_returns_one_root_and_keeps_another(gate: Gate, mode: str) -> None:
    run = gate(Hostile({"root": changing(lambda root: (root + 1) % 37)}), "y", mode=mode)

    assert stopped(run, "/ chunk0: answer: prefill() returned ")
    assert "; expected one" in run.out


def verified(**changes: Callable[[Any], Any]) -> Mapping[str, Any]:
    def change(honest: Verified) -> Verified:
        fields = {"logits": honest.logits, "targets": honest.targets}
        for name, to in changes.items():
            fields[name] = to(fields[name])
        return Verified(**fields)

    return {"verify": changing(change)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t[:-1], "verify() returned 3 targets, the tree has 4 nodes; expected 4"),
        (lambda t: (*t, 0), "verify() returned 5 targets, the tree has 4 nodes; expected 4"),
        (lambda t: (), "verify() returned 0 targets, the tree has 4 nodes; expected 4"),
        (lambda t: None, "verify() targets are None; expected a sequence of integers"),
        (lambda t: 5, "verify() targets are a int; expected a sequence of integers"),
        (lambda t: [float(x) for x in t], "; expected integers"),
        (lambda t: (True, *t[1:]), "verify() targets are (True, "),
        (lambda t: np.array(t)[:, None], "targets are int64 [4, 1]; expected integers"),
        (lambda t: np.array(t).astype(bool), "targets are bool [4]; expected integers"),
        (lambda t: np.array(t).astype(float), "targets are float64 [4]; expected integers"),
        (lambda t: np.ma.masked_all(4, int), "targets are a MaskedArray; expected a sequence"),
        (iter, "verify() targets are a tuple_iterator; expected a sequence of integers"),
        (lambda t: (x for x in t), "verify() targets are a generator; expected a sequence of"),
        (set, "verify() targets are a set; expected a sequence of integers"),
        (dict.fromkeys, "verify() targets are a dict; expected a sequence of integers"),
        (bytes, "verify() targets are a bytes; expected a sequence of integers"),
        (lambda t: (37, *t[1:]), "targets: 1 of 4 differ"),
        (lambda t: (-1, *t[1:]), "targets: 1 of 4 differ"),
        (lambda t: (10**30, *t[1:]), "30, 21); expected integers of 64 bits"),
        (lambda t: "abcd", "verify() targets are a str; expected a sequence of integers"),
        (lambda t: ["x" * 10**5] * 4, "... (400"),
    ],
    ids=map(str, range(21)),
)
def test_targets_of_every_wrong_kind(gate: Gate, change: Any, text: str) -> None:
    run = gate(Hostile(verified(targets=change)), "y", mode="stepwise")

    assert stopped(run, text)
    assert len(run.out) < 6000


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda a: a.T, "verify() returned logits [37, 4]; expected [4, 37]"),
        (lambda a: a[0], "verify() returned logits [37]; expected [4, 37]"),
        (lambda a: a[:-1], "verify() returned logits [3, 37]; expected [4, 37]"),
        (lambda a: a[..., None], "verify() returned logits [4, 37, 1]; expected [4, 37]"),
        (lambda a: np.float32(1), "verify() returned logits []; expected [4, 37]"),
        (lambda a: a.astype(complex), "verify() logits is complex128; expected floating-point"),
        (lambda a: a.astype(object), "verify() logits is object; expected floating-point"),
        (lambda a: a.astype(str), "verify() logits is <U32; expected floating-point"),
        (lambda a: a.astype("m8[s]"), "verify() logits is timedelta64[s]; expected floating"),
        (lambda a: a.tolist(), "verify() logits is a list, which is no array"),
        (lambda a: "logits", "verify() logits is a str, which is no array"),
        (lambda a: a.astype(np.int64), f"verify() logits is int64; expected {FLOATING}"),
        (lambda a: a > 0, f"verify() logits is bool; expected {FLOATING}"),
        (lambda a: a.astype(np.longdouble), f"logits is {LONG}; expected {FLOATING}"),
        (lambda a: np.ma.masked_all(a.shape), "verify() logits is a masked array; expected a pl"),
        (np.ma.array, "verify() logits is a masked array; expected a plain one, in which every"),
        (lambda a: a * np.nan, "logits: 148 of 148 differ in being finite"),
        (lambda a: a * np.inf, "logits: 148 of 148 differ in being finite"),
        (lambda a: np.full(a.shape, 1e308), "logits: 148 of 148 "),
        (lambda a: np.sign(a).astype(np.float64) * 1.7e308, "out of bounds, the first row by inf"),
        (lambda a: a.astype(ml_dtypes.bfloat16), "logits: "),
    ],
    ids=map(str, range(21)),
)
def test_logits_of_every_wrong_kind(gate: Gate, change: Any, text: str) -> None:
    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        if stage != "logits":
            trace(stage, layer, array)

    engine = Hostile(verified(logits=change), show=show, info=without("logits"))
    run = gate(engine, "y", mode="stepwise")

    assert stopped(run, text)


def without(stage: str) -> Callable[[Any], Any]:
    return lambda honest: replace(honest, stages=honest.stages - {stage})


def test_numbers_at_the_end_of_the_range_warn_nobody(gate: Gate) -> None:
    def huge(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        trace(stage, layer, np.full(array.shape, 1e308) if stage == "c_kv" else array)

    run = gate(Hostile(show=huge), "y", mode="stepwise")

    assert stopped(run, "c_kv: 60 of 60 out of bounds, the first row by ")
    assert "Warning" not in run.err


class Lying:
    """An array that raises when it is looked at."""

    @property
    def __array__(self) -> Any:
        raise RuntimeError("do not look")


@pytest.mark.parametrize("value", [Lying(), object(), None, [[1.0]], "x"])
@pytest.mark.parametrize("field", ["tokens", "positions", "c_kv", "k_pe"])
def test_snapshots_of_no_arrays(gate: Gate, field: str, value: Any) -> None:
    def change(honest: LogicalCache) -> LogicalCache:
        return replace(honest, **{field: value})

    run = gate(Hostile({"snapshot": changing(change)}), "y", mode="stepwise")

    assert stopped(run, f"snapshot() {field} is")


@pytest.mark.parametrize("field", ["tokens", "positions", "c_kv", "k_pe"])
@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[..., :-1],
        lambda a: a.ravel()[:1],
        lambda a: np.ones((), a.dtype),
        lambda a: a[None],
        lambda a: np.zeros(0, a.dtype),
    ],
    ids=["short", "flat", "number", "axis", "empty"],
)
def test_snapshots_of_another_shape(gate: Gate, field: str, change: Any) -> None:
    def changed(honest: LogicalCache) -> LogicalCache:
        return replace(honest, **{field: change(getattr(honest, field))})

    run = gate(Hostile({"snapshot": changing(changed)}), "y", "from-root", mode="stepwise")

    fields = {"tokens": 1, "positions": 1, "c_kv": 3, "k_pe": 3}
    same_axes = change(np.zeros((1,) * fields[field])).ndim == fields[field]
    assert stopped(run, f"cache_{field}: wrong" if same_axes else f"snapshot() {field} is [")


def test_a_snapshot_that_changes_its_axes_between_two_calls(gate: Gate) -> None:
    calls: list[int] = []

    def changed(honest: LogicalCache) -> LogicalCache:
        calls.append(1)
        return replace(honest, c_kv=honest.c_kv[:1]) if len(calls) == 2 else honest

    run = gate(Hostile({"snapshot": changing(changed)}), "y", mode="stepwise")

    assert stopped(
        run,
        "snapshot() c_kv was float32 [2, 6, 10] and is now float32 [1, 6, 10]; expected the same "
        "rows, and others after them",
    )


def test_a_snapshot_that_is_no_copy_does_not_hide_a_written_row(gate: Gate) -> None:
    """SLOT-2: the judge compares two copies of its own, not the engine's live rows."""
    live: dict[str, Any] = {}

    def snapshot(original: Any) -> LogicalCache:
        honest = original()
        if live.get("length") != len(honest.tokens):
            live.update(length=len(honest.tokens), cache=honest)
        return live["cache"]

    def verify(original: Any, tree: Any, **rest: Any) -> Any:
        live["cache"].c_kv[0, 0, 0] += 1
        return original(tree, **rest)

    run = gate(Hostile({"snapshot": snapshot, "verify": verify}), "y", mode="stepwise")

    assert stopped(run, "untouched: 1 of 6 differ")


def test_lists_of_huge_integers_and_empty_ones(gate: Gate) -> None:
    def emitted(value: tuple[int, ...]) -> Any:
        return changing(lambda honest: Round(honest.tree, honest.acceptance, value))

    huge = gate(Hostile({"round": emitted((2**63, -1, 0))}), "y", mode="round")
    empty = gate(Hostile({"round": emitted(())}), "y", mode="round")

    text = "round() emitted are (9223372036854775808, -1, 0); expected integers of 64 bits"
    assert stopped(huge, text)
    assert stopped(empty, "emitted: wrong length")


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (lambda tree: None, "None"),
        (lambda tree: "tree", "a str"),
        (lambda tree: np.zeros(4, int), "a ndarray"),
        (
            lambda tree: DraftTree((tree.tokens[0],), (-1,)),
            "another tree, [4] under [-1]",
        ),
    ],
)
def test_a_round_of_another_tree(gate: Gate, tree: Any, text: str) -> None:
    """A round says what it verified; padding that it added is not reported (PAD-1)."""

    def change(honest: Round) -> Round:
        return Round(tree(honest.tree), honest.acceptance, honest.emitted)

    run = gate(Hostile({"round": changing(change)}), "y", mode="round")

    assert stopped(
        run,
        f"answer: round() says that it verified {text}; expected the DraftTree that it was given",
    )


def test_a_path_and_a_tree_of_absurd_ids(gate: Gate) -> None:
    far = Acceptance((0, 10**30), 10**30)
    tree = DraftTree((2, 10**30), (-1, 0))

    assert stopped(
        gate(Hostile({"accept": returning(far)}), "y", mode="stepwise"),
        f"accept() path are (0, {10**30}); expected integers of 64 bits",
    )
    assert stopped(
        gate(Hostile({"build": returning(tree)}), "drafted", mode="stepwise"), "build_parents: "
    )


# Traces


def shows(change: Callable[[str, int | None, Any], list[tuple[Any, Any, Any]]]) -> Hostile:
    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        for one in change(stage, layer, array):
            trace(*one)

    return Hostile(show=show)


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (("nonsense", None), "trace of 'nonsense'; expected one of attn_out, "),
        (("", None), "trace of ''; expected one of attn_out, "),
        (("cache_c_kv", None), "trace of 'cache_c_kv'; expected one of attn_out, "),
        (("c_kv", 99), "trace of c_kv at layer 99; expected 0..1"),
        (("c_kv", -1), "trace of c_kv at layer -1; expected 0..1"),
        (("c_kv", None), "trace of c_kv at layer None; expected 0..1"),
        (("c_kv", "0"), "trace of c_kv at layer '0'; expected 0..1"),
        (("logits", 0), "trace of logits at layer 0; expected None"),
        (("positions", 1), "trace of positions at layer 1; expected None"),
        ((["c_kv"], 0), "unhashable type"),
    ],
)
def test_traces_of_stages_that_there_are_not(gate: Gate, shown: Any, text: str) -> None:
    def more(stage: str, layer: int | None, array: Any) -> list[Any]:
        extra = [(*shown, array)] if stage == "logits" else []
        return [*extra, (stage, layer, array)]

    run = gate(shows(more), "y", mode="stepwise")

    assert stopped(run, text)


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a[:-1],
        lambda a: a[None],
        lambda a: np.zeros((), a.dtype),
        lambda a: np.zeros((0, 5), a.dtype),
    ],
    ids=["short", "axis", "number", "empty"],
)
@pytest.mark.parametrize(
    "stage",
    ["tokens", "positions", "mask", "slots", "c_kv", "scores", "expert_ids", "logits", "moves"],
)
def test_traces_of_another_shape(gate: Gate, stage: str, change: Any) -> None:
    run = gate(shows(lambda s, i, a: [(s, i, change(a) if s == stage else a)]), "y", mode="round")

    assert stopped(run, f": {stage}: wrong ")


INTEGERS = ("parents", "tokens", "positions", "slots", "expert_ids", "targets", "moves")
WALK = ("path", "bonus", "emitted")  # returned too, and compared as such


@pytest.mark.parametrize("stage", [*INTEGERS, *WALK])
@pytest.mark.parametrize(
    "dtype", [bool, object, float, ml_dtypes.bfloat16, complex, "U8", ml_dtypes.int4]
)
def test_integers_of_another_dtype(gate: Gate, stage: str, dtype: Any) -> None:
    """One finding: the array, its dtype, and which is asked for."""
    run = gate(
        shows(lambda s, i, a: [(s, i, np.asarray(a).astype(dtype) if s == stage else a)]),
        "y",
        mode="round",
    )

    told_as = "answer" if stage in WALK else stage
    where = " of layer 1" if stage == "expert_ids" else ""
    kind = np.dtype(dtype)
    assert stopped(run, f": {told_as}: trace of {stage}{where} is {kind}; expected integers\n")
    assert 1 == run.out.count("ERROR  ")
    assert "did not show it" not in run.out
    assert "no diagnosis" not in run.out


@pytest.mark.parametrize("dtype", [np.int8, np.uint64, ">i8"])
def test_integers_of_any_width_are_integers(gate: Gate, dtype: Any) -> None:
    exact = {"tokens", "positions", "mask", "slots", "expert_ids", "targets", "moves"}
    run = gate(
        shows(lambda s, i, a: [(s, i, np.asarray(a).astype(dtype) if s in exact else a)]),
        "y",
        mode="round",
    )

    assert 0 == run.code, run.out


@pytest.mark.parametrize("dtype", [object, float, complex])
def test_a_mask_of_another_dtype(gate: Gate, dtype: Any) -> None:
    run = gate(shows(lambda s, i, a: [(s, i, a.astype(dtype) if s == "mask" else a)]), "y")

    kind = np.dtype(dtype)
    assert stopped(run, f": mask: trace of mask is {kind}; expected bool, or integers 0 and 1\n")


@pytest.mark.parametrize("stage", ["embedding", "scores", "router_scores", "expert_weights"])
@pytest.mark.parametrize("dtype", [bool, np.int64, object, complex, np.longdouble])
def test_numbers_of_another_dtype(gate: Gate, stage: str, dtype: Any) -> None:
    def change(name: str, layer: Any, array: Any) -> list[Any]:
        with np.errstate(invalid="ignore"):  # scores are -inf somewhere
            return [(name, layer, array.astype(dtype) if name == stage else array)]

    run = gate(shows(change), "y", mode="stepwise")

    kind = np.dtype(dtype)
    assert stopped(run, f" is {kind}; expected {FLOATING}\n")
    assert 1 == run.out.count("ERROR  ")


def test_what_comes_first_is_told_first(gate: Gate) -> None:
    """An array of a wrong dtype is told in its place: neither before a cause nor after its like."""
    wrong = {"mask": lambda a: a.astype(float), "scores": lambda a: a + 1}
    early = {"positions": lambda a: a + 1, "mask": lambda a: a.astype(float)}

    def showing(changes: Any) -> Hostile:
        return shows(lambda s, i, a: [(s, i, changes[s](a) if s in changes else a)])

    assert stopped(gate(showing(wrong), "y"), ": mask: trace of mask is float64; expected bool")
    assert stopped(gate(showing(early), "y"), ": positions: 6 of 6 differ")


def test_a_masked_snapshot(gate: Gate) -> None:
    def change(honest: LogicalCache) -> LogicalCache:
        return replace(honest, c_kv=np.ma.array(honest.c_kv, mask=True))

    run = gate(Hostile({"snapshot": changing(change)}), "y", mode="stepwise")

    assert stopped(run, "snapshot() c_kv is a masked array; expected a plain one, in which every")


def test_what_goes_wrong_in_the_judge_is_not_the_engine_s(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise IndexError("of kdtr's own")

    monkeypatch.setattr("kdtr.conformance.judge_stage.StageJudge.compare", broken)

    run = gate(Hostile(), "y", mode="stepwise")

    assert stopped(
        run,
        "answer: kdtr itself raised IndexError: of kdtr's own in comparing what was shown; please "
        "report it",
    )
    assert "the engine raised" not in run.out


@pytest.mark.parametrize("form", ["all", "one", "signs"])
@pytest.mark.parametrize("value", [1e300, -1.7e308])
@pytest.mark.parametrize("stage", ["embedding", "scores", "logits"])
def test_no_number_makes_a_diagnosis_warn(gate: Gate, stage: str, value: float, form: str) -> None:
    """Warnings are errors here: a diagnosis that warned would say that it raised."""

    def change(name: str, layer: Any, array: Any) -> list[Any]:
        if name == stage:
            array = np.asarray(array, np.float64)
            if form == "all":
                array = np.full(array.shape, value)
            elif form == "signs":
                array = np.sign(array) * value
            else:
                array = array.copy()
                array.flat[0] = value
        return [(name, layer, array)]

    run = gate(shows(change), "y", mode="stepwise")

    assert stopped(run, f": {stage}: ")
    assert "no diagnosis" not in run.out
    assert "Warning" not in run.err


@pytest.mark.parametrize("stage", ["embedding", "c_kv", "router_scores", "final_hidden", "logits"])
def test_nan_everywhere(gate: Gate, stage: str) -> None:
    run = gate(shows(lambda s, i, a: [(s, i, a * np.nan if s == stage else a)]), "y", mode="round")

    assert stopped(run, f": {stage}: ")
    assert "differ in being finite" in run.out


@pytest.mark.parametrize(
    "stage", ["parents", "tokens", "mask", "q_pe", "expert_ids", "logits", "targets", "moves"]
)
def test_a_declared_stage_that_is_not_shown_is_an_error(gate: Gate, stage: str) -> None:
    run = gate(shows(lambda s, i, a: [(s, i, a)] if s != stage else []), "y", mode="round")

    assert stopped(run, f"{stage}: the engine declares the stage {stage}, but did not show it")


def test_a_stage_shown_for_one_layer_only(gate: Gate) -> None:
    one = shows(lambda s, i, a: [(s, i, a)] if (s, i) != ("c_kv", 1) else [])

    assert stopped(gate(one, "y"), "declares the stage c_kv, but did not show it of layer 1")


def test_the_judge_keeps_copies_of_what_is_traced(gate: Gate) -> None:
    """An engine may reuse its buffers: Array is valid until the next call."""
    shown: list[Any] = []

    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        buffer = np.array(array)
        trace(stage, layer, buffer)
        buffer[...] = 0
        shown.append(stage)

    def verify(original: Any, tree: Any, **rest: Any) -> Any:
        answer = original(tree, **rest)
        shown.append(answer)
        return answer

    def accept(original: Any, tree: Any) -> Any:
        shown[-1].logits[...] = np.nan
        return original(tree)

    run = gate(Hostile({"verify": verify, "accept": accept}, show=show), "y")

    assert 0 == run.code, run.out
    assert shown


def test_traces_in_reverse_order_and_after_the_work(gate: Gate) -> None:
    def late(original: Any, *args: Any, trace: Any = None, **rest: Any) -> Any:
        if trace is None:
            return original(*args, **rest)
        kept: list[Any] = []
        answer = original(
            *args, trace=lambda *one: kept.append((*one[:2], np.array(one[2]))), **rest
        )
        for one in reversed(kept):
            trace(*one)
        return answer

    verbs = ("prefill", "verify", "round", "decode", "forward_tokens")
    run = gate(Hostile(dict.fromkeys(verbs, late)), "y", "ar")

    assert 0 == run.code, run.out


def test_a_stage_shown_twice(gate: Gate) -> None:
    """Which of the two would be judged? Neither: it is said."""
    twice = shows(lambda s, i, a: [(s, i, a)] * (2 if (s, i) == ("c_kv", 1) else 1))

    run = gate(twice, "y", mode="stepwise")

    assert stopped(run, "c_kv of layer 1 was traced twice; expected once per forward")


@pytest.mark.parametrize(
    ("stage", "mode"),
    [("logits", "stepwise"), ("logits", "forward"), ("path", "round"), ("emitted", "round")],
)
def test_a_traced_stage_and_the_answer_must_agree(gate: Gate, stage: str, mode: str) -> None:
    """One that shows the right thing and returns another is wrong where it is used."""

    def other(s: str, i: int | None, a: Any) -> list[Any]:
        return [(s, i, np.nextafter(a, a.dtype.type(9)) if s == "logits" else a + 1)]

    run = gate(shows(lambda s, i, a: other(s, i, a) if s == stage else [(s, i, a)]), "y", mode=mode)

    assert stopped(run, f"the traced {stage} and the returned one differ; expected one answer")


# Inputs


def test_an_engine_cannot_change_what_it_is_given(gate: Gate) -> None:
    """Lists and arrays are the engine's own copies; weights and draft logits are read-only."""
    refused: list[str] = []

    def spoil(array: Any, what: str) -> None:
        try:
            array.flags.writeable = True
            array[...] = 0
        except ValueError:
            refused.append(what)

    def load(original: Any, source: Any) -> Any:
        model = original(source)
        with pytest.raises(TypeError):
            source[1]["lm_head.weight"] = None
        for name, array in source[1].items():
            spoil(array, name)
        return model

    def prefill(original: Any, tokens: Any, **rest: Any) -> Any:
        answer = original(tokens, **rest)
        tokens.clear()
        return answer

    def build(original: Any, logits: Any, budget: int) -> Any:
        tree = original(logits, budget)
        spoil(logits, "draft_logits")
        return tree

    def forward_tokens(original: Any, tokens: Any, positions: Any, mask: Any, **rest: Any) -> Any:
        answer = original(list(tokens), positions.copy(), mask.copy(), **rest)
        tokens.clear()
        positions[:] = -1
        mask[:] = False
        return answer

    answers = {"load": load, "prefill": prefill, "build": build, "forward_tokens": forward_tokens}
    run = gate(Hostile(answers))

    assert 0 == run.code, run.out
    assert {"lm_head.weight", "draft_logits"} <= set(refused)


def test_nothing_an_engine_is_handed_leads_to_the_expectations(gate: Gate) -> None:
    """Public attributes, items and array bases of the weights: only config, weights and input."""
    reached: list[str] = []

    def load(original: Any, source: Any) -> Any:
        _, weights = source
        for name in ("expect/y/round0/targets", "../expect/y/round0/targets", "input/y/max_len"):
            with pytest.raises((KeyError, BundleError)):
                weights[name]
        public = [getattr(weights, name) for name in dir(weights) if not name.startswith("_")]
        reached.extend(name for name in map(str, (*weights, *public)) if "expect/" in name)
        base = weights["lm_head.weight"]
        while base is not None:
            reached.extend(["mmap"] * (type(base).__name__ in ("mmap", "Bundle")))
            base = getattr(base, "base", None)
        return original(source)

    run = gate(Hostile({"load": load}), "y")

    assert 0 == run.code
    assert [] == reached


def test_how_far_a_determined_engine_gets(gate: Gate) -> None:
    """In one process nothing is out of reach: private slots, frames and the collector lead there.

    This pins what is known, so that nobody takes the wall for higher than it is. Only another
    process keeps a secret.
    """
    found: dict[str, bool] = {}

    def load(original: Any, source: Any) -> Any:
        view = source[1]._Renamed__tensors
        found["entries of the view"] = any("expect/" in name for name in view._entries)
        found["map behind the view"] = b"expect/y/round0/targets" in view._payloads.mapped()[:]
        return original(source)

    def verify(original: Any, tree: Any, **rest: Any) -> Any:
        frame: Any = sys._getframe()
        held: list[Any] = []
        while frame is not None:
            held.extend(frame.f_locals.values())
            frame = frame.f_back
        found["frames"] = any(type(one).__name__ == "Expectation" for one in held)
        found["collector"] = any(type(one).__name__ == "GoldenBundle" for one in gc.get_objects())
        return original(tree, **rest)

    run = gate(Hostile({"load": load, "verify": verify}), "y", mode="stepwise")

    assert 0 == run.code, run.out
    assert {
        "entries of the view": False,
        "map behind the view": True,
        "frames": True,
        "collector": True,
    } == found


# What an engine claims


@pytest.mark.parametrize(
    ("verb", "mode", "case"),
    [("decode", "decode", "ar"), ("round", "round", "y"), ("snapshot", "round", "y")],
)
def test_a_verb_that_is_claimed_and_absent(gate: Gate, verb: str, mode: str, case: str) -> None:
    def absent(original: Any, *args: Any, **rest: Any) -> Any:
        raise AttributeError(f"no {verb}")

    run = gate(Hostile({verb: absent}), case, mode=mode)

    assert stopped(run, f"the engine raised AttributeError: no {verb}")


def test_info_that_changes_between_looks(gate: Gate) -> None:
    """It is read when the engine is loaded, and once for the run and the report."""
    looks: list[int] = []

    def info(honest: Any) -> Any:
        looks.append(1)
        if len(looks) > 3:
            raise RuntimeError("enough")
        return honest

    run = gate(Hostile(info=info), "y")

    assert 0 == run.code, run.out


def test_a_coarser_profile_than_the_truth_is_shown_but_not_questioned(
    judge: Callable[..., GateResult], small: Path
) -> None:
    """An engine declares its precision; the report says it, and the bounds follow."""

    def info(honest: Any) -> Any:
        return replace(honest, profile=replace(honest.profile, logits="bfloat16"))

    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        trace(stage, layer, array.astype(ml_dtypes.bfloat16) if stage == "logits" else array)

    coarse = verified(logits=lambda a: a.astype(ml_dtypes.bfloat16))
    engine = Hostile(coarse, info=info, show=show)
    gate = judge(engine, small, "y", modes=["stepwise"])

    assert {Verdict.PASS} == {result.verdict for result in gate.results}
