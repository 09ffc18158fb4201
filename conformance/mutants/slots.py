"""SLOT: where rows lie: slots, pages, layers; rows that are lost or stale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import in_trees, on_open, physical, wrap

SLOTS = MutantClass("slots and pages")


@SLOTS.mutant("M049", "SLOT-2", breaks="SLOT-1", first_seen_at="scores", needs="paged")
def pages_for_the_root_alone(engine: Any) -> None:
    """A tree has pages for L + 1 rows; in the page table the others find a 0."""

    def change(session: Any) -> None:
        cache, staged, is_tree = session._cache, session._staged, [False]
        map_slots = cache.map_slots

        def watched(tokens: Any, parents: Any = None, *limits: Any) -> Any:
            is_tree[0] = parents is not None
            return staged(tokens, parents, *limits)

        def faulty(n_slots: int) -> None:
            map_slots(session.committed_len + 1 if is_tree[0] else n_slots)
            cache.page_table[cache.page_table < 0] = 0

        session._staged, cache.map_slots = watched, faulty

    on_open(engine, change)


@SLOTS.mutant("M051", "SLOT-4", breaks="SLOT-1", first_seen_at="scores", needs="paged")
def pages_contiguous(engine: Any) -> None:
    """Rows past a page's end go to the physical neighbour, not to the table's next page."""

    def append_latents(
        original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> None:
        rows = physical(cache, int(slots[0])) + np.arange(len(slots))
        rows %= cache.rows.shape[1]
        cache.rows[layer, rows] = np.concatenate([c_kv, k_pe], axis=-1)

    wrap(engine, append_latents=append_latents)


@SLOTS.mutant("M053", "SLOT-6", breaks="MASK-3", first_seen_at="out_latent", needs="paged")
def last_page_read_whole(engine: Any) -> None:
    """The last page's length is that of the sequence: keys behind it are read."""

    def behind(cache: Any, n_slots: int) -> int:
        in_last = (n_slots - 1) % cache.page_size + 1
        return min(n_slots, cache.page_size) - in_last

    read_behind(engine, behind)


@SLOTS.mutant("M054", "SLOT-7", breaks="COMMIT-3", first_seen_at="cache_c_kv", needs="core")
def one_layer_for_all(engine: Any) -> None:
    """Cache[layer] -> cache[0]."""

    def append_latents(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
        return original(cache, 0, *rest)

    def verify_attn(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
        return original(cache, 0, *rest)

    wrap(engine, append_latents=append_latents, verify_attn=verify_attn)


@SLOTS.mutant("M056", "SLOT-9", breaks="SLOT-1", first_seen_at="scores", needs="core")
def four_rows_written(engine: Any) -> None:
    """Of a tree only the first four rows are written."""
    is_tree = in_trees(engine)

    def append_latents(
        original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> Any:
        n = 4 if is_tree() else len(slots)
        return original(cache, layer, slots[:n], c_kv[:n], k_pe[:n])

    wrap(engine, append_latents=append_latents)


SLOTS.waits("M057", "SLOT-10", "a pool of slots", "only slots below L are given back")
SLOTS.waits(
    "M059",
    "SLOT-12",
    "a drafter's cache",
    "after a draft round the verify reads with the drafter's page table",
)


def read_behind(engine: Any, behind: Callable[[Any, int], int]) -> None:
    """Every row also reads behind(cache, n_slots) slots behind its forward's own."""

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        *plain, scores = rest
        out = original(cache, layer, q_latent, q_pe, seen, *plain, scores)
        more = behind(cache, seen.n_slots)
        if not more:
            return out
        block = np.concatenate([seen.block, np.ones((len(seen.block), more), bool)], axis=1)
        return original(cache, layer, q_latent, q_pe, replace(seen, block=block), *plain, None)

    wrap(engine, verify_attn=verify_attn)
