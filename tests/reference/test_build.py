"""The best-first tree is the brute-force one: all prefixes, sorted, the first `budget` of them."""

from itertools import product

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract import DraftTree, InputError
from kdtr.reference import build_tree, depths
from kdtr.reference.build import best_first, rank

LAWS = settings(derandomize=True, deadline=None, max_examples=200, database=None)


def brute_force(ranked, budget, root=0):
    """Every rank path with its score, best first, equal scores by path, a prefix first."""
    paths = []
    for depth in range(1, len(ranked) + 1):
        paths += product(*(range(len(ids)) for ids, _ in ranked[:depth]))
    scored = []
    for ranks in paths:
        score = 0.0
        for (_, log_probs), place in zip(ranked, ranks, strict=False):
            score += log_probs[place]  # in the order of the path, as the search adds them
        scored.append((-score, ranks))
    taken = [ranks for _, ranks in sorted(scored)[:budget]]
    number = {(): 0} | {ranks: i for i, ranks in enumerate(taken, start=1)}
    return DraftTree(
        tokens=(root, *(ranked[len(ranks) - 1][0][ranks[-1]] for ranks in taken)),
        parents=(-1, *(number[ranks[:-1]] for ranks in taken)),
    )


def log_softmax(row):
    """(token id, log-probability) of the finite entries, best first, in 40 digits."""
    with mpmath.workdps(40):
        finite = {i: mpmath.mpf(x) for i, x in enumerate(row.tolist()) if x != -np.inf}
        if not finite:
            return [], []
        top = mpmath.log(mpmath.fsum(mpmath.exp(x) for x in finite.values()))
        ids = sorted(finite, key=lambda i: (-finite[i], i))
        return ids, [finite[i] - top for i in ids]


@st.composite
def tied_candidates(draw):
    """Up to 4 depths of up to 4 candidates, in quarters: sums are exact and tie all the time."""
    ranked = []
    for quarters in draw(st.lists(st.lists(st.integers(0, 6), max_size=4), max_size=4)):
        ids = draw(st.permutations(range(10, 10 + len(quarters))))
        ranked.append((ids, [-q / 4 for q in sorted(quarters)]))
    return ranked


def until_empty(ranked):
    """A depth without candidates ends the tree: nothing below it has a parent."""
    for depth, (ids, _) in enumerate(ranked):
        if not ids:
            return ranked[:depth]
    return ranked


@LAWS
@given(ranked=tied_candidates(), budget=st.integers(0, 40))
def test_best_first_is_the_brute_force_tree_with_ties_everywhere(ranked, budget):
    tree = best_first(ranked, budget, root=5)

    assert brute_force(until_empty(ranked), budget, root=5) == tree


@LAWS
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 4),
    width=st.integers(2, 5),
    budget=st.integers(0, 60),
)
def test_a_tree_from_random_logits_is_the_brute_force_one(seed, depth, width, budget):
    """Against 40-digit log-probabilities: no two scores of random logits are close."""
    logits = 2 * np.random.default_rng(seed).standard_normal((depth, width))

    tree = build_tree(logits, budget, root=3)

    assert brute_force([log_softmax(row) for row in logits], budget, root=3) == tree


@LAWS
@given(
    rows=st.lists(
        st.lists(st.sampled_from([-np.inf, -2.0, -1.0, 0.0]), min_size=4, max_size=4),
        min_size=1,
        max_size=4,
    ),
    budget=st.integers(0, 50),
)
def test_a_tree_from_tied_and_masked_logits_is_the_brute_force_one(rows, budget):
    """Equal logits rank by id; scores are sums along the path in float64 (TREE-3)."""
    logits = np.array(rows)

    tree = build_tree(logits, budget)

    assert brute_force(until_empty([rank(row, 4) for row in logits]), budget) == tree


def test_nodes_come_in_the_order_of_their_scores():
    """By hand: rows (1/2, 1/4, 1/8, 1/8) and (3/4, 1/8, 1/16, 1/16)."""
    logits = np.log(np.array([[1 / 8, 1 / 4, 1 / 8, 1 / 2], [1 / 16, 3 / 4, 1 / 8, 1 / 16]]))

    tree = build_tree(logits, 6, root=7)

    # 3: 1/2; 3-1: 3/8; 1: 1/4; 1-1: 3/16; then 0 and 2 at 1/8, above 0-1 at 3/32
    assert DraftTree(tokens=(7, 3, 1, 1, 1, 0, 2), parents=(-1, 0, 1, 0, 3, 0, 0)) == tree


def test_equal_scores_go_by_rank_path_a_prefix_first():
    """Two certain rows: every prefix has probability 1, so the chain is taken from the top."""
    ranked = [([4, 5], [0.0, 0.0]), ([6, 7], [0.0, 0.0])]

    tree = best_first(ranked, 6)

    assert DraftTree(tokens=(0, 4, 6, 7, 5, 6, 7), parents=(-1, 0, 1, 1, 0, 4, 4)) == tree


