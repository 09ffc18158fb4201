"""Whole kinds of faults: the neighbours of the list's, generated."""

from kdtr.conformance.mutants.families.all import FAMILIES, VARIANTS
from kdtr.conformance.mutants.families.family import Family, Variant

__all__ = ["FAMILIES", "VARIANTS", "Family", "Variant"]
