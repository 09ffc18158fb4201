"""Host kernel of the best-first tree (TREE-3, TREE-4; DDTree, arXiv 2604.12989)."""

# NumPy types the operators of a plain ndarray as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np


def build_best_first(draft_logits: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
    """draft_logits [depth, w] float64 -> parents [n], tokens [n]; node 0 the root, token -1.

    The heap holds prefixes as (-score, rank path): the highest score first, then the rank path in
    lexicographic order, a prefix before its extensions. Taking a prefix offers its best
    extension and its next sibling; both come later in that order, so what is taken is the order.
    """
    ranked = _ranked_tokens(draft_logits, budget)
    parents, tokens = [-1], [-1]
    # A prefix is (-score, rank path, node of its parent, -score of its parent).
    heap: list[tuple[float, tuple[int, ...], int, float]] = []

    def offer(ranks: tuple[int, ...], parent: int, parent_cost: float) -> None:
        depth, rank = len(ranks) - 1, ranks[-1]
        if depth < len(ranked) and rank < len(ranked[depth][0]):
            cost = parent_cost - ranked[depth][1][rank]
            heappush(heap, (cost, ranks, parent, parent_cost))

    offer((0,), 0, 0.0)
    while heap and len(tokens) <= budget:
        cost, ranks, parent, parent_cost = heappop(heap)
        node = len(tokens)
        parents.append(parent)
        tokens.append(ranked[len(ranks) - 1][0][ranks[-1]])
        offer((*ranks, 0), node, cost)
        offer((*ranks[:-1], ranks[-1] + 1), parent, parent_cost)
    return np.array(parents), np.array(tokens)


def _ranked_tokens(draft_logits: np.ndarray, budget: int) -> list[tuple[list[int], list[float]]]:
    """Per depth the tokens and log-probabilities of ranks 0..budget-1 that may be taken.

    Log-probability descending, ties to the lowest token id; -inf is never taken, and a depth
    without a finite logit is the end of the tree.
    """
    ranked = []
    for logits in draft_logits:  # [w]
        if not np.isfinite(logits).any():
            break
        log_probs = _log_softmax(logits)  # [w]
        order = np.argsort(-log_probs, kind="stable")[:budget]
        order = order[np.isfinite(log_probs[order])]
        ranked.append((order.tolist(), log_probs[order].tolist()))
    return ranked


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """logits [w] float64 with a finite entry -> [w], over the full row."""
    with np.errstate(over="ignore"):  # the spread of two finite float64 may be infinite
        shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