@LAWS
@given(ranked=tied_candidates(), budgets=st.tuples(st.integers(0, 30), st.integers(0, 30)))
def test_trees_are_nested_in_the_budget(ranked, budgets):
    """TREE-4."""
    few, many = (best_first(ranked, budget) for budget in sorted(budgets))

    assert few.tokens == many.tokens[: len(few)]
    assert few.parents == many.parents[: len(few)]


@LAWS
@given(seed=st.integers(0, 2**32), budgets=st.tuples(st.integers(0, 60), st.integers(0, 60)))
def test_trees_from_logits_are_nested_in_the_budget(seed, budgets):
    """The budget also limits the candidates per depth, and no tree may show it."""
    logits = np.round(np.random.default_rng(seed).standard_normal((3, 9)), 1)

    few, many = (build_tree(logits, budget) for budget in sorted(budgets))

    assert (few.tokens, few.parents) == (many.tokens[: len(few)], many.parents[: len(few)])


def test_the_tree_ends_when_nothing_is_left():
    tree = build_tree(np.zeros((2, 3)), 1000)

    assert 1 + 3 + 9 == len(tree)


@pytest.mark.parametrize("shape", [(0, 5), (3, 5)])
def test_budget_zero_or_depth_zero_gives_the_root_alone(shape):
    budget = 0 if shape[0] else 9

    tree = build_tree(np.zeros(shape), budget, root=4)

    assert DraftTree(tokens=(4,), parents=(-1,)) == tree


def test_minus_infinity_is_never_taken():
    logits = np.array([[-np.inf, 1.0, -np.inf, 0.0]] * 2)

    tree = build_tree(logits, 1000)

    assert {1, 3} == set(tree.tokens[1:])
    assert 1 + 2 + 4 == len(tree)


def test_a_row_without_a_finite_logit_ends_the_depth():
    logits = np.zeros((4, 2))
    logits[2] = -np.inf

    tree = build_tree(logits, 1000)

    assert 2 == max(depths(tree))
    assert build_tree(logits[:2], 1000) == tree


def test_a_first_row_without_a_finite_logit_gives_the_root_alone():
    assert 1 == len(build_tree(np.full((3, 4), -np.inf), 9))


def test_probabilities_are_over_the_full_row():
    """Over the top 3 alone, a token of the flat row would count 1/3 and precede the 1/10."""
    flat, peaked = np.zeros(100), np.full(100, -np.inf)
    peaked[[4, 7]] = np.log([0.9, 0.1])

    tree = build_tree(np.stack([peaked, flat]), 3)

    assert DraftTree(tokens=(0, 4, 7, 0), parents=(-1, 0, 0, 1)) == tree


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_logits_of_any_floating_type_are_taken_as_float64(dtype):
    logits = np.array([[3, 1, 2], [0, 2, 1]], dtype=dtype)

    assert build_tree(logits.astype(np.float64), 6) == build_tree(logits, 6)


def test_log_probabilities_are_those_of_forty_digits():
    row = np.random.default_rng(1).standard_normal(300) * 5

    ids, log_probs = rank(row, 300)

    expected_ids, expected = log_softmax(row)
    # the shift, the logarithm (4 ulp of at most 8) and the subtraction, sums of 300 terms
    bound = 20 * 2.0**-53 * abs(np.array(log_probs)).max()
    assert expected_ids == ids
    assert max(abs(float(e) - a) for e, a in zip(expected, log_probs, strict=True)) <= bound


def test_ranking_keeps_k_and_gives_ties_to_the_lowest_id():
    ids, log_probs = rank(np.array([1.0, 2.0, -np.inf, 2.0, 1.0]), 3)

    assert [1, 3, 0] == ids
    assert log_probs[0] == log_probs[1] > log_probs[2]


REFUSALS = {
    "budget": ((np.zeros((2, 3)), -1), "budget = -1; expected an integer of at least 0"),
    "nan": (
        (np.array([[0.0, 1.0], [np.nan, 0.0]]), 3),
        "draft_logits[1, 0] = nan; expected a finite number or -inf",
    ),
    "inf": (
        (np.array([[0.0, np.inf], [np.nan, 0.0]]), 3),
        "draft_logits[0, 1] = inf; expected a finite number or -inf",
    ),
    "one axis": (
        (np.zeros(3), 3),
        "draft_logits are float64 [3]; expected floating-point numbers [depth, vocab]",
    ),
    "booleans": (
        (np.zeros((2, 3), dtype=bool), 3),
        "draft_logits are bool [2, 3]; expected floating-point numbers [depth, vocab]",
    ),
    "nan with budget 0": (
        (np.array([[np.nan, 1.0]]), 0),
        "draft_logits[0, 0] = nan; expected a finite number or -inf",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    arguments, text = REFUSALS[name]

    with pytest.raises(InputError) as refusal:
        build_tree(*arguments)

    assert text == str(refusal.value)
