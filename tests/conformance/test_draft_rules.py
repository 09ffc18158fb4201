"""A tree is the best-first one of its draft logits, or it is said which node is not (TREE-3)."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.conformance.draft_rules import not_best_first
from kdtr.contract import DraftTree
from kdtr.property_tests.strategies import draft_logits
from kdtr.reference import build_tree

# Probabilities 0.5, 0.25, 0.25 at each depth: logits are their logarithms, up to a constant.
HALVES = np.array([[2.0, 1.0, 1.0]] * 2) * np.log(2)
BEST = DraftTree((9, 0, 0, 1, 2), (-1, 0, 1, 0, 0))


def test_a_tree_by_hand() -> None:
    """0 of 1/2, then its child of 1/4 before its siblings of 1/4: a prefix comes first."""
    assert not_best_first(HALVES, 4, BEST) is None
    assert BEST == build_tree(HALVES, 4, root=9)


@pytest.mark.parametrize(
    ("tokens", "parents", "budget", "text"),
    [
        (
            (9, 1),
            (-1, 0),
            1,
            "node 1 has token 1, but by draft_logits[0] the next child of node 0 has 0",
        ),
        (
            (9, 0, 2),
            (-1, 0, 0),
            2,
            "node 2 has token 2, but by draft_logits[0] the next child of node 0 has 1",
        ),
        (
            (9, 0, 0, 1, 1),
            (-1, 0, 1, 0, 1),
            4,
            "node 4 has log-probability -2.07944, but by draft_logits a child of node 0 comes "
            "before it, with -1.38629",
        ),
        (
            (9, 0, 0, 0),
            (-1, 0, 1, 2),
            3,
            "node 3 is below node 2, for which draft_logits have no child left",
        ),
        ((9, 0), (-1, 0), 2, "the tree has 1 nodes besides the root, but the budget is 2"),
        ((9, 0, 0), (-1, 0, 1), 1, "the tree has 2 nodes besides the root, but the budget is 1"),
    ],
)
def test_what_is_not_the_best(
    tokens: tuple[int, ...], parents: tuple[int, ...], budget: int, text: str
) -> None:
    assert text == not_best_first(HALVES, budget, DraftTree(tokens, parents))


def test_of_equal_logits_the_lower_rank_path_comes_first() -> None:
    tied = np.array([[1.0, 1.0, 0.0], [5.0, 0.0, 0.0]])
    first, second = ((9, 0, 1, 0), (-1, 0, 0, 1)), ((9, 0, 1, 0), (-1, 0, 0, 2))

    score = f"{1 - log(2 * exp(1) + 1) - log(1 + 2 * exp(-5)):.6g}"
    assert not_best_first(tied, 3, DraftTree(*first)) is None
    assert (
        f"node 3 has log-probability {score}, but by draft_logits a child of node 1 comes before "
        f"it, with {score}"
    ) == not_best_first(tied, 3, DraftTree(*second))


def test_a_budget_that_no_drafts_fill() -> None:
    assert not_best_first(np.empty((0, 3)), 4, DraftTree((9,), (-1,))) is None
    assert not_best_first(np.full((2, 3), -np.inf), 4, DraftTree((9,), (-1,))) is None
    one = np.array([[-np.inf, 0.0, -np.inf]])
    assert not_best_first(one, 4, DraftTree((9, 1), (-1, 0))) is None


def test_closer_than_rounding_either_comes_first() -> None:
    """Log-probabilities as computed may be equal, or the other way round, in the last bit."""
    close = np.array([[1.0, np.nextafter(1.0, 2), 0.0]])

    for order in ((0, 1), (1, 0)):
        assert not_best_first(close, 2, DraftTree((9, *order), (-1, 0, 0))) is None


def test_logits_far_apart_overflow_to_nothing() -> None:
    far = np.array([[1e308, -1e308, 0.0]])

    assert not_best_first(far, 2, build_tree(far, 2, root=9)) is None


@given(logits=draft_logits(6), budget=st.integers(0, 9))
def test_it_is_what_the_reference_builds(logits: np.ndarray, budget: int) -> None:
    """And with a node less it is not, as there is none but one tree."""
    tree = build_tree(logits, budget)

    assert not_best_first(logits, budget, tree) is None
    if len(tree) > 1:
        shorter = DraftTree(tree.tokens[:-1], tree.parents[:-1])
        assert not_best_first(logits, budget, shorter) is not None
