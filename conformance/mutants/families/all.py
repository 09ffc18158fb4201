"""Every family, in the order of the list's classes."""

from __future__ import annotations

from kdtr.conformance.mutants.families.accept_walk import accept_walk, argmax
from kdtr.conformance.mutants.families.attention import (
    heads,
    rotary,
    softmax_scale,
    split_merges,
)
from kdtr.conformance.mutants.families.compaction import compaction
from kdtr.conformance.mutants.families.family import Family, Variant
from kdtr.conformance.mutants.families.limits import limits, sessions
from kdtr.conformance.mutants.families.masks import masks
from kdtr.conformance.mutants.families.model import (
    moe_gate,
    moe_sum,
    norms,
    precision,
    residuals,
    weights,
)
from kdtr.conformance.mutants.families.positions import positions
from kdtr.conformance.mutants.families.slots import slots
from kdtr.conformance.mutants.families.state import captured, determinism
from kdtr.conformance.mutants.families.tree_arrays import tree_arrays

FAMILIES: tuple[Family, ...] = (
    positions(),
    masks(),
    tree_arrays(),
    accept_walk(),
    argmax(),
    compaction(),
    slots(),
    limits(),
    sessions(),
    softmax_scale(),
    rotary(),
    heads(),
    norms(),
    weights(),
    residuals(),
    split_merges(),
    moe_gate(),
    moe_sum(),
    precision(),
    captured(),
    determinism(),
)
VARIANTS: dict[str, Variant] = {one.name: one for family in FAMILIES for one in family.variants}
