"""CMP: compaction after accept, and the length that follows."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_commit, on_open, physical, rows_restored, wrap

COMPACTION = MutantClass("compaction")


@COMPACTION.mutant("M035", "CMP-1", breaks="COMMIT-1", first_seen_at="cache_c_kv", needs="core")
def no_compaction(engine: Any) -> None:
    """Rows stay where they are, and L grows."""

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        with rows_restored(cache, slice(None)):
            return original(cache, *rest)

    wrap(engine, commit_rows=commit_rows)


@COMPACTION.mutant("M037", "CMP-3", breaks="COMMIT-1", first_seen_at="cache_k_pe", needs="core")
def only_c_kv_moves(engine: Any) -> None:
    """The k_pe columns stay behind."""

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        with rows_restored(cache, slice(cache.latent_len, None)):
            return original(cache, *rest)

    wrap(engine, commit_rows=commit_rows)


@COMPACTION.mutant(
    "M039", "CMP-5", breaks="COMMIT-1", also=("COMMIT-3",), first_seen_at="scores", needs="core"
)
def compacts_a_copy(engine: Any) -> None:
    """The snapshot shows compacted rows; what the next forward reads was left alone."""
    compacted: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()  # rows by slot

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        with rows_restored(cache, slice(None)):
            moves = original(cache, *rest)
            rows = compacted.setdefault(cache, {})
            for _, slot in moves[moves[:, 0] >= 0].tolist():
                rows[slot] = cache.rows[:, physical(cache, slot)].copy()
        return moves

    def read_rows(original: Any, cache: Any, n_slots: int) -> Any:
        rows = original(cache, n_slots).copy()
        for slot, row in compacted.get(cache, {}).items():
            if slot < n_slots:
                rows[:, slot] = row
        return rows

    wrap(engine, commit_rows=commit_rows, read_rows=read_rows)


@COMPACTION.mutant("M041", "CMP-7", breaks="COMMIT-2", first_seen_at="committed_len", needs="core")
def miss_empties_the_cache(engine: Any) -> None:
    """Where no draft is accepted L becomes 0."""

    def change(session: Any) -> None:
        advance, staged, n = session._advance, session._staged, [0]

        def watched(tokens: Any, parents: Any = None, *limits: Any) -> Any:
            n[0] = 0 if parents is None else len(tokens)
            return staged(tokens, parents, *limits)

        def faulty(tokens: Any, positions: Any, root: int) -> None:
            advance(tokens, positions, root)
            if n[0] > 1 and len(tokens) == 1:
                session._tokens.clear()
                session._positions.clear()

        session._advance, session._staged = faulty, watched

    on_open(engine, change)


@COMPACTION.mutant("M042", "CMP-8", breaks="COMMIT-2", first_seen_at="committed_len", needs="core")
def length_grows_by_tree(engine: Any) -> None:
    """L += M."""
    on_commit(engine, lambda parents, path, session: range(len(parents)))


@COMPACTION.mutant("M044", "CMP-10", breaks="COMMIT-2", first_seen_at="committed_len", needs="core")
def root_not_counted(engine: Any) -> None:
    """L += accepted drafts."""
    on_commit(engine, lambda parents, path, session: path[1:])


COMPACTION.waits(
    "M046",
    "CMP-12",
    "hidden states for a drafter",
    "hidden states of rows 0..a instead of those of the path",
)


@COMPACTION.mutant("M047", "CMP-13", breaks="COMMIT-2", first_seen_at="committed_len", needs="core")
def full_cache_is_not_cut(engine: Any) -> None:
    """L += M where the tree's last row fills the cache."""

    def kept(parents: Any, path: list[int], session: Any) -> Any:
        is_full = session.committed_len + len(parents) == session._cache.capacity
        return np.arange(len(parents)) if is_full else path

    on_commit(engine, kept)
