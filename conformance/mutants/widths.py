"""OVF: the width of integers, and of words of bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import wrap

WIDTHS = MutantClass("integer widths")

# Python's integers do not overflow.
WIDTHS.in_cuda("M148", "OVF-1", "row_offset_of_32_bits", "a row's offset in the cache has 32 bits")
WIDTHS.in_cuda("M150", "OVF-3", "row_stride_of_32_bits", "a query's offset has 32 bits")


@WIDTHS.mutant("M152", "OVF-5", breaks="MASK-2", first_seen_at="mask", needs="packed")
def ancestors_in_one_word(engine: Any) -> None:
    """A row of the tree's mask is one word of 64 bits: column j is bit j modulo 64."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        bits = np.zeros((len(ancestors), 64), bool)
        for row, column in zip(*np.nonzero(ancestors), strict=True):
            bits[row, column % 64] = True
        return positions, bits[:, np.arange(len(ancestors)) % 64]

    wrap(engine, tree_layout=tree_layout)
