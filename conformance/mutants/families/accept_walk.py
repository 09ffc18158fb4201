"""The walk, the argmax before it and the bonus after it, each wrong in many ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.families.family import (
    Family,
    Maker,
    Occasion,
    call_of,
    result_of,
)
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    ALWAYS,
    IN_PREFILL,
    IN_ROUND,
    IN_TREES,
    LATER_ROUNDS,
    OF_BRANCHES,
    large_from,
)

_WALK = ("ACC-1",)
_BONUS = ("ACC-2", "COMMIT-2")
_WHENS = (ALWAYS, LATER_ROUNDS, AFTER_REJECTION, IN_ROUND, large_from(8))


def _with_path(walk: Any, path: list[int], bonus: int | None = None) -> Any:
    out = np.full_like(walk.path, -1)
    out[: len(path)] = path
    kept = walk.bonus if bonus is None else np.array([bonus])
    return walk._replace(path=out, accept_len=np.array([len(path)]), bonus=kept)


def _path(walk: Any) -> list[int]:
    kept: list[int] = walk.path[: int(walk.accept_len[0])].tolist()
    return kept


Cut = Callable[[list[int]], list[int]]


def _cut(cut: Cut) -> Any:
    """A shorter path, with the bonus that belongs to it."""

    def change(walk: Any, now: Occasion, tokens: Any, parents: Any, targets: Any, *_: Any) -> Any:
        path = cut(_path(walk))
        return _with_path(walk, path, int(targets[path[-1]]))

    return change


def _longer(pick: Callable[[list[int], np.ndarray], int | None]) -> Any:
    """One more node under the last, though its token is not the target."""

    def change(walk: Any, now: Occasion, tokens: Any, parents: Any, targets: Any, *_: Any) -> Any:
        path = _path(walk)
        more = pick(path, np.flatnonzero(parents == path[-1]))
        return walk if more is None else _with_path(walk, [*path, more], int(targets[more]))

    return change


_CUTS: dict[str, Cut] = {
    "no draft is accepted": lambda path: path[:1],
    "at most one draft is accepted": lambda path: path[:2],
    "at most two drafts are accepted": lambda path: path[:3],
    "at most three drafts are accepted": lambda path: path[:4],
    "the last draft is dropped": lambda path: path[: max(1, len(path) - 1)],
    "drafts up to index 2 are accepted": lambda path: _while(path, lambda a, b: b <= 2),
    "drafts up to index 4 are accepted": lambda path: _while(path, lambda a, b: b <= 4),
    "drafts up to index 31 are accepted": lambda path: _while(path, lambda a, b: b <= 31),
    "drafts up to index 63 are accepted": lambda path: _while(path, lambda a, b: b <= 63),
    "only the next node can follow": lambda path: _while(path, lambda a, b: b == a + 1),
    "the next node cannot follow": lambda path: _while(path, lambda a, b: b != a + 1),
    "the last node of a tree of four cannot follow": lambda path: _while(path, lambda a, b: b != 3),
}
# tokens, parents, targets -> those that the walk is given
_INPUTS: dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]] = {
    "targets are those of the row before": lambda t, p, x: (t, p, np.roll(x, 1)),
    "targets are those of the row after": lambda t, p, x: (t, p, np.roll(x, -1)),
    "every node has the root's target": lambda t, p, x: (t, p, np.full_like(x, x[0])),
    "every node has the last row's target": lambda t, p, x: (t, p, np.full_like(x, x[-1])),
    "targets are one too high": lambda t, p, x: (t, p, x + 1),
    "targets are one too low": lambda t, p, x: (t, p, np.maximum(x - 1, 0)),
    "tokens are those of the node after": lambda t, p, x: (np.roll(t, -1), p, x),
    "tokens are those of the node before": lambda t, p, x: (np.roll(t, 1), p, x),
    "the first child of each node is skipped": lambda t, p, x: (_siblings(t, p, first=True), p, x),
    "the last child of each node is skipped": lambda t, p, x: (_siblings(t, p, first=False), p, x),
    "the second child of each node is skipped": lambda t, p, x: (_ranked(t, p, 1), p, x),
    "the third child of each node is skipped": lambda t, p, x: (_ranked(t, p, 2), p, x),
    "a child beyond the third is skipped": lambda t, p, x: (_ranked(t, p, 3), p, x),
    "all drafts are children of the root": lambda t, p, x: (t, np.minimum(p, 0), x),
    "tokens are compared in 5 bits": lambda t, p, x: (t % 32, p, x % 32),
    "tokens are compared without the lowest bit": lambda t, p, x: (t // 2 * 2, p, x // 2 * 2),
    "token 0 is never accepted": lambda t, p, x: (np.where(t == 0, -1, t), p, x),
    "tokens from 32 on are never accepted": lambda t, p, x: (np.where(t >= 32, -1, t), p, x),
    "the last id is never accepted": lambda t, p, x: (np.where(t == 60, -1, t), p, x),
}
# walk, tokens, parents, targets -> the bonus
_BONUSES: dict[str, Callable[[list[int], Any, Any, Any], int]] = {
    "the target of the root": lambda path, t, p, x: int(x[0]),
    "the target of the last row": lambda path, t, p, x: int(x[-1]),
    "the target of the row accept_len": lambda path, t, p, x: int(x[min(len(path), len(x) - 1)]),
    "the target of the row accept_len - 1": lambda path, t, p, x: int(x[len(path) - 1]),
    "the target of the parent of the last": lambda path, t, p, x: int(x[max(p[path[-1]], 0)]),
    "the last accepted token": lambda path, t, p, x: int(t[path[-1]]),
    "the token of the last row": lambda path, t, p, x: int(t[-1]),
    "one too high": lambda path, t, p, x: int(x[path[-1]] + 1),
    "token 0": lambda path, t, p, x: 0,
    "the target of the row before": lambda path, t, p, x: int(x[path[-1] - 1]),
}


def _paths() -> dict[str, Any]:
    return {
        "the path is told one node longer": _longer(
            lambda path, below: int(below[0]) if len(below) else None
        ),
        "the path ends with the last child": _longer(
            lambda path, below: int(below[-1]) if len(below) else None
        ),
        "a path of the root alone gets a draft": _longer(
            lambda path, below: int(below[0]) if len(path) == 1 and len(below) else None
        ),
        "a path of two or more gets another draft": _longer(
            lambda path, below: int(below[0]) if len(path) > 1 and len(below) else None
        ),
    }


def accept_walk() -> Family:
    make = Maker(
        "accept walk",
        "ACC",
        "the walk cut short, led astray or told longer; the bonus of another row",
    )
    for label, cut in _CUTS.items():
        make.add_each(label, _WALK, result_of("accept_walk", _cut(cut)), _WHENS)
    for label, change in _paths().items():
        make.add_each(label, _WALK, result_of("accept_walk", change), _WHENS)
    for label, given in _INPUTS.items():
        make.add_each(label, (*_WALK, *_BONUS), call_of("accept_walk", _given(given)), _WHENS)
    for label, bonus in _BONUSES.items():
        whens = (*_WHENS, OF_BRANCHES)
        make.add_each(f"bonus: {label}", _BONUS, result_of("accept_walk", _bonus(bonus)), whens)
    return make.family()


_ARGMAX: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "ties to the highest id": lambda argmax, x: x.shape[-1] - 1 - argmax(x[:, ::-1]),
    "the second best": lambda argmax, x: np.argsort(-x, axis=-1, kind="stable")[:, 1],
    "the least": lambda argmax, x: argmax(-x),
    "of magnitudes": lambda argmax, x: argmax(np.abs(x)),
    "without the last id": lambda argmax, x: argmax(x[:, :-1]),
    "without token 0": lambda argmax, x: argmax(x[:, 1:]) + 1,
    "of the first half of the vocabulary": lambda argmax, x: argmax(x[:, : x.shape[-1] // 2]),
    "of the first 32 tokens": lambda argmax, x: argmax(x[:, :32]),
    "of even tokens": lambda argmax, x: 2 * argmax(x[:, ::2]),
    "with one column of zeros": lambda argmax, x: argmax(np.pad(x, ((0, 0), (0, 1)))),
    "with zero for what is negative": lambda argmax, x: argmax(np.maximum(x, 0)),
    "one too high": lambda argmax, x: (argmax(x) + 1) % x.shape[-1],
    "of the row before": lambda argmax, x: np.roll(argmax(x), 1),
    "of the row after": lambda argmax, x: np.roll(argmax(x), -1),
    "of the last row for all": lambda argmax, x: np.full(len(x), argmax(x)[-1]),
    "of the root for all": lambda argmax, x: np.full(len(x), argmax(x)[0]),
    "of logits in bfloat16": lambda argmax, x: argmax(x.astype(ml_dtypes.bfloat16).astype(x.dtype)),
    "of logits in float16": lambda argmax, x: argmax(x.astype(np.float16).astype(x.dtype)),
    "of logits in float8": lambda argmax, x: argmax(
        x.astype(ml_dtypes.float8_e4m3fn).astype(x.dtype)
    ),
    "of logits less their column's mean": lambda argmax, x: argmax(x - x.mean(axis=0)),
}


def argmax() -> Family:
    make = Maker("argmax", "ACC", "the target of a row is another token than its first maximum")
    for label, change in _ARGMAX.items():
        whens = (IN_TREES, IN_PREFILL, LATER_ROUNDS, IN_ROUND, large_from(5))
        make.add_each(label, ("ACC-1", "FWD-1"), call_of("argmax", _argmax(change)), whens)
    return make.family()


def _argmax(change: Any) -> Any:
    return lambda original, now, logits: change(original, logits)


def _given(given: Any) -> Any:
    def change(
        original: Any, now: Occasion, tokens: Any, parents: Any, targets: Any, *rest: Any
    ) -> Any:
        walk = original(*given(tokens, parents, targets), *rest)
        last = int(walk.path[int(walk.accept_len[0]) - 1])
        return walk._replace(bonus=np.array([targets[last]]))

    return change


def _bonus(bonus: Any) -> Any:
    def change(walk: Any, now: Occasion, tokens: Any, parents: Any, targets: Any, *_: Any) -> Any:
        return walk._replace(bonus=np.array([bonus(_path(walk), tokens, parents, targets)]))

    return change


def _while(path: list[int], goes_on: Callable[[int, int], bool]) -> list[int]:
    kept = path[:1]
    for node in path[1:]:
        if not goes_on(kept[-1], node):
            break
        kept.append(node)
    return kept


def _ranked(tokens: Any, parents: Any, rank: int) -> Any:
    """Tokens without those of the children of this rank; of 3, of all from there on."""
    ranks = np.array([parents[:i].tolist().count(p) for i, p in enumerate(parents.tolist())])
    lost = ranks >= 3 if rank == 3 else ranks == rank
    return np.where(lost & (parents >= 0), -1, tokens)


def _siblings(tokens: Any, parents: Any, *, first: bool) -> Any:
    order = parents.tolist() if first else parents.tolist()[::-1]
    lost = np.array([p >= 0 and p not in order[:i] for i, p in enumerate(order)])
    return np.where(lost if first else lost[::-1], -1, tokens)
