"""A decision thinner than the bounds is reported with its gap, and is no failure (NUM-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planted_faults import make_swapped_experts, make_swapped_tokens

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.bundle import Expectation
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.near_tie import near_tie
from kdtr.conformance.tolerance import row_bound
from kdtr.contract import STAGE, ModelConfig, NumericProfile

CONFIG = ModelConfig.tiny()
FLOAT32 = NumericProfile()
W, E = CONFIG.vocab_size, CONFIG.n_routed_experts
PLAN = CasePlan(
    "ties", "thin", ("NUM-2",), (Planted((-1, 0, 0, 2), (0, 2, 3)), Planted((-1,))), ((3, 0, 7),)
)


def logits(*gaps: float) -> np.ndarray:
    """Per row token 1 tops with 8, token 2 follows by the gap."""
    rows = np.zeros((len(gaps), W))
    rows[:, 1] = 8
    rows[:, 2] = 8 - np.array(gaps)
    return rows


def allowed(rows: np.ndarray) -> float:
    """The sum of the two logits' bounds."""
    return 2 * float(row_bound(STAGE["logits"], None, rows, CONFIG, FLOAT32)[0, 0])


def token_tie(rows: np.ndarray, actual: list[int], **kwargs: object) -> str | None:
    expected = np.full(len(rows), 1)
    return near_tie(
        Expectation({"logits": rows}, ""),
        STAGE["targets"],
        None,
        expected,
        np.array(actual),
        CONFIG,
        kwargs.pop("profile", FLOAT32),  # type: ignore[arg-type]
        **kwargs,  # type: ignore[arg-type]
    )


# Tokens


def test_a_gap_within_the_bounds_is_a_tie_and_is_told() -> None:
    rows = logits(1, 1e-5)

    assert f"the logits of row 1 differ by 1e-05, less than {allowed(rows):.2g}" == token_tie(
        rows, [1, 2]
    )


def test_the_gap_may_be_as_large_as_the_two_bounds_and_no_larger() -> None:
    most = allowed(logits(0))

    assert token_tie(logits(most * (1 - 2.0**-20)), [2]) is not None
    assert token_tie(logits(most * (1 + 2.0**-20)), [2]) is None


def test_every_row_that_differs_must_be_thin() -> None:
    assert token_tie(logits(1e-5, 1e-5), [2, 2]) is not None
    assert token_tie(logits(1e-5, 1), [2, 2]) is None
    assert token_tie(logits(1e-5, 1e-5), [2, 3]) is None


@pytest.mark.parametrize("token", [-1, W, 2**40])
def test_a_token_out_of_the_vocabulary_is_no_tie(token: int) -> None:
    assert token_tie(logits(0), [token]) is None


def test_a_token_that_is_not_the_engine_s_own_top_is_no_tie() -> None:
    """ACC-1: the argmax is wrong, however thin the truth is."""
    own = logits(1e-5)
    flipped = own.copy()
    flipped[:, [1, 2]] = own[:, [2, 1]]

    assert token_tie(logits(1e-5), [2], logits=own) is None
    assert token_tie(logits(1e-5), [2], logits=flipped) is not None


def test_of_the_engine_s_own_equal_logits_the_lowest_id_is_right() -> None:
    assert token_tie(logits(0), [2], logits=logits(0)) is None


def test_equal_after_rounding_is_not_equal_before() -> None:
    """Logits stored in bfloat16 and summed in float32 tie where the engine saw a gap."""
    coarse = replace(FLOAT32, logits="bfloat16")

    assert token_tie(logits(1e-5), [2], logits=logits(0), profile=coarse) is not None
    assert token_tie(logits(1e-5), [3], logits=logits(0), profile=coarse) is None


@pytest.mark.parametrize(
    ("stage", "path", "row"), [("root", None, 2), ("bonus", [0, 1], 1), ("root", [0], 0)]
)
def test_root_and_bonus_hang_on_one_row(stage: str, path: list[int] | None, row: int) -> None:
    """After a prefill on the last row, after a round on the last of the path."""
    gaps = [1.0, 1.0, 1.0]
    gaps[row] = 1e-5
    tensors = {"logits": logits(*gaps)} | ({} if path is None else {"path": np.array(path)})

    def tie(tensors: dict[str, np.ndarray]) -> str | None:
        return near_tie(
            Expectation(tensors, ""), STAGE[stage], None, np.array(1), np.array(2), CONFIG, FLOAT32
        )

    assert f"the logits of row {row} differ by 1e-05, less than" in str(tie(tensors))
    assert tie({**tensors, "logits": logits(1, 1, 1)}) is None


@pytest.mark.parametrize("stage", ["positions", "path", "emitted", "committed_len", "moves"])
def test_other_integers_have_no_ties(stage: str) -> None:
    expectation = Expectation({"logits": logits(0)}, "")
    one, other = np.array([1]), np.array([2])

    assert near_tie(expectation, STAGE[stage], None, one, other, CONFIG, FLOAT32) is None


# Experts


def expert_tie(*gaps: float, differ: tuple[int, ...]) -> str | None:
    n = len(gaps)
    expectation = Expectation(
        {"layer1/router_scores": np.full((n, E), 0.5), "layer1/expert_gap": np.array(gaps)}, ""
    )
    expected = np.tile([0, 1, 2], (n, 1))
    actual = expected.copy()
    actual[list(differ), 2] = 3
    return near_tie(expectation, STAGE["expert_ids"], 1, expected, actual, CONFIG, FLOAT32)


