"""`kdtr serve-engine`: what the gate sees of an engine, it sees of the same engine over stdio."""

from __future__ import annotations

import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hostile_engines import Hostile

from kdtr.conformance import GateResult, load_engine, run_gate
from kdtr.conformance.stdio_engine import StdioEngine
from kdtr.conformance.stdio_server import serve
from kdtr.contract import (
    SILENT,
    Acceptance,
    CheckpointError,
    DraftTree,
    EngineError,
    InputError,
    LogicalCache,
    SessionError,
    TreeError,
    Verified,
)
from kdtr.kdtr_format import Bundle, write_bundle

ENGINES = Path(__file__).parent / "engines"
FAULTY = "stdio_faulty:make_engine"


def serving(name: str, **options: str) -> str:
    """The name of an engine in another process."""
    code = f"import sys; sys.path.append({str(ENGINES)!r}); from kdtr.conformance.cli import main; "
    words = [sys.executable, "-c", code + "sys.exit(main())", "serve-engine", "--engine", name]
    for key, value in options.items():
        words += ["--engine-option", f"{key}={value}"]
    return f"stdio:{shlex.join(words)}"


Judge = Callable[..., GateResult]


@pytest.fixture
def over_stdio() -> Iterator[Judge]:
    """over_stdio(name, *bundles, timeout_s=, **options): the gate's result."""
    engines: list[Any] = []

    def judge(name: str, *bundles: Path, timeout_s: float = 60, **options: str) -> GateResult:
        served = serving(name, **options)
        engines.append(load_engine(served, {"timeout_s": timeout_s}))
        return run_gate(engines[-1], bundles, engine_name="e")

    yield judge
    for engine in engines:
        engine.close()


def verdicts(result: GateResult) -> list[tuple[Any, ...]]:
    """Everything that the report is made of, but for the reproduction lines."""
    return [
        (
            found.bundle,
            found.case,
            found.mode,
            found.verdict,
            found.comparisons,
            found.rows,
            found.points,
            found.blocked,
            sorted(found.unshown),
            [replace(finding, reproduce="") for finding in found.findings],
        )
        for found in result.results
    ]


def summaries(result: GateResult) -> dict[tuple[str, str], str]:
    """The first finding of each case and mode that has one."""
    findings = reversed(result.findings)
    return {(f.place.case, f.place.mode): f.summary for f in findings}


def _case_summaries(result: GateResult) -> dict[tuple[str, str], str]:
    """But for the words of load, close and script, which tell an EngineError with its name."""
    return {key: text for key, text in summaries(result).items() if key[0] not in ("all", "state")}


@pytest.mark.parametrize("name", ["base", "yarn-both"])
def test_the_same_verdicts_as_in_process(corpus: Path, over_stdio: Judge, name: str) -> None:
    bundle = corpus / f"{name}.kdtr"

    served = over_stdio("host", bundle)

    assert served.passed
    assert verdicts(run_gate(load_engine("host"), [bundle], engine_name="e")) == verdicts(served)


@pytest.mark.parametrize(
    ("fault", "verb"),
    [
        ("none", "round"),
        ("prints", "verify"),
        ("wrong", "verify"),
        ("short", "verify"),
        ("nothing", "verify"),
        ("nothing", "round"),
        ("nothing", "snapshot"),
        ("nothing", "committed_len"),
        ("raises", "verify"),
        ("raises_after", "round"),
        ("engine_error", "verify"),
        ("leaves", "commit"),
        ("raises", "close"),
        ("raises", "open"),
        ("raises", "load"),
        ("raises", "model_close"),
        ("twice", ""),
        ("maks", ""),
        ("off_layer", ""),
        ("wrong_hidden", ""),
    ],
)
def test_the_same_findings_of_an_engine_with_a_fault(
    small: Path, over_stdio: Judge, monkeypatch: pytest.MonkeyPatch, fault: str, verb: str
) -> None:
    monkeypatch.setattr("os.write", lambda descriptor, text: len(text))  # the banners
    monkeypatch.setattr("os.read", lambda descriptor, n: b"")
    here = load_engine(FAULTY, {"fault": fault, "verb": verb})
    expected = run_gate(here, [small], engine_name="e")
    monkeypatch.undo()

    served = over_stdio(FAULTY, small, fault=fault, verb=verb)

    assert (fault in ("none", "prints")) == served.passed
    told = [(f.case, f.mode, f.verdict) for f in expected.results if f.case != "state"]
    assert told == [(f.case, f.mode, f.verdict) for f in served.results if f.case != "state"]
    assert _case_summaries(expected) == _case_summaries(served)


