"""MASK: columns, layout and packing of the tree mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.padded import Padded
from kdtr.conformance.mutants.planting import in_trees, wrap

MASKS = MutantClass("masks")


@MASKS.mutant(
    "M009", "MASK-1", breaks="MASK-1", also=("MASK-2",), first_seen_at="mask", needs="core"
)
def prefix_short_by_the_padding(engine: Any) -> None:
    """The prefix is shorter by the nodes of padding, and the tree's block as much further left."""
    padded = Padded(engine)

    def change(mask: Any, open_len: int) -> Any:
        first = open_len - (padded.n - padded.rows)
        if first < 0:  # no prefix of this length
            return mask
        moved = np.zeros_like(mask)
        moved[:, :first] = True
        moved[:, first : first + padded.rows] = mask[:, open_len:]
        return moved

    with_mask(engine, change)


@MASKS.mutant("M010", "MASK-2", breaks="MASK-1", first_seen_at="mask", needs="core")
def prefix_invisible(engine: Any) -> None:
    """The mask of a tree is its visibility alone: the prefix columns are false."""

    def change(mask: Any, open_len: int) -> Any:
        return mask & (np.arange(mask.shape[1]) >= open_len)

    with_mask(engine, change)


@MASKS.mutant("M012", "MASK-4", breaks="MASK-2", first_seen_at="mask", needs="flatmask")
def flattened_in_two_parts(engine: Any) -> None:
    """Prefix and block are flattened one after the other, and read as rows of both."""

    def change(mask: Any, open_len: int) -> Any:
        parts = mask[:, :open_len], mask[:, open_len:]
        return np.concatenate([part.ravel() for part in parts]).reshape(mask.shape)

    with_mask(engine, change)


MASKS.waits("M014", "MASK-6", "batch", "a request's packed mask is found by cells, not by bytes")


@MASKS.mutant("M015", "MASK-7", breaks="MASK-2", first_seen_at="mask", needs="core")
def visibility_transposed(engine: Any) -> None:
    """A node sees its descendants instead of its ancestors."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions, ancestors.T.copy()

    wrap(engine, tree_layout=tree_layout)


@MASKS.mutant("M018", "MASK-10", breaks="MASK-2", first_seen_at="mask", needs="packed")
def packed_mask_a_row_short(engine: Any) -> None:
    """The mask's bits have room for M - 1 rows; behind them lie bytes of ones."""

    def change(mask: Any, _: int) -> Any:
        n, s = mask.shape
        allocated = -(-(n - 1) * s // 8)
        bits = np.packbits(mask)
        bits[allocated:] = 0xFF
        return np.unpackbits(bits, count=n * s).astype(bool).reshape(n, s)

    with_mask(engine, change)


def with_mask(engine: Any, change: Callable[[Any, int], Any]) -> None:
    """Of a tree the attention consults, and the trace shows, change(mask [n, s], open_len)."""
    is_tree = in_trees(engine)

    def changed(seen: Any) -> Any:
        if not is_tree():
            return seen
        prefix = np.ones((len(seen.block), seen.open_len), bool)
        mask = change(np.concatenate([prefix, seen.block], axis=1), seen.open_len)
        return replace(seen, open_len=0, block=mask)

    def full_mask(original: Any, seen: Any) -> Any:
        return original(changed(seen))

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        return original(cache, layer, q_latent, q_pe, changed(seen), *rest)

    wrap(engine, full_mask=full_mask, verify_attn=verify_attn)
