"""PFX: reuse of a prefix, and its publication."""

from __future__ import annotations

from kdtr.conformance.mutants.mutant import MutantClass

PREFIX_REUSE = MutantClass("prefix reuse")

PREFIX_REUSE.waits("M158", "PFX-1", "prefix reuse", "the rows of a hit are not in the mask")
PREFIX_REUSE.waits("M160", "PFX-3", "prefix reuse", "all layers but the last are restored")
PREFIX_REUSE.waits("M162", "PFX-5", "prefix reuse", "proposed rows are published with the rest")
