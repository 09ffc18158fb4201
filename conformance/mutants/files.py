"""FILE: how an engine reads a file of weights."""

from __future__ import annotations

from kdtr.conformance.mutants.mutant import MutantClass

FILES = MutantClass("weight files")
_PART = "a case that hands an engine a file"  # the gate hands it arrays

FILES.waits("M133", "FILE-1", _PART, "tensors are read in the order of the directory")
FILES.waits("M135", "FILE-3", _PART, "what a cut file lacks is read as zeros")
FILES.waits("M137", "FILE-5", _PART, "tensors are aligned to 32 bytes, whatever is declared")
FILES.waits("M138", "FILE-6", _PART, "of two tensors of one name the last is read")
FILES.waits("M140", "FILE-8", _PART, "a missing tensor is zeros")
