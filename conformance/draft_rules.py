"""Whether a tree is the best-first one of draft logits, by the judge's own few lines (TREE-3).

The log-probabilities here are not those of whoever built the tree to the last bit: two that are
closer than rounding may come in either order. What is equal by the logits themselves may not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.contract import DraftTree

_ROUNDING = 2.0**-40  # of a log-probability: sums of float64 are closer, whatever their order


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefix of drafted tokens: its log-probability, and per depth its rank and its logit."""

    score: float
    ranks: tuple[int, ...] = ()
    logits: tuple[float, ...] = ()


def not_best_first(draft_logits: np.ndarray, budget: int, tree: DraftTree) -> str | None:
    """Why the tree is not the best-first one of draft_logits [depth, w]; None: it is."""
    rows = [_Row(row) for row in draft_logits.astype(np.float64)]
    taken = [_Prefix(0.0)]  # node by node
    places = [0]  # of each node: how many children it has so far
    for node in range(1, len(tree)):
        parent, token = tree.parents[node], tree.tokens[node]
        depth = len(taken[parent].ranks)
        if _next_child(rows, taken[parent], places[parent]) is None:
            return f"node {node} is below node {parent}, for which draft_logits have no child left"
        right = rows[depth].brought_forward(places[parent], token)
        if right != token:
            return (
                f"node {node} has token {token}, but by draft_logits[{depth}] the next child of "
                f"node {parent} has {right}"
            )
        mine = _next_child(rows, taken[parent], places[parent])
        assert mine is not None
        for other in range(node):
            offered = _next_child(rows, taken[other], places[other])
            if offered is not None and _precedes(offered, mine):
                return (
                    f"node {node} has log-probability {mine.score:.6g}, but by draft_logits a "
                    f"child of node {other} comes before it, with {offered.score:.6g}"
                )
        taken.append(mine)
        places.append(0)
        places[parent] += 1
    more = any(_next_child(rows, *one) for one in zip(taken, places, strict=True))
    drafted = len(tree) - 1
    if drafted > budget or (drafted < budget and more):
        return f"the tree has {drafted} nodes besides the root, but the budget is {budget}"
    return None


@dataclass(frozen=True, slots=True)
class _Candidate:
    token: int
    logit: float
    log_prob: float


class _Row:
    """The candidates of one depth, the best first; those of equal logits by id."""

    def __init__(self, logits: np.ndarray) -> None:
        self.candidates: list[_Candidate] = []
        if not np.isfinite(logits).any():
            return
        with np.errstate(over="ignore"):  # too far below the best: -inf, and never taken
            shifted = logits - logits.max()
        log_probs = shifted - np.log(np.exp(shifted).sum())
        for token in np.argsort(-logits, kind="stable").tolist():
            if log_probs[token] > -np.inf:
                one = _Candidate(token, float(logits[token]), float(log_probs[token]))
                self.candidates.append(one)

    def brought_forward(self, place: int, token: int) -> int:
        """The token at a place; where `token` may as well be there, as rounding goes, it is."""
        here = self.candidates[place]
        for i, one in enumerate(self.candidates[place + 1 :], start=place + 1):
            if here.log_prob - one.log_prob > _slack(here.log_prob):
                break
            if one.token == token and one.logit != here.logit:
                self.candidates.insert(place, self.candidates.pop(i))
                break
        return self.candidates[place].token


def _next_child(rows: list[_Row], above: _Prefix, place: int) -> _Prefix | None:
    depth = len(above.ranks)
    if depth >= len(rows) or place >= len(rows[depth].candidates):
        return None
    one = rows[depth].candidates[place]
    score = above.score + one.log_prob
    return _Prefix(score, (*above.ranks, place), (*above.logits, one.logit))


def _precedes(one: _Prefix, other: _Prefix) -> bool:
    """Whether `one` must be taken first."""
    if one.logits == other.logits:
        return one.ranks < other.ranks
    return one.score - other.score > _slack(other.score)


def _slack(score: float) -> float:
    return _ROUNDING * max(1.0, abs(score))
