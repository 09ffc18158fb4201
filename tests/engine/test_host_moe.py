from __future__ import annotations

import numpy as np
import pytest

from kdtr.contract import ModelConfig
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.host_moe import choose_experts, experts, router_scores

U = 2.0**-24


def moe(small: ModelConfig, **changes: object) -> ModelConfig:
    """Four groups of two experts, two groups kept, three experts chosen, unless changed."""
    return small.replace(routed_scaling_factor=1.0, norm_topk_prob=False, **changes)


def choose(config: ModelConfig, scores: list[float], bias: list[float]) -> list[int]:
    ids, _ = choose_experts(np.array([scores], np.float32), np.array(bias, np.float32), config)
    return ids[0].tolist()


def test_all_equal_scores_go_to_the_lowest_ids(small: ModelConfig) -> None:
    assert [0, 1, 2] == choose(moe(small), [0.5] * 8, [0.0] * 8)


def test_ties_among_many_experts_go_to_the_lowest_ids(small: ModelConfig) -> None:
    """Enough experts for an unstable sort to show."""
    config = moe(small, n_routed_experts=300, n_group=1, topk_group=1)

    assert [1, 2, 4] == choose(config, [0.5 if e % 3 else 0.2 for e in range(300)], [0.0] * 300)


def test_equal_groups_go_to_the_lowest_group(small: ModelConfig) -> None:
    scores = [0.1, 0.1, 0.3, 0.4, 0.4, 0.3, 0.3, 0.4]

    assert [2, 3, 4] == choose(moe(small), scores, [0.0] * 8)


def test_a_group_counts_by_its_two_best_biased_scores(small: ModelConfig) -> None:
    """Group 0 has the best expert, but 0.9 + 0.0 loses to 0.5 + 0.5 twice (MOE-2)."""
    config = moe(small, n_group=4, topk_group=2)

    assert [2, 3, 4] == choose(config, [0.9, 0.0, 0.5, 0.5, 0.5, 0.5, 0.1, 0.1], [0.0] * 8)


def test_a_dropped_group_loses_to_negative_scores(small: ModelConfig) -> None:
    """Under a bias of -1.5 every biased score is negative: 0 would win, -inf does not (MOE-2)."""
    scores = [0.1, 0.1, 0.9, 0.8, 0.2, 0.3, 0.7, 0.9]

    assert [2, 3, 7] == choose(moe(small), scores, [-1.5] * 8)


def test_the_bias_chooses_but_does_not_weigh(small: ModelConfig) -> None:
    scores = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]], np.float32)
    bias = np.array([9, 8, 7, 0, 0, 0, 0, 0], np.float32)

    ids, weights = choose_experts(scores, bias, moe(small))

    assert [[0, 1, 2]] == ids.tolist()
    assert scores[:, :3].tolist() == weights.tolist()


def test_weights_are_normalised_then_scaled_once(small: ModelConfig) -> None:
    config = moe(small).replace(norm_topk_prob=True, routed_scaling_factor=2.5)
    scores = np.array([[0, 0, 0, 0, 0, 0.5, 0.25, 0.25]], np.float32)

    ids, weights = choose_experts(scores, np.zeros(8, np.float32), config)

    assert [[5, 6, 7]] == ids.tolist()
    assert [[1.25, 0.625, 0.625]] == weights.tolist()


def test_scores_of_zero_normalise_to_zero(small: ModelConfig) -> None:
    """The 1e-20 of MOE-3 stands between an underflowed sum and NaN."""
    config = moe(small).replace(norm_topk_prob=True)

    _, weights = choose_experts(np.zeros((1, 8), np.float32), np.zeros(8, np.float32), config)

    assert not weights.any()


@pytest.mark.parametrize("scoring_func", ["sigmoid", "softmax"])
def test_router_scores(scoring_func: str) -> None:
    x = np.array([[1.0, -2.0]], np.float32)
    gate = np.array([[1.0, 0.0], [0.0, 1.0], [300.0, 0.0]], np.float32)
    raw = np.array([1.0, -2.0, 300.0])

    scores = router_scores(x, gate, scoring_func)

    expected = 1 / (1 + np.exp(-raw))
    if scoring_func == "softmax":
        expected = np.exp(raw - 300) / np.exp(raw - 300).sum()
    assert np.abs(scores - expected).max() <= 8 * U


def test_experts_add_up_their_own_rows() -> None:
    """Rows with different experts in one call equal each row alone, expert by expert."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4)).astype(np.float32)
    gate_up = rng.standard_normal((5, 6, 4)).astype(np.float32)
    down = rng.standard_normal((5, 4, 3)).astype(np.float32)
    ids = np.array([[0, 4], [1, 4], [2, 3]])
    weights = rng.random((3, 2)).astype(np.float32)

    swiglu = HostKernels().swiglu
    out = experts(x, ids, weights, gate_up, down, swiglu)

    for i in range(3):
        terms = [
            weights[i, k] * swiglu(x[i : i + 1], gate_up[e], down[e])[0]
            for k, e in enumerate(ids[i].tolist())
        ]
        bound = 2 * (4 + 3 + 4) * U * np.abs(terms).sum(axis=0).max()
        assert np.abs(out[i] - sum(terms)).max() <= bound
