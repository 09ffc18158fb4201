"""`kdtr gate --self`: an engine against itself names what is wrong, without any golden number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planted_faults
import pytest

from kdtr.conformance import GateResult, Verdict, load_engine
from kdtr.conformance.cli import main
from kdtr.conformance.self_gate import SelfRequest, run_self
from kdtr.contract import EngineInfo, KdtrError, NumericProfile, UnsupportedError, Verified


@pytest.fixture(scope="module")
def source(small: Path) -> str:
    """A model with random weights: its bundle's golden numbers are not read."""
    return str(small)


def logits_only(engine: Any, *without: str) -> Any:
    """The engine without a single stage, and without these verbs."""
    info = replace(engine.info, stages=frozenset(), verbs=engine.info.verbs - set(without))
    return SimpleNamespace(info=info, load=engine.load)


def judged(engine: Any, source: str, *only: str) -> GateResult:
    request = SelfRequest(source, only=frozenset(only))
    return run_self(engine, request, engine_name="engine")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_honest_engine_passes(source: str, dtype: str) -> None:
    gate = judged(logits_only(load_engine("host", {"dtype": dtype})), source)

    assert gate.passed
    assert [] == gate.findings
    assert [
        "noise",
        "context",
        "root-alone",
        "chains",
        "trees",
        "untouched",
        "commits",
        "greedy",
    ] == [result.case for result in gate.results]
    assert all(result.rows for result in gate.results)


def test_an_engine_without_forward_tokens_is_judged_too(source: str) -> None:
    engine = logits_only(load_engine("host"), "forward_tokens", "snapshot", "decode", "round")

    assert judged(engine, source).passed


@pytest.mark.parametrize(
    ("fault", "case", "rule", "words"),
    [
        ("sibling_visible", "trees", "MASK-2", "also saw node 1 (its sibling)"),
        ("position_by_index", "trees", "POS-1", "positions are L + index"),
        ("root_low", "root-alone", "POS-1", "the root is one position too low"),
        (
            "no_compaction",
            "commits",
            "COMMIT-1",
            "the next row hangs on nodes 1, 2; the first rows of the tree: nothing was moved",
        ),
    ],
)
def test_a_fault_is_named(source: str, fault: str, case: str, rule: str, words: str) -> None:
    gate = judged(logits_only(planted_faults.make_engine(fault)), source)

    (finding,) = gate.findings  # what follows is blocked
    assert (Verdict.FAIL, case) == (finding.verdict, finding.place.case)
    assert rule in finding.rules
    assert words in finding.summary
    assert f"--model {source} --case {case}" in finding.reproduce
    after = [result for result in gate.results if result.verdict is Verdict.BLOCKED]
    assert after == gate.results[gate.results.index(after[0]) :] if after else case == "greedy"


@pytest.mark.parametrize("fault", ["sibling_visible", "position_by_index", "no_compaction"])
def test_without_forward_tokens_a_fault_is_still_seen(source: str, fault: str) -> None:
    engine = logits_only(planted_faults.make_engine(fault), "forward_tokens")

    assert not judged(engine, source).passed


class Oracle:
    """A session whose logits are a function of the row's own token: no mask, cache or position."""

    def __init__(self, vocab_size: int, logits: Any) -> None:
        self.committed_len, self.root = 0, None
        self._vocab_size, self._logits = vocab_size, logits

    def prefill(self, tokens: Any) -> int:
        self.committed_len += len(tokens)
        self.chunked = getattr(self, "chunked", 0) + 1
        return 0

    def set_root(self, token: int) -> None:
        self.root = token

    def verify(self, tree: Any) -> Any:
        rows = np.stack([self._logits(self, t, self._vocab_size) for t in tree.tokens])
        return Verified(rows, tuple(int(row.argmax()) for row in rows))

    def commit(self, acceptance: Any) -> None:
        self.committed_len += len(acceptance.path)

    def close(self) -> None:
        pass


def oracle(logits: Any) -> Any:
    info = EngineInfo(
        "oracle",
        "1",
        "cpu",
        NumericProfile(),
        frozenset({"prefill", "set_root", "verify", "commit"}),
    )
    config = SimpleNamespace(vocab_size=50, max_position_embeddings=128)
    model = SimpleNamespace(
        config=config, open=lambda max_len: Oracle(50, logits), close=lambda: None
    )
    return SimpleNamespace(info=info, load=lambda source: model)


def by_token(session: Any, token: int, n: int) -> np.ndarray:
    return np.random.default_rng(token).random(n)


@pytest.mark.parametrize("logits", [by_token, lambda session, token, n: np.ones(n)])
def test_an_engine_that_reads_nothing_before_a_row_fails(logits: Any) -> None:
    gate = judged(oracle(logits), "x")

    (finding,) = gate.findings
    assert "context" == finding.place.case
    assert "another first token does not move a row beyond its bound" in finding.summary


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: None, "verify() returned None; expected a Verified"),
        (
            lambda honest: replace(honest, logits=honest.logits.astype(np.longdouble)),
            f"verify() logits is {np.dtype(np.longdouble)}; expected floating-point numbers: ",
        ),
        (
            lambda honest: replace(honest, logits=np.ma.array(honest.logits)),
            "verify() logits is a masked array; expected a plain one",
        ),
    ],
)
def test_what_is_no_answer_is_said_so(
    monkeypatch: pytest.MonkeyPatch, change: Any, text: str
) -> None:
    honest = Oracle.verify
    monkeypatch.setattr(Oracle, "verify", lambda session, tree: change(honest(session, tree)))

    (finding,) = judged(oracle(by_token), "x").findings

    assert ("answer", Verdict.ERROR) == (finding.stage, finding.verdict)
    assert finding.summary.startswith(text)


