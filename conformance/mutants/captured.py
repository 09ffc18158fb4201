"""GRAPH: captured and padded buffers, and what the call before left in them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.conformance.mutants.masks import with_mask
from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.padded import Padded
from kdtr.conformance.mutants.planting import wrap

CAPTURED = MutantClass("captured buffers")


@CAPTURED.mutant(
    "M141", "GRAPH-1", breaks="PAD-1", also=("SLOT-1",), first_seen_at="scores", needs="graph"
)
def padding_keeps_its_slots(engine: Any) -> None:
    """Rows of padding keep the slots that rows of the tree before had, and are written there."""

    def change(padded: Padded, kept: dict[Any, Any], rows: Any) -> Any:
        slots = rows.slots.copy()
        if padded.n in kept:
            slots[padded.rows :] = kept[padded.n][padded.rows :]
        kept[padded.n] = slots
        return rows._replace(slots=slots)

    Padded(engine, change)


@CAPTURED.mutant("M143", "GRAPH-3", breaks="MASK-2", first_seen_at="mask", needs="graph")
def first_mask_of_a_size(engine: Any) -> None:
    """Every tree of a size gets the mask of the first one."""
    masks: dict[int, Any] = {}

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions, masks.setdefault(len(parents), ancestors)

    wrap(engine, tree_layout=tree_layout)


@CAPTURED.mutant(
    "M145", "GRAPH-5", breaks="PAD-1", also=("SLOT-1",), first_seen_at="scores", needs="graph"
)
def count_of_the_call_before(engine: Any) -> None:
    """Of a tree as many rows count as in the tree before it; behind them all is padding."""

    def change(padded: Padded, kept: dict[Any, Any], rows: Any) -> Any:
        padded.counted = kept.get(padded.n, padded.rows)
        kept[padded.n] = padded.rows
        return rows

    Padded(engine, change)


@CAPTURED.mutant("M147", "GRAPH-7", breaks="MASK-1", first_seen_at="mask", needs="graph")
def length_of_the_round_before(engine: Any) -> None:
    """A tree's prefix is as long as that of the tree before it."""
    lengths: list[int] = []

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        lengths[:] = [*lengths[-1:], committed_len]
        return original(parents, committed_len)

    def causal_layout(original: Any, *rest: Any) -> Any:
        lengths.clear()
        return original(*rest)

    def change(mask: Any, open_len: int) -> Any:
        column = np.arange(mask.shape[1])
        return mask & ((column < lengths[0]) | (column >= open_len))

    wrap(engine, tree_layout=tree_layout, causal_layout=causal_layout)
    with_mask(engine, change)