@pytest.fixture(scope="module")
def trees(record: Callable[..., Path], small_model: SimpleNamespace) -> Path:
    """Without plain decoding, which would block the others."""
    return record([plan for plan in small_model.plans if plan.alias in ("y", "drafted")])


def test_a_process_that_dies_takes_one_case_with_it(trees: Path, over_stdio: Judge) -> None:
    result = over_stdio(FAULTY, trees, fault="dies", verb="round")

    by_mode: dict[str, set[str]] = {}
    for found in result.results:
        by_mode.setdefault(found.mode, set()).add(found.verdict.name)
    assert {"PASS"} == by_mode["stepwise"] == by_mode["forward"]
    assert {"ERROR"} == by_mode["round"] == by_mode["shipped"]
    # Of the scripts that of the state asks the same round twice, and files rest on a case of it.
    assert {"ERROR", "BLOCKED"} == by_mode["script"]
    texts = {text for (_, mode), text in summaries(result).items() if mode != "script"}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("round(): the engine exited with code 9 before it replied; its stderr")
    assert "a banner on stdout | another one, past Python" in text


def test_a_process_that_hangs_takes_one_case_with_it(small: Path, over_stdio: Judge) -> None:
    result = over_stdio(FAULTY, small, fault="hangs", verb="decode", timeout_s=3)

    (key,) = summaries(result)
    assert ("ar", "decode") == key
    assert (
        "decode(): no reply within timeout_s = 3 s; the engine was stopped"
        in (summaries(result)[key])
    )


def test_a_process_that_dies_in_plain_decoding_is_told_once(small: Path, over_stdio: Judge) -> None:
    result = over_stdio(FAULTY, small, fault="dies", verb="round")

    verdicts = {(one.case, one.mode): one.verdict.name for one in result.results}
    assert "ERROR" == verdicts["ar", "round"] == verdicts["ar", "shipped"]
    assert "BLOCKED" == verdicts["y", "round"] == verdicts["drafted", "shipped"]
    assert "PASS" == verdicts["y", "stepwise"] == verdicts["ar", "decode"]


def test_a_process_that_dies_when_it_should_refuse(trees: Path, over_stdio: Judge) -> None:
    """Death is no refusal (state_script.py)."""
    result = over_stdio(FAULTY, trees, fault="dies", verb="commit")

    found = [finding for finding in result.findings if finding.place.point == "commit of nothing"]
    assert found[0].summary.startswith(
        "raised ExchangeError: commit(): the engine exited with code 9 before it replied"
    )


def test_the_command(kdtr: Callable[..., SimpleNamespace], small: Path) -> None:
    served = kdtr("gate", small, "--engine", serving("host", page_size="2"), "--case", "ar")
    here = kdtr("gate", small, "--engine", "host", "--engine-option", "page_size=2", "--case", "ar")

    assert (0, "") == (served.code, served.err)
    assert here.out.partition("comparisons")[0] == served.out.partition("comparisons")[0]


def test_the_factory_s_refusal_in_its_own_class() -> None:
    with pytest.raises(EngineError, match=r"^engine stdio:.*: page_size = 0; expected at least 1$"):
        load_engine(serving("host", page_size="0"))
    with pytest.raises(EngineError, match=r"no engine is registered as 'hots' \(registered: "):
        load_engine(serving("hots"))


# Values, bit for bit


