"""Compaction: rows and layers that stay behind or move elsewhere; what a session's books keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.families.family import Family, Maker, by_turns
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    ALWAYS,
    IN_FORWARD,
    IN_ROUND,
    LATER_ROUNDS,
    SECOND_ROUND,
    Watch,
    When,
    large_from,
    long_from,
)
from kdtr.conformance.mutants.planting import on_commit, on_open, physical, wrap

Where = Callable[[int], Any]  # layers -> index of the layers whose rows move wrongly

_LAYERS: dict[str, Where] = {
    "in every layer": lambda n: slice(None),
    "in layer 0": lambda n: [0],
    "in layer 1": lambda n: [1],
    "in the last layer": lambda n: [n - 1],
}
_COLUMNS: dict[str, Callable[[Any], slice]] = {
    "": lambda cache: slice(None),
    " of c_kv": lambda cache: slice(cache.latent_len),
    " of k_pe": lambda cache: slice(cache.latent_len, None),
    " of the first column": lambda cache: slice(1),
    " of the last column": lambda cache: slice(-1, None),
}
# sources and destinations [a] of the moves, L, M -> those that are made
Moves = Callable[[np.ndarray, np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]
_MOVES: dict[str, Moves] = {
    "nothing moves": lambda s, d, length, n: (s[:0], d[:0]),
    "the last accepted row stays": lambda s, d, length, n: (s[:-1], d[:-1]),
    "the first accepted draft stays": lambda s, d, length, n: (
        (np.delete(s, 1), np.delete(d, 1)) if len(s) > 1 else (s, d)
    ),
    "rows from the third on stay": lambda s, d, length, n: (s[:2], d[:2]),
    "sources are one too low": lambda s, d, length, n: (np.maximum(s - 1, 0), d),
    "sources are one too high": lambda s, d, length, n: (np.minimum(s + 1, length + n - 1), d),
    "sources of drafts are one too high": lambda s, d, length, n: (
        np.append(s[:1], np.minimum(s[1:] + 1, length + n - 1)),
        d,
    ),
    "sources are the tree's last rows": lambda s, d, length, n: (length + n - len(s) + d - d[0], d),
    "the path is taken from the end": lambda s, d, length, n: (s[::-1], d),
    "drafts are taken from the end": lambda s, d, length, n: (np.append(s[:1], s[:0:-1]), d),
    "destinations are one too high": lambda s, d, length, n: (
        s,
        np.minimum(d + 1, length + n - 1),
    ),
    "destinations of drafts are one too low": lambda s, d, length, n: (
        s,
        np.append(d[:1], np.maximum(d[1:] - 1, 0)),
    ),
    "every draft lands on the first": lambda s, d, length, n: (s, np.minimum(d, d[0] + 1)),
    "the last row is copied over the root's": lambda s, d, length, n: (
        np.append(s, s[-1]),
        np.append(d, d[0]),
    ),
    "slot L - 1 is overwritten by the root's": lambda s, d, length, n: (
        np.append(s, s[0]),
        np.append(d, max(length - 1, 0)),
    ),
    "slot 0 is overwritten by the last row": lambda s, d, length, n: (
        np.append(s, s[-1]),
        np.append(d, 0),
    ),
    "only rows of the first page are moved": lambda s, d, length, n: (s[d < 16], d[d < 16]),
}


def compaction() -> Family:
    make = Maker(
        "compaction",
        "CMP",
        "rows of a commit that stay, move elsewhere or are changed, in some layers or columns",
    )
    everywhere, *some = _LAYERS
    for number, (label, moves) in enumerate(_MOVES.items()):
        for where in (everywhere, by_turns(some, number)):
            plant = _moved(moves, _LAYERS[where], _COLUMNS[""])
            make.add_each(f"{label} {where}", _RULES, plant, (ALWAYS, LATER_ROUNDS, large_from(5)))
    for what, columns in _COLUMNS.items():
        if not what:
            continue
        for where, layers in _LAYERS.items():
            plant = _moved(_MOVES["nothing moves"], layers, columns)
            make.add_each(f"nothing moves{what} {where}", _RULES, plant, (ALWAYS, LATER_ROUNDS))
    for label, one in _IN_PLACE.items():
        make.add_each(label, _RULES, one, (ALWAYS, LATER_ROUNDS, IN_ROUND, IN_FORWARD))
    for label, kept in _KEPT.items():
        make.add_each(f"books: {label}", _BOOKS, _keeping(kept), _BOOKS_WHEN)
    for label, root in _ROOTS.items():
        make.add_each(f"next root: {label}", _BOOKS, _rooted(root), _BOOKS_WHEN)
    for label, told in _TOLD.items():
        make.add_each(f"positions of the books: {label}", _TOLD_RULES, _placed(told), _BOOKS_WHEN)
    return make.family()


_RULES = ("COMMIT-1", "COMMIT-3", "SLOT-2")
_BOOKS = ("COMMIT-2", "FWD-1", "COMMIT-3")
_TOLD_RULES = ("COMMIT-3", "POS-1")
_BOOKS_WHEN = (ALWAYS, SECOND_ROUND, AFTER_REJECTION, long_from(17))


def _moved(
    moves: Moves, layers: Where, columns: Callable[[Any], slice]
) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def commit_rows(original: Any, cache: Any, path: Any, accept_len: Any, length: int) -> Any:
            before = cache.rows.copy()
            done = original(cache, path, accept_len, length)
            if not when.holds(watch.now):
                return done
            a = int(accept_len[0])
            source, destination = length + path[:a], length + np.arange(a)
            source, destination = moves(source, destination, length, watch.now.n_rows)
            rows = before.copy()
            rows[:, [physical(cache, int(one)) for one in destination]] = before[
                :, [physical(cache, int(one)) for one in source]
            ]
            at, cut = layers(len(rows)), columns(cache)
            cache.rows[at, :, cut] = rows[at, :, cut]
            return done

        wrap(engine, commit_rows=commit_rows)

    return plant


def _after_commit(
    change: Callable[[Any, np.ndarray, list[int]], None],
) -> Callable[[Any, Watch, When], None]:
    """change(cache, rows as they were, the physical rows that were written), in place."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def commit_rows(original: Any, cache: Any, path: Any, accept_len: Any, length: int) -> Any:
            before = cache.rows.copy()
            done = original(cache, path, accept_len, length)
            if when.holds(watch.now):
                n = int(accept_len[0])
                change(cache, before, [physical(cache, length + k) for k in range(n)])
            return done

        wrap(engine, commit_rows=commit_rows)

    return plant


