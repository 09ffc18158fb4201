"""A decision thinner than the bounds is reported with its gap, and is no failure (NUM-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from planted_faults import make_swapped_experts, make_swapped_tokens

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.bundle import Expectation
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.near_tie import Decisions, admissible_choices
from kdtr.conformance.noise_floor import PointNoise
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


def noise_of(n: int, profile: NumericProfile = FLOAT32) -> PointNoise:
    """An ensemble that moved every row of logits by 2e-6, and of router scores by 1e-7."""
    rows = {("logits", None): np.full(n, 2e-6), ("router_scores", 1): np.full(n, 1e-7)}
    return PointNoise(profile, rows)


def allowed(rows: np.ndarray) -> float:
    """The sum of the two logits' bounds."""
    return 2 * float(noise_of(len(rows)).bound(STAGE["logits"], None, rows)[0, 0])


def decisions(tensors: dict[str, np.ndarray], **kwargs: object) -> Decisions:
    bias = {"model.layers.1.mlp.gate.e_score_correction_bias": np.zeros(E, np.float32)}
    expectation = Expectation(tensors, "", {**bias, **kwargs.pop("weights", {})})  # type: ignore[dict-item]
    config = kwargs.pop("config", CONFIG)
    n = len(next(iter(tensors.values())))
    return Decisions(expectation, config, kwargs.pop("profile", FLOAT32), noise_of(n), **kwargs)  # type: ignore[arg-type]


def token_tie(rows: np.ndarray, actual: list[int], **kwargs: object) -> str | None:
    expected = np.full(len(rows), 1)
    one = decisions({"logits": rows}, **kwargs)
    return one.near_tie(STAGE["targets"], None, expected, np.array(actual))


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
        return decisions(tensors).near_tie(STAGE[stage], None, np.array(1), np.array(2))

    assert f"the logits of row {row} differ by 1e-05, less than" in str(tie(tensors))
    assert tie({**tensors, "logits": logits(1, 1, 1)}) is None


@pytest.mark.parametrize("stage", ["positions", "path", "emitted", "committed_len", "moves"])
def test_other_integers_have_no_ties(stage: str) -> None:
    one, other = np.array([1]), np.array([2])

    assert decisions({"logits": logits(0)}).near_tie(STAGE[stage], None, one, other) is None


# Paths: 1 and 2 under the root, 3 under 2; the target of the root is token 1, then 2.

TOKENS = np.array([7, 1, 2, 5])


def path_tie(
    rows: np.ndarray, right: list[int], took: list[int], *, bonus: int, own: int
) -> str | None:
    """bonus: the truth's; own: the engine's."""
    tensors = {
        "logits": rows,
        "tokens": TOKENS,
        "parents": np.array([-1, 0, 0, 2]),
        "bonus": np.array(bonus),
        "path": np.array(right),
    }
    one = decisions(tensors, bonus=own)
    return one.near_tie(STAGE["path"], None, np.array(right), np.array(took))


@pytest.mark.parametrize(
    ("right", "took", "bonus", "own"),
    [
        ([0, 1], [0, 2], 9, 9),  # one sibling for another
        ([0, 1], [0, 2, 3], 9, 9),  # and on from there
        ([0], [0, 2], 1, 9),  # the truth ends: its bonus against the node
        ([0, 1], [0], 9, 2),  # the engine ends: the node against its bonus
    ],
)
def test_a_walk_that_parts_where_the_target_is_thin_is_a_tie(
    right: list[int], took: list[int], bonus: int, own: int
) -> None:
    thin, firm = logits(1e-5, 1, 1, 1), logits(1, 1e-5, 1e-5, 1e-5)

    told = path_tie(thin, right, took, bonus=bonus, own=own)

    assert str(told).startswith("the logits of row 0 differ by 1e-05, less than")
    assert path_tie(firm, right, took, bonus=bonus, own=own) is None


def test_a_walk_that_parts_for_no_token_is_no_tie() -> None:
    thin = logits(1e-5, 1e-5, 1e-5, 1e-5)

    assert path_tie(thin, [0, 1], [0, 3], bonus=9, own=9) is None  # token 5 is far below
    assert path_tie(thin, [0, 1], [0], bonus=9, own=1) is None  # it had the child, and stopped
    assert path_tie(thin, [0, 1], [0, 99], bonus=9, own=9) is None
    assert path_tie(thin, [0, 1], [1, 2], bonus=9, own=9) is None


# Experts: of tiny's two groups of four one is open, of which three are chosen.

HIGH = [0.9, 0.8, 0.5, 0.5, 0.1, 0.1, 0.1, 0.1]