class Kept:
    """A trace that keeps copies."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, int | None], np.ndarray] = {}

    def __call__(self, stage: str, layer: int | None, array: Any, /) -> None:
        self.arrays[stage, layer] = np.array(array)


def test_every_verb_gives_the_bits_of_the_engine(small_model: SimpleNamespace) -> None:
    source = (small_model.config, small_model.weights)
    with load_engine(serving("host")) as remote:  # type: ignore[attr-defined]
        here, there = (engine.load(source) for engine in (load_engine("host"), remote))
        a, b = (model.open(max_len=40) for model in (here, there))
        for session in (a, b):
            assert (0, None) == (session.committed_len, session.root)
        for call in (
            lambda s, t: s.prefill([3, 0, 36], trace=t),
            lambda s, t: s.decode(trace=t),
            lambda s, t: s.verify(_tree(s), trace=t),
            lambda s, t: s.accept(_tree(s)),
            lambda s, t: s.accept(_tree(s), [1, 2, 3]),
            lambda s, t: s.commit(s.accept(_tree(s))),
            lambda s, t: s.round(_tree(s), trace=t),
            lambda s, t: s.build(np.linspace(0, 1, 74, dtype=np.float32).reshape(2, 37), 4),
            lambda s, t: s.forward_tokens([5], np.array([s.committed_len]), _all(s), trace=t),
            lambda s, t: s.snapshot(),
            lambda s, t: s.set_root(4),
            lambda s, t: s.reset(),
        ):
            seen = Kept(), Kept()
            expected, found = call(a, seen[0]), call(b, seen[1])
            assert _same(expected, found)
            assert set(seen[0].arrays) == set(seen[1].arrays)
            assert all(_same(x, seen[1].arrays[key]) for key, x in seen[0].arrays.items())
            assert (a.committed_len, a.root) == (b.committed_len, b.root)
        for session in (a, b):
            session.close()
            with pytest.raises(SessionError):
                _ = session.prefill([1])
        there.close()


def _tree(session: Any) -> DraftTree:
    return DraftTree((session.root, 1, 2), (-1, 0, 0))


def _all(session: Any) -> np.ndarray:
    return np.ones((1, session.committed_len + 1), bool)


def _same(x: Any, y: Any) -> bool:
    if isinstance(x, Verified):
        return x.targets == y.targets and _same(x.logits, y.logits)
    if isinstance(x, LogicalCache):
        return all(
            _same(getattr(x, name), getattr(y, name))
            for name in ("tokens", "positions", "c_kv", "k_pe")
        )
    if isinstance(x, np.ndarray):
        return (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())
    return bool(x == y)


# The loop itself, without a process


ODD = {
    "f64": np.array([[np.nan, -np.inf, -0.0, 5e-324]]),
    "bf16": np.array([[np.nan, -np.inf, -0.0, 1.5]], ml_dtypes.bfloat16),
    "f16": np.array([[np.nan, np.inf, 6e-8, 1.5]], np.float16),
}


class Given:
    """An engine that answers with what it was given, and remembers how it was called."""

    def __init__(self, array: np.ndarray | None = None) -> None:
        self.info = replace(load_engine("host").info, name="given", stages=frozenset({"scores"}))
        self.array = array
        self.calls: list[Any] = []
        self.committed_len: Any = 0
        self.root: Any = None

    def load(self, source: Any) -> Any:
        return self

    def open(self, *, max_len: int) -> Any:
        return self

    def close(self) -> None: ...

    def verify(self, tree: DraftTree, **rest: Any) -> Verified:
        self.calls.append(rest)
        if "trace" in rest:
            rest["trace"]("scores", 1, self.array)
        return Verified(self.array, (0,) * len(tree))

    def accept(self, tree: DraftTree, *rest: Any, **named: Any) -> Acceptance:
        self.calls.append((rest, named))
        return Acceptance((0,), 1)

    def forward_tokens(self, tokens: Any, positions: Any, mask: Any) -> Any:
        self.calls.append((tokens, positions, mask))
        mask[:] = False  # its own copy
        return np.zeros((len(tokens), 3))


def exchange(engine: Any, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """The replies to hello, load, open and these requests; the last ones only."""
    first = [
        {"verb": "hello", "kdtr_stdio": 1},
        {"verb": "load", "model": 1, "source": "x"},
        {"verb": "open", "model": 1, "session": 1, "max_len": 5},
    ]
    return talk(engine, *first, *requests)[3:]


def talk(engine: Any, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    lines = [json.dumps({"id": i, **request}) for i, request in enumerate(requests)]
    replies = io.BytesIO()
    serve(lambda: engine, io.BytesIO("\n".join([*lines, ""]).encode()), replies)
    found = [json.loads(line) for line in replies.getvalue().splitlines()]
    assert [*range(len(requests))] == [reply.pop("id") for reply in found]
    return found


VERIFY = {"verb": "verify", "session": 1, "tokens": [1], "parents": [-1]}


@pytest.mark.parametrize("kind", ODD)
def test_odd_values_keep_their_bits(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out.kdtr"

    (reply,) = exchange(Given(ODD[kind]), {**VERIFY, "trace": True, "out": str(out)})

    assert {"ok": {"targets": [0]}, "wrote": True} == reply
    with Bundle.open(out) as bundle:
        assert ("logits", "trace/scores/1") == bundle.names()
        assert all(_same(ODD[kind], bundle[name]) for name in bundle.names())


def test_sixteen_bit_integers_keep_their_values(tmp_path: Path) -> None:
    out = tmp_path / "out.kdtr"

    exchange(Given(np.array([[-3]], np.int16)), {**VERIFY, "trace": True, "out": str(out)})

    with Bundle.open(out) as bundle:
        assert -3 == bundle["trace/scores/1"].item()


def test_an_engine_is_called_as_in_process(tmp_path: Path) -> None:
    """No keyword that the caller did not give: an engine need not know it."""
    engine = Given()
    accept = {**VERIFY, "verb": "accept", "targets": None, "stop_tokens": [], "max_emitted": None}

    exchange(
        engine,
        {**VERIFY, "trace": False, "out": "x"},
        accept,
        {**accept, "targets": [4], "stop_tokens": [2], "max_emitted": 3},
    )

    plain, unlimited, limited = engine.calls
    assert {} == plain
    assert ((), {}) == unlimited
    assert ([4],) == limited[0]
    assert (frozenset({2}), 3) == (limited[1]["limit"].stop_tokens, limited[1]["limit"].max_emitted)


def test_an_engine_may_write_into_what_it_is_given(tmp_path: Path) -> None:
    sent, out, engine = tmp_path / "in.kdtr", tmp_path / "out.kdtr", Given()
    write_bundle(sent, {"positions": np.arange(2), "mask": np.ones((2, 2), bool)}, {})
    forward = {"verb": "forward_tokens", "session": 1, "tokens": [1, 2], "trace": False}

    (reply,) = exchange(engine, {**forward, "in": str(sent), "out": str(out)})

    assert {"ok": {}, "wrote": True} == reply
    assert [0, 1] == engine.calls[0][1].tolist()


def test_what_was_shown_before_an_error_is_written(tmp_path: Path) -> None:
    class Breaks(Given):
        def verify(self, tree: DraftTree, **rest: Any) -> Verified:
            rest["trace"]("scores", 0, np.zeros((1, 2)))
            raise TreeError("too late")

    out = tmp_path / "out.kdtr"

    (reply,) = exchange(Breaks(), {**VERIFY, "trace": True, "out": str(out)})

    assert {"error": {"class": "TreeError", "text": "too late"}, "wrote": True} == reply
    with Bundle.open(out) as bundle:
        assert ("trace/scores/0",) == bundle.names()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"committed_len": True}, "committed_len returned a bool; expected an integer"),
        ({"committed_len": 2**64}, f"committed_len gave {2**64}; expected an integer of 64 bits"),
        ({"root": "3"}, "root returned a str; expected an integer"),
    ],
)
def test_a_state_that_is_none(change: dict[str, Any], text: str) -> None:
    engine = Given()
    vars(engine).update(change)

    (reply,) = exchange(engine, {"verb": "state", "session": 1})

    assert {"error": {"class": "EngineError", "text": text}} == reply


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "none" / "out.kdtr"

    (reply,) = exchange(Given(np.zeros((1, 2))), {**VERIFY, "trace": False, "out": str(out)})

    assert reply["error"]["text"].startswith("verify(): the tensors were not written: ")


def test_requests_out_of_order() -> None:
    class_and_text = [
        (reply["error"]["class"], reply["error"]["text"])
        for reply in talk(
            Given(),
            {"verb": "state", "session": 1},
            {"verb": "hello", "kdtr_stdio": 2},
            {"verb": "hello", "kdtr_stdio": 1, "more": 1},
            {"verb": "state", "session": 1},
            {"verb": "unload", "model": 4},
        )
        if "error" in reply
    ]

    assert [
        ("EngineError", "state before hello"),
        ("UnsupportedError", "kdtr_stdio = 2; this engine speaks 1"),
        ("SessionError", "session 1 was never opened"),
        ("SessionError", "model 4 is not loaded"),
    ] == class_and_text


def test_a_line_that_is_no_request_ends_the_loop() -> None:
    with pytest.raises(EngineError, match="is no JSON object"):
        serve(Given, io.BytesIO(b"hello\n"), io.BytesIO())


def test_a_command_that_is_none() -> None:
    for name, text in (
        ("stdio:", "engine 'stdio:'; expected stdio:COMMAND WITH ARGUMENTS"),
        ("stdio:no-such-command x", "engine stdio:no-such-command x: no-such-command cannot be "),
        ("stdio:'", "engine stdio:': No closing quotation"),
    ):
        with pytest.raises(EngineError) as refused:
            load_engine(name)
        assert str(refused.value).startswith(text)


def test_refusals_cross_in_their_own_class(small_model: SimpleNamespace) -> None:
    with StdioEngine(serving("host").removeprefix("stdio:")) as engine:
        with pytest.raises(CheckpointError, match="does not exist"):
            engine.load("no/such/model")
        session = engine.load((small_model.config, small_model.weights)).open(max_len=9)
        session.prefill([1, 2])
        with pytest.raises(TreeError, match=r"tokens\[0\] = "):
            session.verify(DraftTree(((session.root + 1) % 37,), (-1,)))
        with pytest.raises(InputError, match="float"):
            session.forward_tokens([1], np.zeros(1), np.ones((1, 3), bool), trace=SILENT)
        with pytest.raises(SessionError):
            session.commit(Acceptance((0,), 1))


def test_hostile_is_honest_by_default(small: Path) -> None:
    """What the comparisons above rest on."""
    assert run_gate(Hostile(), [small], engine_name="e").passed
