"""The router and the experts, against plain loops over Python numbers."""

import math
from functools import partial

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.reference import make_engine
from kdtr.reference.arithmetic import FIXED
from kdtr.reference.moe import (
    choice_gap,
    choose_experts,
    expert_weights,
    mix_experts,
    router_scores,
    swiglu,
)
from kdtr.reference.weights import MoeWeights

LAWS = settings(derandomize=True, deadline=None, max_examples=150, database=None)

# What the published models use, and what the Hugging Face data do not reach.
ROUTERS = {
    "sigmoid, 4 groups": {},
    "softmax, 4 groups": {"scoring_func": "softmax"},
    "softmax, 1 group": {"scoring_func": "softmax", "n_group": 1, "topk_group": 1},
    "sigmoid, 1 group": {"n_group": 1, "topk_group": 1},
    "softmax, not normed": {"scoring_func": "softmax", "norm_topk_prob": False},
    "sigmoid, not normed": {"norm_topk_prob": False},
    "softmax, all groups": {"scoring_func": "softmax", "topk_group": 4},
    "sigmoid, one expert": {"num_experts_per_tok": 1},
    "softmax, a group's every expert": {
        "scoring_func": "softmax",
        "topk_group": 1,
        "num_experts_per_tok": 3,
    },
}
each_router = pytest.mark.parametrize("router", ROUTERS)


def plain_scores(config, logits):
    """MOE-1, in 50 digits."""
    with mpmath.workdps(50):
        if config.scoring_func == "sigmoid":
            return [1 / (1 + mpmath.exp(-mpmath.mpf(x))) for x in logits]
        e = [mpmath.exp(mpmath.mpf(x)) for x in logits]
        return [x / mpmath.fsum(e) for x in e]


def plain_choice(config, scores, bias):
    """MOE-2: sorting with the lowest id first among equals, group by group."""
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    width = config.n_routed_experts // config.n_group
    groups = [list(range(g * width, (g + 1) * width)) for g in range(config.n_group)]
    group_score = [sum(sorted((biased[e] for e in group), reverse=True)[:2]) for group in groups]
    best = sorted(range(config.n_group), key=lambda g: (-group_score[g], g))[: config.topk_group]
    allowed = [e for g in best for e in groups[g]]
    return sorted(sorted(allowed, key=lambda e: (-biased[e], e))[: config.num_experts_per_tok])


def plain_weights(config, scores, ids):
    """MOE-3."""
    total = sum(scores[e] for e in ids) + mpmath.mpf("1e-20") if config.norm_topk_prob else 1
    return [scores[e] / total * mpmath.mpf(config.routed_scaling_factor) for e in ids]


def plain_swiglu(gate, up, down, x):
    """MOE-4, for one row; gate and up [m, i], down [i, m]."""
    m, i = gate.shape

    def dot(matrix, column, vector):
        return math.fsum(matrix[k, column] * vector[k] for k in range(len(vector)))

    inner = []
    for j in range(i):
        g = dot(gate, j, x)
        inner.append(g / (1 + math.exp(-g)) * dot(up, j, x))
    return [dot(down, k, inner) for k in range(m)]


def moe_layer(config, draw_tensors, seed):
    """The interpreted weights of the one MoE layer."""
    weights = make_engine().load((config, draw_tensors(config, seed))).weights
    assert isinstance(weights.layers[1].mlp, MoeWeights)
    return weights.layers[1].mlp


@each_router
def test_the_whole_mlp_in_plain_loops(router, small, draw_tensors):
    config = small.replace(**ROUTERS[router])
    moe = moe_layer(config, draw_tensors, 3)
    x = np.random.default_rng(4).standard_normal((6, config.hidden_size))

    scores = router_scores(FIXED, config, moe, x)
    ids = choose_experts(config, scores, moe.bias)
    weights = expert_weights(FIXED, config, scores, ids)
    out = mix_experts(FIXED, moe, x, ids, weights)

    logits = x @ moe.router
    for row in range(len(x)):
        exact = plain_scores(config, logits[row].tolist())
        chosen = plain_choice(config, exact, moe.bias.tolist())
        mixed = plain_weights(config, exact, chosen)
        total = np.zeros(config.hidden_size)
        for e, weight in zip(chosen, mixed, strict=True):
            expert = moe.experts[e]
            total += float(weight) * np.array(
                plain_swiglu(expert.gate, expert.up, expert.down, x[row])
            )
        shared = moe.shared
        total += plain_swiglu(shared.gate, shared.up, shared.down, x[row])
        assert chosen == ids[row].tolist()
        np.testing.assert_allclose(scores[row], np.array(exact, dtype=float), rtol=1e-13)
        np.testing.assert_allclose(weights[row], np.array(mixed, dtype=float), rtol=1e-13)
        np.testing.assert_allclose(out[row], total, rtol=0, atol=1e-13 * abs(total).max())


