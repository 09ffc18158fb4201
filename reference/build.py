"""The best-first draft tree (DDTree, arXiv 2604.12989; TREE-3, TREE-4)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from kdtr.contract import DraftTree, InputError
from kdtr.reference.arithmetic import exp_fixed, log_fixed, sum_fixed

Ranked = tuple[Sequence[int], Sequence[float]]  # token ids and log-probabilities, best first


def build_tree(draft_logits: np.ndarray, budget: int, *, root: int = 0) -> DraftTree:
    """The `budget` most probable prefixes under draft_logits [depth, w], below token `root`.

    Nodes come in the order in which the search takes them. Raises InputError for a budget below
    0, an array that is not [depth, w], and NaN or +inf.
    """
    if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or budget < 0:
        raise InputError(f"budget = {budget!r}; expected an integer of at least 0")
    logits = np.asarray(draft_logits)
    if logits.ndim != 2 or not _is_floating(logits.dtype):
        raise InputError(
            f"draft_logits are {logits.dtype} {list(logits.shape)}; "
            "expected floating-point numbers [depth, vocab]"
        )
    logits = logits.astype(np.float64)
    bad = np.argwhere(np.isnan(logits) | (logits == np.inf))
    if len(bad):
        depth, token = bad[0].tolist()
        raise InputError(
            f"draft_logits[{depth}, {token}] = {logits[depth, token]}; "
            "expected a finite number or -inf"
        )
    return best_first([rank(row, budget) for row in logits], budget, root=root)


def rank(logits: np.ndarray, k: int) -> Ranked:
    """The k best tokens of a row [w], and their log-probabilities over the full row.

    Ties go to the lowest id; -inf is never taken, so a row without a finite logit gives none.
    """
    if not (logits > -np.inf).any():
        return (), ()
    with np.errstate(over="ignore"):  # -inf is the right answer, and never taken
        shifted = logits - logits.max()
    log_probs = shifted - log_fixed(sum_fixed(exp_fixed(shifted)))
    order = np.argsort(-log_probs, kind="stable")[: min(k, int((log_probs > -np.inf).sum()))]
    return order.tolist(), log_probs[order].tolist()


def best_first(ranked: Sequence[Ranked], budget: int, *, root: int = 0) -> DraftTree:
    """Best-first search over ranked candidates, one list per depth.

    A heap entry is (-score, rank path): score descending, then the rank path in lexicographic
    order, a prefix first. Taking a node offers its next sibling and its first child; neither can
    score higher, so the order of the takes is the order of the scores.
    """
    tokens, parents = [root], [-1]
    heap: list[tuple[float, tuple[int, ...], float, int]] = []

    def offer(rank_path: tuple[int, ...], above: float, parent: int) -> None:
        """Offer the child of `parent`, whose score is `above`, at the end of rank_path."""
        depth, place = len(rank_path) - 1, rank_path[-1]
        if depth < len(ranked) and place < len(ranked[depth][0]):
            score = above + ranked[depth][1][place]
            heappush(heap, (-score, rank_path, above, parent))

    offer((0,), 0.0, 0)
    while heap and len(tokens) <= budget:
        negative, rank_path, above, parent = heappop(heap)
        tokens.append(int(ranked[len(rank_path) - 1][0][rank_path[-1]]))
        parents.append(parent)
        offer((*rank_path[:-1], rank_path[-1] + 1), above, parent)
        offer((*rank_path, 0), -negative, len(tokens) - 1)
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


def _is_floating(dtype: np.dtype) -> bool:
    return dtype.kind == "f" or dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
