"""The truth: absorb-form MLA and MoE in pure NumPy, float64, one written order of arithmetic."""

from kdtr.reference.accept import accept, commit_moves, emitted
from kdtr.reference.build import build_tree
from kdtr.reference.engine import make_engine
from kdtr.reference.tree import depths, path, positions, visibility

__all__ = [
    "accept",
    "build_tree",
    "commit_moves",
    "depths",
    "emitted",
    "make_engine",
    "path",
    "positions",
    "visibility",
]