@st.composite
def tied_scores(draw):
    """Scores and biases in quarters, so that experts and groups tie all the time."""
    n_group = draw(st.sampled_from([1, 2, 3, 4, 6]))
    per_group = 12 // n_group
    topk_group = draw(st.integers(1, n_group))
    top_k = draw(st.integers(1, topk_group * per_group))
    quarters = partial(st.lists, min_size=12, max_size=12)
    scores = draw(quarters(st.integers(0, 4)))
    bias = draw(quarters(st.integers(-12, 4)))
    routing = {"n_group": n_group, "topk_group": topk_group, "num_experts_per_tok": top_k}
    return routing, [s / 4 for s in scores], [b / 4 for b in bias]


@LAWS
@given(drawn=tied_scores())
def test_the_choice_with_ties_everywhere(drawn, small):
    """Ties go to the lowest id, among groups and among experts; biases may drown every score."""
    routing, scores, bias = drawn
    config = small.replace(**routing)

    ids = choose_experts(config, np.array([scores]), np.array(bias))

    assert plain_choice(config, scores, bias) == ids[0].tolist()


def test_equal_scores_choose_the_lowest_ids(small):
    ids = choose_experts(small, np.full((2, 12), 0.5), np.zeros(12))

    assert [[0, 1, 2], [0, 1, 2]] == ids.tolist()


def test_dropped_groups_are_excluded_where_zero_would_readmit_them(small):
    """Every biased score is negative: with 0 in the dropped groups, those would be chosen."""
    scores = np.linspace(0.1, 0.6, 12)[None]
    bias = np.full(12, -2.0)

    ids = choose_experts(small, scores, bias)

    assert ((scores + bias) < 0).all()
    assert [[9, 10, 11]] == ids.tolist()


def test_a_group_is_judged_by_its_two_best(small):
    """Group 0 has the best expert and the best three; group 1 the best pair."""
    config = small.replace(topk_group=1, num_experts_per_tok=2)
    scores = np.array([[0.9, 0.3, 0.3, 0.7, 0.6, 0.0, *[0.1] * 6]])

    ids = choose_experts(config, scores, np.zeros(12))

    assert [[3, 4]] == ids.tolist()


def test_the_bias_chooses_and_does_not_weigh(small):
    """MOE-1, MOE-3: expert 11 is chosen for its bias and weighs what its score says."""
    config = small.replace(num_experts_per_tok=2, n_group=1, topk_group=1)
    scores = np.array([[0.5, *[0.25] * 11]])
    bias = np.zeros(12)
    bias[11] = 3.0

    ids = choose_experts(config, scores, bias)
    weights = expert_weights(FIXED, config, scores, ids)

    assert [[0, 11]] == ids.tolist()
    np.testing.assert_allclose(weights, [[1.3 * 2 / 3, 1.3 / 3]], rtol=1e-15)


def test_normed_weights_sum_to_the_scaling_factor_once(small):
    scores = np.random.default_rng(5).uniform(0.01, 1, (9, 12))
    ids = choose_experts(small, scores, np.zeros(12))

    normed = expert_weights(FIXED, small, scores, ids)
    plain = expert_weights(FIXED, small.replace(norm_topk_prob=False), scores, ids)

    np.testing.assert_allclose(normed.sum(axis=1), 1.3, rtol=1e-15)
    np.testing.assert_array_equal(plain, np.take_along_axis(scores, ids, 1) * 1.3)


def test_scores_that_vanish_give_weights_of_zero(small):
    """MOE-3: the 1e-20 keeps 0 / 0 away."""
    weights = expert_weights(FIXED, small, np.zeros((1, 12)), np.array([[0, 1, 2]]))

    assert [[0, 0, 0]] == weights.tolist()