def _descending(cache: Any, before: np.ndarray, written: list[int]) -> None:
    """From the last row to the first without a buffer, as the rows were told to move."""
    rows = before.copy()
    moved = [int(np.argmax((before == cache.rows[:, [d]]).all(axis=(0, 2)))) for d in written]
    for source, destination in reversed([*zip(moved, written, strict=True)]):
        rows[:, destination] = rows[:, source]
    cache.rows[:] = rows


def _rounded(dtype: Any) -> Callable[[Any, np.ndarray, list[int]], None]:
    def change(cache: Any, before: np.ndarray, written: list[int]) -> None:
        cache.rows[:, written] = cache.rows[:, written].astype(dtype).astype(np.float32)

    return change


def _spoilt(rows: Callable[[list[int]], list[int]], value: float) -> Any:
    def change(cache: Any, before: np.ndarray, written: list[int]) -> None:
        cache.rows[:, rows(written)] = value

    return change


def _turned(cache: Any, before: np.ndarray, written: list[int]) -> None:
    """The k_pe of what moved is rotated by one position more."""
    c = cache.latent_len
    first, second = np.split(cache.rows[:, written, c:], 2, axis=-1)
    turn = 1.0 / 3000.0 ** (np.arange(first.shape[-1]) / first.shape[-1])
    cos, sin = np.cos(turn), np.sin(turn)
    cache.rows[:, written, c:] = np.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


_IN_PLACE = {
    "rows move from the last to the first, without a buffer": _after_commit(_descending),
    "what moves is rounded to bfloat16": _after_commit(_rounded(ml_dtypes.bfloat16)),
    "what moves is rounded to float16": _after_commit(_rounded(np.float16)),
    "what moves is rounded to float8": _after_commit(_rounded(ml_dtypes.float8_e4m3fn)),
    "what moves is rotated again": _after_commit(_turned),
    "the last row that moves is zero": _after_commit(_spoilt(lambda rows: rows[-1:], 0.0)),
    "the root's row is zero": _after_commit(_spoilt(lambda rows: rows[:1], 0.0)),
    "the first draft's row is not a number": _after_commit(
        _spoilt(lambda rows: rows[1:2], float("nan"))
    ),
}
# parents, path -> the nodes that the books take
_KEPT: dict[str, Callable[[Any, list[int]], Any]] = {
    "the whole tree": lambda parents, path: range(len(parents)),
    "nothing": lambda parents, path: [],
    "the root alone": lambda parents, path: path[:1],
    "the drafts alone": lambda parents, path: path[1:],
    "all but the last": lambda parents, path: path[:-1],
    "the last twice": lambda parents, path: [*path, path[-1]],
    "the root twice": lambda parents, path: [0, *path],
    "at most two": lambda parents, path: path[:2],
    "at most three": lambda parents, path: path[:3],
    "the first rows": lambda parents, path: range(len(path)),
    "the last rows": lambda parents, path: range(len(parents) - len(path), len(parents)),
    "one row more": lambda parents, path: [*path, min(path[-1] + 1, len(parents) - 1)],
}
_ROOTS: dict[str, Callable[[list[int], int], int]] = {
    "the last token kept": lambda tokens, root: tokens[-1] if tokens else root,
    "the first token kept": lambda tokens, root: tokens[0] if tokens else root,
    "one too high": lambda tokens, root: (root + 1) % 61,
    "token 0": lambda tokens, root: 0,
    "with 5 bits": lambda tokens, root: root % 32,
}
_TOLD: dict[str, Callable[[list[int]], list[int]]] = {
    "one too high": lambda positions: [p + 1 for p in positions],
    "of drafts one too high": lambda positions: [*positions[:1], *(p + 1 for p in positions[1:])],
    "the root's for all": lambda positions: positions[:1] * len(positions),
    "from the end": lambda positions: positions[::-1],
    "the last one too low": lambda positions: [*positions[:-1], *(p - 1 for p in positions[-1:])],
}


def _keeping(kept: Callable[[Any, list[int]], Any]) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        on_commit(
            engine,
            lambda parents, path, session: kept(parents, path) if when.holds(watch.now) else path,
        )

    return plant


def _advancing(change: Any) -> Callable[[Any, Watch, When], None]:
    """The books are given change(tokens, positions, root)."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def follow(session: Any) -> None:
            advance = session._advance

            def faulty(tokens: Any, positions: Any, root: int) -> None:
                given = [*tokens], [*positions], root
                advance(*(change(*given) if when.holds(watch.now) else given))

            session._advance = faulty

        on_open(engine, follow)

    return plant


def _rooted(root: Callable[[list[int], int], int]) -> Callable[[Any, Watch, When], None]:
    return _advancing(lambda tokens, positions, old: (tokens, positions, root(tokens, old)))


def _placed(told: Callable[[list[int]], list[int]]) -> Callable[[Any, Watch, When], None]:
    return _advancing(lambda tokens, positions, root: (tokens, told(positions), root))