def test_a_thin_choice_of_experts_is_a_tie() -> None:
    assert str(expert_tie(1.0, 1e-6, differ=(1,))).startswith("the choice of row 1 hangs on 1e-06")
    assert expert_tie(1.0, 1e-6, differ=(0,)) is None
    assert expert_tie(1.0, 1e-6, differ=(0, 1)) is None


# The gate


@pytest.fixture(scope="module")
def thin_tokens(record: Callable[..., Path], small_model: SimpleNamespace) -> Path:
    """Tokens 18..35 are tokens 0..17 to within a float32 rounding or two."""
    head = small_model.weights["lm_head.weight"].astype(np.float32)
    head[18:36] = head[:18] * np.float32(1 + 2.0**-22)
    head[36] = 0
    return record([PLAN], weights={**small_model.weights, "lm_head.weight": head})


def test_pinned_modes_go_on_after_a_near_tie_and_round_stops(
    judge: Callable[..., GateResult], thin_tokens: Path
) -> None:
    gate = judge(make_swapped_tokens(18), thin_tokens)

    assert gate.passed
    by_mode = {result.mode: result for result in gate.results}
    stepwise, fused = by_mode["stepwise"], by_mode["round"]
    assert Verdict.NEAR_TIE is stepwise.verdict is fused.verdict
    assert Verdict.PASS is by_mode["forward"].verdict  # its tokens are the judge's
    assert (3, 0) == (stepwise.points, stepwise.blocked)
    assert ["root", "targets", "targets"] == [finding.stage for finding in stepwise.findings]
    assert ["chunk0", "round0", "round1"] == [f.place.point for f in stepwise.findings]
    assert (1, 2) == (fused.points, fused.blocked)
    (finding,) = fused.findings
    assert "the logits of row 2 differ by " in finding.summary


def test_without_set_root_a_near_tie_of_the_prompt_ends_the_case(
    judge: Callable[..., GateResult], thin_tokens: Path
) -> None:
    """The golden root cannot be put in place of the engine's own: blocked, and no error."""
    engine = make_swapped_tokens(18)
    info = replace(engine.info, verbs=engine.info.verbs - {"set_root"})
    load = engine.load
    wrapped = SimpleNamespace(info=info, load=load)

    gate = judge(wrapped, thin_tokens, modes=["stepwise"])

    (result,) = gate.results
    assert Verdict.NEAR_TIE is result.verdict
    assert (1, 2) == (result.points, result.blocked)


def test_a_near_tie_is_told_and_the_exit_code_is_0(
    kdtr: Callable[..., SimpleNamespace], thin_tokens: Path
) -> None:
    run = kdtr(
        *("gate", thin_tokens, "--engine", "planted_faults:make_swapped_tokens"),
        *("--engine-option", "pairs=18", "--mode", "round"),
    )

    assert 0 == run.code
    assert "NEAR TIE  ties / round / chunk0: root: the logits of row 2 differ by " in run.out
    assert "gate passed: 1 near tie; " in run.out


def test_the_same_swap_in_a_model_of_firm_tokens_fails(
    judge: Callable[..., GateResult], small: Path
) -> None:
    gate = judge(make_swapped_tokens(18), small, "y", modes=["stepwise"])

    assert not gate.passed
    assert "logits" == gate.findings[0].stage


@pytest.fixture(scope="module")
def thin_experts(record: Callable[..., Path], small_model: SimpleNamespace) -> Path:
    """Experts 2i and 2i + 1 are one group and score alike; of two groups three are chosen."""
    weights = dict(small_model.weights)
    for name in [name for name in weights if name.endswith("mlp.gate.weight")]:
        gate = weights[name].astype(np.float32)
        gate[1::2] = gate[::2] * np.float32(1 + 2.0**-22)
        weights[name] = gate
    for name in [name for name in weights if name.endswith("e_score_correction_bias")]:
        bias = weights[name].copy()
        bias[1::2] = bias[::2]
        weights[name] = bias
    return record([PLAN], weights=weights)


def test_a_near_tie_of_experts_ends_the_case_in_every_mode(
    judge: Callable[..., GateResult], thin_experts: Path
) -> None:
    """Other experts, other numbers: nothing after it can be compared."""
    gate = judge(make_swapped_experts(), thin_experts)

    assert gate.passed
    assert {"stepwise", "round", "forward"} == {result.mode for result in gate.results}
    for result in gate.results:
        assert Verdict.NEAR_TIE is result.verdict
        assert 2 == result.blocked
        (finding,) = result.findings
        assert "expert_ids" == finding.stage
        assert finding.summary.startswith("the choice of row 0 hangs on ")


def test_the_honest_engine_passes_or_ties_on_thin_models(
    judge: Callable[..., GateResult], thin_tokens: Path, thin_experts: Path
) -> None:
    for bundle in (thin_tokens, thin_experts):
        gate = judge("host", bundle)

        assert gate.passed
        assert {Verdict.PASS, Verdict.NEAR_TIE} >= {result.verdict for result in gate.results}
