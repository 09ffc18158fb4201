from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.engine.host_best_first import build_best_first

INF = float("inf")


def tree(rows: list[list[float]], budget: int, width: int = 3) -> tuple[list[int], list[int]]:
    logits = np.array(rows, np.float64).reshape(len(rows), width)
    parents, tokens = build_best_first(logits, budget)
    return parents.tolist(), tokens.tolist()


def brute_force(rows: list[list[float]], budget: int) -> tuple[list[int], list[int]]:
    """Every prefix, sorted by (-score, rank path); a node's parent is the node of its prefix."""
    ranked: list[list[tuple[float, int]]] = []
    for row in np.array(rows, np.float64):
        if not np.isfinite(row).any():
            break
        log_probs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        taken = [(-p, token) for token, p in enumerate(log_probs.tolist()) if np.isfinite(p)]
        ranked.append(sorted(taken))
    prefixes = []
    for depth in range(1, len(ranked) + 1):
        for ranks in product(*(range(len(row)) for row in ranked[:depth])):
            cost = 0.0
            for row, rank in zip(ranked, ranks, strict=False):
                cost += row[rank][0]
            prefixes.append((cost, ranks))
    node: dict[tuple[int, ...], int] = {(): 0}
    parents, tokens = [-1], [-1]
    for _, ranks in sorted(prefixes)[:budget]:
        node[ranks] = len(tokens)
        parents.append(node[ranks[:-1]])
        tokens.append(ranked[len(ranks) - 1][ranks[-1]][1])
    return parents, tokens


# Few values, so that ties within a row, between depths and at the budget's edge are common.
rows_of_logits = st.lists(
    st.lists(st.sampled_from([0.0, 1.0, -1.0, 3.5, -INF]), min_size=3, max_size=3), max_size=4
)


@given(rows=rows_of_logits, budget=st.integers(0, 40))
def test_equals_brute_force(rows: list[list[float]], budget: int) -> None:
    assert brute_force(rows, budget) == tree(rows, budget)


@given(rows=rows_of_logits, budget=st.integers(0, 20))
def test_trees_are_nested_in_the_budget(rows: list[list[float]], budget: int) -> None:
    """TREE-4."""
    parents, tokens = tree(rows, 40)

    assert (parents[: budget + 1], tokens[: budget + 1]) == tree(rows, budget)


def test_equal_logits_take_the_lowest_token() -> None:
    assert ([-1, 0, 0], [-1, 0, 1]) == tree([[2.0, 2.0, 2.0]], 2)


def test_ties_in_a_wide_row_take_the_lowest_tokens() -> None:
    """Long enough for an unstable sort to show."""
    row = [1.0 if token % 3 else 0.0 for token in range(300)]

    _, tokens = tree([row], 5, width=300)

    assert [-1, 1, 2, 4, 5, 7] == tokens


def test_a_prefix_precedes_its_extension_at_equal_score() -> None:
    """The second depth is certain, so both have the same score; then rank paths decide."""
    rows = [[1.0, 1.0, -INF], [5.0, -INF, -INF]]

    assert ([-1, 0, 1, 0, 3], [-1, 0, 0, 1, 0]) == tree(rows, 9)


@pytest.mark.parametrize(("rows", "budget"), [([], 5), ([[1.0, 2.0, 3.0]], 0), ([[-INF] * 3], 5)])
def test_the_root_alone(rows: list[list[float]], budget: int) -> None:
    assert ([-1], [-1]) == tree(rows, budget)


def test_a_row_without_a_finite_logit_ends_the_depth() -> None:
    rows = [[0.0, -INF, -INF], [-INF] * 3, [0.0, 0.0, 0.0]]

    assert ([-1, 0], [-1, 0]) == tree(rows, 9)


def test_extreme_spreads_do_not_overflow() -> None:
    assert ([-1, 0], [-1, 1]) == tree([[-1.7e308, 1.7e308, -INF]], 5)


def test_official_ddtree_trees(
    ddtree_cases: list[tuple[dict[str, Any], Mapping[str, np.ndarray]]],
) -> None:
    """The official trees wherever float32 log-probabilities decide the order without a doubt.

    Theirs are float32 and sums of `depth` terms: the gap between neighbours must exceed twice the
    error, (depth + 3) u times the largest log-weight.
    """
    compared = 0
    for case, arrays in ddtree_cases:
        gaps = [case.get("min_pop_gap"), case.get("cutoff_gap")]  # none for the root alone
        depth = max(case["node_depths"], default=0)
        weights = [abs(value) for value in case.get("node_logw", [])]
        error = 2.0**-24 * (depth + 3) * max(weights, default=0.0)
        unclear = any(gap is not None and gap <= 2 * error for gap in gaps)
        if case["degenerate"] or case.get("topk_value_ties") or unclear:
            continue
        logits = arrays["logits"].astype(np.float64)

        parents, tokens = build_best_first(logits, case["budget"])

        assert case["parents"] == parents.tolist(), case["case"]
        assert case["node_token_ids"] == tokens[1:].tolist(), case["case"]
        compared += 1
    assert compared >= 10
