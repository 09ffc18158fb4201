"""The best-first draft tree (DDTree, arXiv 2604.12989; TREE-3, TREE-4)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from operator import index

import numpy as np

from kdtr.contract import DraftTree, InputError, check_bits
from kdtr.reference.arithmetic import exp_fixed, log_fixed, sum_fixed

Ranked = tuple[Sequence[int], Sequence[float]]  # token ids and log-probabilities, best first


def build_tree(draft_logits: np.ndarray, budget: int, *, root: int = 0) -> DraftTree:
    """The `budget` most probable prefixes under draft_logits [depth, w], below token `root`.

    Nodes come in the order in which the search takes them. Raises InputError for a budget below
    0, an array that is not [depth, w], and NaN or +inf.
    """
    logits = checked_logits(draft_logits)
    n_drafts = checked_budget(budget)
    return best_first([rank(row, n_drafts) for row in logits], n_drafts, root=root)


def checked_budget(budget: int) -> int:
    try:
        value = -1 if isinstance(budget, bool | np.bool_) else index(budget)
    except TypeError:
        value = -1
    check_bits("budget", value)
    if value < 0:
        raise InputError(f"budget = {budget!r}; expected an integer of at least 0")
    return value


def checked_logits(draft_logits: np.ndarray) -> np.ndarray:
    """[depth, w] in float64."""
    logits = host_array("draft_logits", draft_logits)
    if logits.ndim != 2 or not _is_floating(logits.dtype):
        raise InputError(
            f"draft_logits are {logits.dtype} {list(logits.shape)}; "
            "expected floating-point numbers [depth, vocab]"
        )
    with np.errstate(over="ignore"):  # a longdouble past float64 is refused as inf below
        logits = logits.astype(np.float64)
    bad = np.argwhere(np.isnan(logits) | (logits == np.inf))
    if len(bad):
        depth, token = bad[0].tolist()
        raise InputError(
            f"draft_logits[{depth}, {token}] = {logits[depth, token]}; "
            "expected a finite number or -inf"
        )
    return logits


def host_array(what: str, values: object) -> np.ndarray:
    """The values, from anything with __array__ or __dlpack__, or nested sequences."""
    try:
        if hasattr(values, "__dlpack__") and not hasattr(values, "__array__"):
            return np.from_dlpack(values)
        return np.asarray(values)
    except (TypeError, ValueError, BufferError, RuntimeError) as fault:
        raise InputError(
            f"{what} are {type(values).__name__}, ragged or unreadable ({fault}); expected an array"
        ) from None


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
