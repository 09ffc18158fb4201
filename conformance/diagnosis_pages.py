"""Rows of a forward that run past the end of a page: where they go, if not to the table's next.

A page table that was not extended holds the same entry, often 0, for every page behind the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kdtr.conformance.diagnosis_forward import Array, append
from kdtr.conformance.diagnosis_past import Past
from kdtr.conformance.diagnosis_twist import Twist, twisted

# Slots per page: every small one, and those that engines have.
_SIZES = (2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)

_Append = Callable[[Array, Array, int], Array]


def page_twists(past: Past) -> Iterator[Twist]:
    """SLOT-1: every page behind that of the root is one page, or page 0."""
    length, n = past.scene.committed_len, past.scene.n
    for size in _SIZES:
        edge = _edge(length, size)
        if edge >= length + n:
            continue
        first = f"page {edge // size} (slot {edge})"
        ways = {f"page 0 of {size} slots, over the rows that are there": True}
        if edge + size < length + n:  # else no two rows share a slot
            ways[f"one page of {size} slots: {edge} and {edge + size} are one slot"] = False
        for where, in_page_0 in ways.items():
            write = _sharing(size, in_page_0=in_page_0)
            this = f"rows of this forward from {first} on lie in {where}"
            yield _written(past, this, _only_at(length, write))
            if past.scene.history:
                each = f"rows of each forward behind its first page lie in {where}"
                yield _written(past, each, write)


def _written(past: Past, says: str, write: _Append) -> Twist:
    return twisted(past, says, "SLOT-1", "scores", replace(past.right, append=write), 3)


def _edge(length: int, size: int) -> int:
    """The first slot of the page behind that of slot `length`."""
    return (length // size + 1) * size


def _sharing(size: int, *, in_page_0: bool) -> _Append:
    """All pages from the forward's edge on are that at the edge, or page 0."""

    def write(old: Array, new: Array, length: int) -> Array:
        slot, edge = np.arange(len(old)), _edge(length, size)
        begins = 0 if in_page_0 else edge
        place = np.where(slot < edge, slot, begins + slot % size)
        memory = old.copy()
        memory[place[:length]] = old[:length]
        for row, one in enumerate(new):
            memory[place[length + row]] = one
        return memory[place]

    return write


def _only_at(length: int, write: _Append) -> _Append:
    """The forwards before went right."""
    return lambda old, new, at: (write if at == length else append)(old, new, at)