def test_softmax_scores_of_a_thousand_do_not_overflow(small):
    config = small.replace(scoring_func="softmax")
    router = np.zeros((config.hidden_size, 12))
    router[0] = np.arange(12) * 200.0
    moe = MoeWeights(router=router, bias=np.zeros(12), experts=(), shared=None)
    x = np.zeros((1, config.hidden_size))
    x[0, 0] = 1.0

    scores = router_scores(FIXED, config, moe, x)

    assert 1.0 == scores[0, -1]
    assert np.isfinite(scores).all()


@pytest.mark.parametrize("n_shared", [0, 1, 2])
def test_shared_experts_are_always_added(n_shared, small, draw_tensors):
    """MOE-4: two of them are one SwiGLU of twice the width, and equal the sum of its halves."""
    config = small.replace(n_shared_experts=n_shared)
    moe = moe_layer(config, draw_tensors, 6)
    x = np.random.default_rng(7).standard_normal((3, config.hidden_size))
    ids = np.array([[0, 1, 2], [3, 5, 9], [0, 5, 11]])
    none = np.zeros((3, 3))

    out = mix_experts(FIXED, moe, x, ids, none)

    expected = np.zeros_like(x)
    i = config.moe_intermediate_size
    for k in range(n_shared):
        part = slice(k * i, (k + 1) * i)
        shared = moe.shared
        expected += [
            plain_swiglu(shared.gate[:, part], shared.up[:, part], shared.down[part], row)
            for row in x
        ]
    assert (n_shared == 0) == (moe.shared is None)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)


def test_each_chosen_expert_gets_its_own_rows_and_weight(small, draw_tensors):
    moe = moe_layer(small.replace(n_shared_experts=0), draw_tensors, 8)
    x = np.random.default_rng(9).standard_normal((2, small.hidden_size))
    ids = np.array([[1, 4, 7], [0, 4, 11]])
    weights = np.array([[0.0, 2.0, 0.0], [0.5, 0.0, 0.0]])

    out = mix_experts(FIXED, moe, x, ids, weights)

    np.testing.assert_array_equal(out[:1], 2 * swiglu(FIXED, moe.experts[4], x[:1]))
    np.testing.assert_array_equal(out[1:], 0.5 * swiglu(FIXED, moe.experts[0], x[1:]))


def test_a_row_does_not_depend_on_the_other_rows(small, draw_tensors):
    moe = moe_layer(small, draw_tensors, 10)
    x = np.random.default_rng(11).standard_normal((7, small.hidden_size))

    def mlp(rows):
        scores = router_scores(FIXED, small, moe, rows)
        ids = choose_experts(small, scores, moe.bias)
        return mix_experts(FIXED, moe, rows, ids, expert_weights(FIXED, small, scores, ids))

    batch = mlp(x)

    for i in range(len(x)):
        np.testing.assert_array_equal(batch[i : i + 1], mlp(x[i : i + 1]))


# How far the choice is from another one


@LAWS
@given(drawn=tied_scores(), seed=st.integers(0, 2**32), spread=st.floats(0.5, 0.999))
def test_no_error_below_the_gap_changes_the_choice(drawn, seed, spread, small):
    routing, _, bias = drawn
    config = small.replace(**routing)
    rng = np.random.default_rng(seed)
    scores = rng.uniform(0, 1, (1, 12))
    gap = min(float(choice_gap(config, scores, np.array(bias))[0]), 10.0)
    moved = scores + rng.choice([-1, 1], (1, 12)) * gap * spread

    chosen = choose_experts(config, scores, np.array(bias))

    np.testing.assert_array_equal(chosen, choose_experts(config, moved, np.array(bias)))


@pytest.mark.parametrize(
    ("routing", "gap"),
    [
        ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}, 0.125),  # 0.75 after 1.0, / 2
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, 0.0625),  # groups alone, / 4
        ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 12}, np.inf),  # nothing to choose
    ],
    ids=["experts", "groups", "everything"],
)
def test_the_gap_of_a_hand_made_row(routing, gap, small):
    """Group sums 2, 1.75, 0, 0; experts 1, 1, then 0.75."""
    scores = np.array([[1.0, 1.0, 0.5, 1.0 - 0.25, 1.0, 0.0, *[0.0] * 6]])
    scores[0, 4] = 1.0 if routing["n_group"] == 4 else 0.5

    found = choice_gap(small.replace(**routing), scores, np.zeros(12))

    assert [gap] == found.tolist()