def padded(engine: Any, value: float) -> Any:
    """The engine with the last three logits of every row masked, as padding of a vocabulary is."""

    def masked(verified: Any) -> Any:
        logits = np.array(verified.logits)
        logits[:, -3:] = value
        return Verified(logits, verified.targets)

    def load(source: Any) -> Any:
        model = engine.load(source)

        def open_(*, max_len: int) -> Any:
            session = model.open(max_len=max_len)
            verify = session.verify
            session.verify = lambda tree, **more: masked(verify(tree, **more))
            return session

        return SimpleNamespace(config=model.config, open=open_, close=model.close)

    info = replace(engine.info, verbs=engine.info.verbs - {"forward_tokens"}, stages=frozenset())
    return SimpleNamespace(info=info, load=load)


@pytest.mark.parametrize("value", [-1e9, np.finfo(np.float32).min, -np.inf])
def test_a_masked_vocabulary_hides_no_fault_and_is_none(source: str, value: float) -> None:
    assert judged(padded(load_engine("host"), value), source).passed

    gate = judged(padded(planted_faults.make_engine("sibling_visible"), value), source)

    (finding,) = gate.findings
    assert "also saw node 1 (its sibling)" in finding.summary


@pytest.mark.parametrize("error", [SystemExit(0), RuntimeError("no"), FileNotFoundError(2, "no")])
def test_what_load_raises_is_an_engine_error(
    error: BaseException, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(source: Any) -> Any:
        raise error

    engine = SimpleNamespace(info=load_engine("host").info, load=load)
    monkeypatch.setattr("kdtr.conformance.cli.load_engine", lambda name, options: engine)

    assert 2 == main(["gate", "--self", "--engine", "x", "--model", "y"])

    assert f"load() raised {type(error).__name__}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"vocab_size": "abc"}, "config.vocab_size = 'abc'; expected an integer"),
        ({"vocab_size": 5}, "the vocabulary has 5 tokens"),
        ({"vocab_size": 50, "max_position_embeddings": "x"}, "expected an integer"),
        ({"vocab_size": 50, "max_position_embeddings": 20}, "the model has 20 positions"),
    ],
)
def test_a_model_that_is_too_small_or_odd_is_refused(config: dict[str, Any], told: str) -> None:
    engine = oracle(by_token)
    model = engine.load("x")
    model.config = SimpleNamespace(**config)

    with pytest.raises(KdtrError, match=told):
        judged(SimpleNamespace(info=engine.info, load=lambda source: model), "x")


def test_nan_behind_chunks_is_no_noise() -> None:
    def nan_in_two_chunks(session: Any, token: int, n: int) -> np.ndarray:
        return by_token(session, token, n) * (np.nan if session.chunked == 2 else 1)

    gate = judged(oracle(nan_in_two_chunks), "x")

    (finding,) = gate.findings
    assert ("noise", "prefill in 2 chunks") == (finding.place.case, finding.where[:19])


def test_a_small_difference_between_chunkings_is_no_noise_either() -> None:
    def off_by_a_thousandth(session: Any, token: int, n: int) -> np.ndarray:
        return by_token(session, token, n) + 1e-3 * (session.chunked > 1)

    assert "noise" == judged(oracle(off_by_a_thousandth), "x").findings[0].place.case


def test_what_is_missing_is_said_by_name(source: str) -> None:
    engine = logits_only(load_engine("host"), "set_root")

    with pytest.raises(UnsupportedError, match="does not offer set_root"):
        judged(engine, source)


def test_a_line_that_reproduces(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["gate", "--self", "--engine", "host", "--model", source, "--case", "root-alone"])

    assert 0 == code
    out = capsys.readouterr().out
    assert "root-alone" in out
    assert "\ngate --self passed: " in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["gate", "--engine", "host"], "no bundle to judge by"),
        (["gate", "--engine", "host", "--self"], "--self needs --model SOURCE"),
        (
            ["gate", "--engine", "host", "--model", "x", "--vocab-size", "9", "b.kdtr"],
            "CaseError: --model and --vocab-size belong to --self; give it too",
        ),
        (
            ["gate", "--engine", "host", "--max-len", "0", "b.kdtr"],
            "CaseError: --max-len belongs to --self; give it too",
        ),
        (
            ["gate", "--engine", "host", "--seed", "0", "b.kdtr"],
            "CaseError: --seed belongs to --self; give it too",
        ),
        (["gate", "--engine", "host", "--self", "--model", "x", "b.kdtr"], "leave out b.kdtr"),
        (["gate", "--engine", "host", "--self", "--model", "x", "--case", "y"], "expected one of"),
        (["gate", "--engine", "host", "--self", "--model", "x", "--until", "y"], "leave them out"),
        (["gate", "--engine", "host", "--self", "--model", "x", "--max-len", "9"], "at least 48"),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert 2 == main(words)

    assert told in capsys.readouterr().err
