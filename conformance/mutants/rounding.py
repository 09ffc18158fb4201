"""NUM: rounding, near ties, determinism."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_load, wrap
from kdtr.conformance.mutants.split_merges import with_splits

ROUNDING = MutantClass("rounding and determinism")


@ROUNDING.mutant("M153", "NUM-1", breaks="LOSSLESS", first_seen_at="logits", needs="core")
def logits_of_several_rows_in_bfloat16(engine: Any) -> None:
    """The logits of a forward of several rows are rounded to bfloat16."""
    head: list[Any] = []

    def linear(original: Any, x: Any, weight: Any) -> Any:
        out = original(x, weight)
        if weight is not head[0] or len(x) == 1:
            return out
        return out.astype(ml_dtypes.bfloat16).astype(np.float32)

    wrap(engine, linear=linear)

    def change(weights: Any) -> Any:
        head[:] = [weights.lm_head]
        return weights

    on_load(engine, change)


@ROUNDING.mutant("M155", "NUM-3", breaks="NUM-4", first_seen_at="second verify", needs="split")
def merge_in_no_order(engine: Any) -> None:
    """Splits are merged in the order in which they happen to end."""
    order = np.random.default_rng(1)

    def change(partials: list[Any]) -> list[Any]:
        return [partials[i] for i in order.permutation(len(partials))]

    with_splits(engine, change)


ROUNDING.waits(
    "M157", "NUM-5", "batch", "a second replica has noise of 1e-6, and decides by itself"
)