def expert_tie(
    actual: list[int],
    scores: list[float] = HIGH,
    bias: list[float] | None = None,
    others: int = 0,
    **kwargs: object,
) -> str | None:
    """Row 0 has these scores and choice; `others` rows after it do not differ."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    weights = {} if bias is None else {name: np.array(bias)}
    tensors = {
        "layer1/router_scores": np.tile(scores, (1 + others, 1)),
        "layer1/expert_gap": np.zeros(1 + others),
    }
    expected = np.tile([0, 1, 2], (1 + others, 1))
    took = expected.copy()
    took[0] = actual
    one = decisions(tensors, weights=weights, **kwargs)
    return one.near_tie(STAGE["expert_ids"], 1, expected, took)


def expert_bound() -> float:
    return float(noise_of(1).bound(STAGE["router_scores"], 1, np.array([HIGH]))[0, 0])


def test_another_of_two_equal_experts_is_a_tie() -> None:
    told = f"the choice of row 0 hangs on 0, less than {expert_bound():.2g}"

    assert told == expert_tie([0, 1, 3])
    assert told == expert_tie([0, 1, 3], others=2)


def test_the_scores_may_move_by_a_bound_each_and_no_more() -> None:
    def apart(by: float) -> list[float]:
        return [0.9, 0.8, 0.5 + by * expert_bound(), 0.5, 0.1, 0.1, 0.1, 0.1]

    assert expert_tie([0, 1, 3], apart(1.999)) is not None
    assert expert_tie([0, 1, 3], apart(2.001)) is None


@pytest.mark.parametrize(
    "choice",
    [
        [0, 1, -7],
        [-7, 0, 1],
        [-1, -1, -1],
        [0, 1, 8],
        [0, 1, 2**40],
        [0, 1, 1],
        [0, 0, 0],
        [2, 2, 3],
        [0, 2, 3],  # skips 1, which is far above
        [0, 1, 4],  # of the closed group
        [4, 5, 6],
    ],
)
def test_what_no_router_could_choose_is_no_tie(choice: list[int]) -> None:
    assert expert_tie(choice) is None


def test_two_groups_alike_may_trade_places_as_a_whole() -> None:
    alike = [0.9, 0.8, 0.5, 0.4] * 2

    assert expert_tie([4, 5, 6], alike) is not None
    assert expert_tie([0, 1, 6], alike) is None  # of two groups
    assert expert_tie([4, 5, 7], alike) is None  # 7 is below 6
    far = [*alike[:4], 0.9, 0.79, 0.5, 0.4]
    assert expert_tie([4, 5, 6], far) is None


def test_the_bias_takes_part_in_the_choice() -> None:
    """MOE-2: scores that are equal are no tie when the bias parts them, and the reverse."""
    parted = [0.0, 0, 0.1, 0, 0, 0, 0, 0]
    mended = [0.9, 0.8, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1]

    assert expert_tie([0, 1, 3], bias=parted) is None
    assert expert_tie([0, 1, 3], mended) is None
    assert expert_tie([0, 1, 3], mended, bias=[0, 0, 0, 0.1, 0, 0, 0, 0]) is not None


def test_the_others_of_a_group_may_make_it_strong() -> None:
    """MOE-2: two scores of each of two groups move, chosen or not: four bounds in all."""
    pairs = CONFIG.replace(n_group=4, topk_group=2, num_experts_per_tok=2)

    def first_group_taken(weaker_by: float) -> str | None:
        third = 0.48 + weaker_by * expert_bound()
        scores = np.array([[0.9, 0.1, 0.53, 0.5, 0.52, third, 0, 0]])
        tensors = {"layer1/router_scores": scores, "layer1/expert_gap": np.zeros(1)}
        one = decisions(tensors, config=pairs)
        return one.near_tie(STAGE["expert_ids"], 1, np.array([[2, 4]]), np.array([[0, 2]]))

    assert first_group_taken(3.9) is not None
    assert first_group_taken(4.1) is None


# What a router may choose


def all_admissible(
    scores: list[float], bound: float = 0.01, **config: int
) -> list[tuple[int, ...]] | None:
    return admissible_choices(CONFIG.replace(**config), np.array(scores), bound)


def test_of_firm_scores_there_is_one_choice() -> None:
    assert [(0, 1, 2)] == all_admissible([0.9, 0.8, 0.5, 0.4, 0.1, 0.1, 0.1, 0.1])


def test_any_of_the_experts_that_are_alike_may_be_chosen_the_best_first() -> None:
    assert [(0, 1, 2), (0, 1, 3)] == all_admissible([0.9, 0.8, 0.505, 0.5, 0.1, 0.1, 0.1, 0.1])
    assert [(0, 1, 2), (0, 1, 3), (0, 2, 3)] == all_admissible(
        [0.9, 0.508, 0.505, 0.5, 0.1, 0.1, 0.1, 0.1]
    )


def test_groups_that_are_alike_trade_places_with_their_own_experts() -> None:
    choices = all_admissible([0.9, 0.8, 0.5, 0.4, 0.9, 0.79, 0.6, 0.4])

    assert [(4, 5, 6), (0, 1, 2)] == choices


def test_what_is_admissible_is_a_near_tie_and_nothing_else_is() -> None:
    random = np.random.default_rng(5)
    n_other = 0
    for _ in range(20):
        scores = 0.5 + np.round(random.uniform(0, 4, E)) * expert_bound()
        bound = noise_of(1).bound(STAGE["router_scores"], 1, scores[None])[0, 0]
        choices = admissible_choices(CONFIG, scores, bound)
        assert choices is not None
        right = np.array([choices[0]])
        one = decisions({"layer1/router_scores": scores[None], "layer1/expert_gap": np.zeros(1)})
        for ids in combinations(range(E), CONFIG.num_experts_per_tok):
            if ids != choices[0]:
                tie = one.near_tie(STAGE["expert_ids"], 1, right, np.array([ids]))
                assert (ids in choices) == (tie is not None)
        n_other += len(choices) - 1
    assert n_other > 20


def test_more_choices_than_can_be_looked_at_are_none() -> None:
    alike = {"n_routed_experts": 24, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}

    assert all_admissible([0.5] * 24, **alike) is None


# The gate

NOT_LOOKING = ("shipped", "script")


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
        *("--engine-option", "pairs=18", "--mode", "round", "--mode", "forward"),
    )

    assert 0 == run.code
    assert "NEAR TIE  ties / round / chunk0: root: the logits of row 2 differ by " in run.out
    assert "gate passed: 1 pass, 1 near tie; " in run.out


def test_a_gate_that_rests_on_near_ties_alone_does_not_pass(
    judge: Callable[..., GateResult], thin_tokens: Path
) -> None:
    gate = judge(make_swapped_tokens(18), thin_tokens, modes=["round", "shipped"])

    assert {Verdict.NEAR_TIE} == {result.verdict for result in gate.results}
    assert not gate.passed
    assert (
        "nothing was firmly asserted, as every case is a near tie, blocked or unsupported; judge "
        "more cases, or show expert_ids"
    ) == gate.shortfall
    assert "" == judge("host", thin_tokens, modes=["forward"]).shortfall


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


def test_after_a_choice_that_is_shown_everything_is_judged_by_what_follows_from_it(
    judge: Callable[..., GateResult], thin_experts: Path
) -> None:
    """Also where an engine lives with its own decisions, as long as it decides as the truth."""
    gate = judge(make_swapped_experts(), thin_experts)

    assert gate.passed
    # `shipped` and the script look at no expert.
    looking = {result.mode: result for result in gate.results if result.mode not in NOT_LOOKING}
    assert {"stepwise", "round", "forward"} == looking.keys()
    for result in looking.values():
        assert Verdict.NEAR_TIE is result.verdict
        assert (3, 0) == (result.points, result.blocked)
        assert (0, 0) == (result.excused_rows, result.not_checked)
        assert {"expert_ids"} == {finding.stage for finding in result.findings}
        assert result.findings[0].summary.startswith("the choice of row 0 hangs on ")


def test_a_fault_behind_a_choice_that_is_shown_is_seen(
    judge: Callable[..., GateResult], thin_experts: Path
) -> None:
    """What follows from another choice is known, so the choice is no excuse for it."""
    gate = judge(make_swapped_experts(traded=True), thin_experts, modes=["stepwise"])

    assert ["expert_ids", "mlp_out"] == [finding.stage for finding in gate.findings]
    assert Verdict.FAIL is gate.findings[1].verdict


def test_the_honest_engine_passes_or_ties_on_thin_models(
    judge: Callable[..., GateResult], thin_tokens: Path, thin_experts: Path
) -> None:
    for bundle in (thin_tokens, thin_experts):
        gate = judge("host", bundle)

        assert gate.passed
        assert {Verdict.PASS, Verdict.NEAR_TIE} >= {result.verdict for result in gate.results}


def test_a_truth_that_is_no_argmax_of_its_own_logits_is_no_tie() -> None:
    """Token 2 said to be right, and the engine took the top one: told, not excused."""
    rows = logits(6.0)
    expected, actual = np.array([2]), np.array([1])

    one = decisions({"logits": rows}, logits=rows.astype(np.float32))

    assert one.near_tie(STAGE["targets"], None, expected, actual) is None
