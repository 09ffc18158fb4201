"""The tree as it is built from draft logits, and as it is handed to the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.families.family import Family, Maker, by_turns, depths_of
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    IN_PREFILL,
    IN_TREES,
    LATER_ROUNDS,
    OF_BRANCHES,
    Watch,
    When,
    large_from,
)
from kdtr.conformance.mutants.planting import wrap

Build = Callable[[Any, np.ndarray, int], Any]  # the right build, draft_logits, budget


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _rescored(scores: Callable[[np.ndarray], np.ndarray]) -> Build:
    """Built from other logits."""
    return lambda build, logits, budget: build(scores(logits), budget)


def _reordered(order: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Build:
    """The same nodes in another order of drafts; their parents follow."""

    def change(build: Any, logits: np.ndarray, budget: int) -> Any:
        parents, tokens = build(logits, budget)
        nodes = np.concatenate([[0], 1 + order(parents, tokens)])
        place = np.argsort(nodes)
        moved = np.where(parents[nodes] < 0, -1, place[parents[nodes]])
        return moved, tokens[nodes]

    return change


def _arrays(change: Callable[[Any, Any], Any]) -> Build:
    return lambda build, logits, budget: change(*build(logits, budget))


def _narrow(most: int) -> Build:
    """At most this many children of a node: the tokens beyond are never offered."""

    def scores(logits: np.ndarray) -> np.ndarray:
        out = np.full_like(logits, -np.inf)
        for row, values in zip(out, logits, strict=True):
            best = np.argsort(-values, kind="stable")[:most]
            row[best] = values[best]
        return out

    return _rescored(scores)


_BUILDS: dict[str, Build] = {
    "one node too few": lambda build, logits, budget: build(logits, max(budget - 1, 0)),
    "one node too many": lambda build, logits, budget: build(logits, budget + 1),
    "at most 4 nodes": lambda build, logits, budget: build(logits, min(budget, 3)),
    "at most 8 nodes": lambda build, logits, budget: build(logits, min(budget, 7)),
    "at most 12 nodes": lambda build, logits, budget: build(logits, min(budget, 11)),
    "the first depth is left out": _rescored(lambda logits: logits[1:]),
    "the last depth is left out": _rescored(lambda logits: logits[:-1]),
    "one depth alone": _rescored(lambda logits: logits[:1]),
    "two depths alone": _rescored(lambda logits: logits[:2]),
    "depths in reverse": _rescored(lambda logits: logits[::-1]),
    "the first row for every depth": _rescored(
        lambda logits: np.repeat(logits[:1], len(logits), 0)
    ),
    "one child a node": _narrow(1),
    "two children a node": _narrow(2),
    "three children a node": _narrow(3),
    "logits halved": _rescored(lambda logits: logits / 2),
    "logits doubled": _rescored(lambda logits: logits * 2),
    "a temperature of 0.9": _rescored(lambda logits: logits / 0.9),
    "scores rounded to float32": _rescored(
        lambda logits: _log_softmax(logits).astype(np.float32).astype(np.float64)
    ),
    "logits rounded to float16": _rescored(
        lambda logits: logits.astype(np.float16).astype(np.float64)
    ),
    "deeper rows count less": _rescored(
        lambda logits: logits * 0.9 ** np.arange(len(logits))[:, None]
    ),
    "without token 0": _rescored(lambda logits: _lost(logits, 0)),
    "without the last id": _rescored(lambda logits: _lost(logits, -1)),
    "tokens of the first half alone": _rescored(
        lambda logits: _lost(logits, slice(logits.shape[-1] // 2, None))
    ),
    "ties to the highest id": lambda build, logits, budget: _mirrored(build, logits, budget),
    "siblings by id": _reordered(lambda parents, tokens: _stable(parents[1:], tokens[1:])),
    "breadth first": _reordered(
        lambda parents, tokens: np.argsort(depths_of(parents.tolist())[1:], kind="stable")
    ),
    "drafts by token": _arrays(
        lambda parents, tokens: (parents, np.append(tokens[:1], np.sort(tokens[1:])))
    ),
    "drafts from the end": _arrays(
        lambda parents, tokens: (parents, np.append(tokens[:1], tokens[:0:-1]))
    ),
    "the last two drafts swapped": _arrays(lambda parents, tokens: (parents, _swap(tokens))),
    "tokens one too high": _arrays(lambda parents, tokens: (parents, tokens + (tokens >= 0))),
    "tokens rolled by one": _arrays(
        lambda parents, tokens: (parents, np.append(tokens[:1], np.roll(tokens[1:], 1)))
    ),
    "every draft under the root": _arrays(
        lambda parents, tokens: (np.minimum(parents, 0), _distinct(tokens))
    ),
    "the last node under the root": _arrays(
        lambda parents, tokens: (np.append(parents[:-1], min(parents[-1], 0)), tokens)
    ),
    "the last node under the one before": _arrays(
        lambda parents, tokens: (
            (np.append(parents[:-1], len(parents) - 2), tokens)
            if len(parents) > 1
            else (parents, tokens)
        )
    ),
}
# tokens [n], parents -> tokens that the forward is given
_HANDED: dict[str, Callable[[np.ndarray, np.ndarray | None], np.ndarray]] = {
    "the last token is that of the row before": lambda t, p: np.append(
        t[:-1], t[max(len(t) - 2, 0)]
    ),
    "the last token is 0": lambda t, p: np.append(t[:-1], 0),
    "token 0 is read as 1": lambda t, p: np.where(t == 0, 1, t),
    "the last id is read as the one before": lambda t, p: np.where(t == 60, 59, t),
    "tokens from 32 on lose a bit": lambda t, p: t % 32,
    "tokens are rolled by one": lambda t, p: np.roll(t, 1),
    "the root's token is 0": lambda t, p: np.append(0, t[1:]),
    "the first draft's token is the root's": lambda t, p: (
        np.append(t[:1], t[[0, *range(2, len(t))]]) if len(t) > 1 else t
    ),
    "the tokens of the last two rows are swapped": lambda t, p: _swap(t),
    "a draft's token is its parent's": lambda t, p: t if p is None else t[np.maximum(p, 0)],
    "leaves have the root's token": lambda t, p: (
        t if p is None else np.where(np.isin(np.arange(len(t)), p), t, t[0])
    ),
    "tokens of rows from 4 on are 0": lambda t, p: np.where(np.arange(len(t)) >= 4, 0, t),
}


def tree_arrays() -> Family:
    make = Maker(
        "tree arrays",
        "TREE",
        "the best-first tree from other scores, in another order or of another size; rows that "
        "get another row's token",
    )
    every, *some = _BUDGETS
    for number, (label, build) in enumerate(_BUILDS.items()):
        for name in (every, by_turns(some, number)):
            plant = _built(build, _BUDGETS[name])
            make.add(f"build: {label}, {name}", ("TREE-3", "TREE-4"), plant, _ANY)
    for label, tokens in _HANDED.items():
        whens = (IN_TREES, IN_PREFILL, LATER_ROUNDS, AFTER_REJECTION, OF_BRANCHES, large_from(8))
        make.add_each(label, ("FWD-3", "FWD-4", "TREE-2", "FWD-1"), _handed(tokens), whens)
    return make.family()


_ANY = When("in every build", lambda now: True)
_BUDGETS: dict[str, Callable[[int], bool]] = {
    "of any budget": lambda budget: True,
    "of a budget from 8 on": lambda budget: budget >= 8,
    "of a budget up to 5": lambda budget: budget <= 5,
}


def _built(change: Build, holds: Callable[[int], bool]) -> Callable[[Any, Watch], None]:
    def plant(engine: Any, watch: Watch) -> None:
        def build_best_first(original: Any, draft_logits: Any, budget: int) -> Any:
            if not holds(budget) or not len(draft_logits):
                return original(draft_logits, budget)
            return change(original, draft_logits, budget)

        wrap(engine, build_best_first=build_best_first)

    return plant


def _handed(tokens: Any) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def embed(original: Any, table: Any, ids: Any) -> Any:
            if not when.holds(watch.now):
                return original(table, ids)
            parents = watch.now.parents
            return original(table, tokens(ids, None if parents is None else np.array(parents)))

        wrap(engine, embed=embed)

    return plant


def _lost(logits: np.ndarray, columns: Any) -> np.ndarray:
    out = logits.copy()
    out[:, columns] = -np.inf
    return out


def _mirrored(build: Any, logits: np.ndarray, budget: int) -> Any:
    parents, tokens = build(logits[:, ::-1], budget)
    return parents, np.where(tokens < 0, tokens, logits.shape[-1] - 1 - tokens)


def _stable(parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Siblings exchange places so that their ids ascend; a node's place follows its parent's."""
    order = np.arange(len(parents))
    for parent in set(parents.tolist()):
        places = np.flatnonzero(parents == parent)
        inner = set(parents.tolist())
        leaves = [i for i in places.tolist() if i + 1 not in inner]
        order[leaves] = sorted(leaves, key=lambda i: tokens[i])
    return order


def _swap(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    if len(out) > 2:
        out[[-2, -1]] = out[[-1, -2]]
    return out


def _distinct(tokens: np.ndarray) -> np.ndarray:
    """Siblings differ, or the tree is refused at its birth."""
    out = tokens.copy()
    for i in range(2, len(out)):
        while out[i] in out[1:i]:
            out[i] = (out[i] + 1) % 61
    return out
