"""QNT: codes and scales of int4 and fp8."""

from __future__ import annotations

from kdtr.conformance.mutants.mutant import MutantClass

QUANTISED = MutantClass("quantisation")

QUANTISED.waits("M118", "QNT-1", "int4 weights", "groups are of 128 columns, whatever their size")
QUANTISED.waits("M120", "QNT-3", "int4 weights", "low nibbles are the first half of a block")
QUANTISED.waits("M122", "QNT-5", "int4 weights", "codes from 8 on are negative")
QUANTISED.waits("M124", "QNT-7", "int4 weights", "an expert's scales begin where groups of 128 do")
QUANTISED.waits("M126", "QNT-9", "fp8 weights", "the grid of scales is read in transposed shape")
QUANTISED.waits("M128", "QNT-11", "an fp8 cache", "the value product omits the scale")
QUANTISED.waits("M129", "QNT-12", "fp8 activations", "rows of padding are in the largest magnitude")
QUANTISED.waits("M131", "QNT-14", "fp8 weights", "a missing scale is 1")
QUANTISED.waits("M132", "QNT-15", "int4 weights", "the scale of group 0 holds for the whole row")
