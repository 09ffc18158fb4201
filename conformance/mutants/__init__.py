"""Engines with one real fault each: what a conformance suite must kill, and name."""

from kdtr.conformance.mutants.mutant import Mutant, Plant, Waiting
from kdtr.conformance.mutants.zoo import BY_NAME, CLASSES, MUTANTS, WAITING, make_engine

__all__ = [
    "BY_NAME",
    "CLASSES",
    "MUTANTS",
    "WAITING",
    "Mutant",
    "Plant",
    "Waiting",
    "make_engine",
]
