"""Every mutant, by its number and by its name, and an engine with one of them."""

from __future__ import annotations

from typing import Any

from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.mutants.accept_walk import ACCEPT_WALK
from kdtr.conformance.mutants.captured import CAPTURED
from kdtr.conformance.mutants.compaction import COMPACTION
from kdtr.conformance.mutants.edges import EDGES
from kdtr.conformance.mutants.files import FILES
from kdtr.conformance.mutants.limits import LIMITS
from kdtr.conformance.mutants.masks import MASKS
from kdtr.conformance.mutants.mla_latents import MLA_LATENTS
from kdtr.conformance.mutants.mla_rotary import MLA_ROTARY
from kdtr.conformance.mutants.mla_scale import MLA_SCALE
from kdtr.conformance.mutants.moe_gate import MOE_GATE
from kdtr.conformance.mutants.moe_sum import MOE_SUM
from kdtr.conformance.mutants.mutant import Mutant, MutantClass, Waiting
from kdtr.conformance.mutants.positions import POSITIONS
from kdtr.conformance.mutants.prefix_reuse import PREFIX_REUSE
from kdtr.conformance.mutants.quantised import QUANTISED
from kdtr.conformance.mutants.rounding import ROUNDING
from kdtr.conformance.mutants.slots import SLOTS
from kdtr.conformance.mutants.split_merges import SPLIT_MERGES
from kdtr.conformance.mutants.tree_arrays import TREE_ARRAYS
from kdtr.conformance.mutants.widths import WIDTHS
from kdtr.contract import EngineError

CLASSES: dict[str, MutantClass] = {
    "POS": POSITIONS,
    "MASK": MASKS,
    "TREE": TREE_ARRAYS,
    "ACC": ACCEPT_WALK,
    "CMP": COMPACTION,
    "SLOT": SLOTS,
    "LIM": LIMITS,
    "EDGE": EDGES,
    "MLAS": MLA_SCALE,
    "MLAR": MLA_ROTARY,
    "MLAW": MLA_LATENTS,
    "LSE": SPLIT_MERGES,
    "MOEG": MOE_GATE,
    "MOEA": MOE_SUM,
    "QNT": QUANTISED,
    "FILE": FILES,
    "GRAPH": CAPTURED,
    "OVF": WIDTHS,
    "NUM": ROUNDING,
    "PFX": PREFIX_REUSE,
}
MUTANTS: dict[str, Mutant] = {
    mutant.number: mutant for one in CLASSES.values() for mutant in one.mutants
}
WAITING: dict[str, Waiting] = {
    waiting.number: waiting for one in CLASSES.values() for waiting in one.waiting
}
BY_NAME: dict[str, Mutant] = {mutant.name: mutant for mutant in MUTANTS.values()}


def make_engine(
    mutant: str, engine: str = "host", page_size: int = 3, split_size: int = 5, **options: Any
) -> Any:
    """The engine of this name with one mutant, by number or name.

    Pages of 3 and splits of 5: every prompt and tree crosses their edges.
    """
    found = MUTANTS.get(mutant) or BY_NAME.get(mutant)
    if found is None:
        raise EngineError(f"no mutant {mutant}; expected one of {', '.join(MUTANTS)}, or its name")
    loaded = load_engine(engine, {"page_size": page_size, "split_size": split_size, **options})
    if not hasattr(loaded, "kernels"):
        raise EngineError(
            f"engine {engine} has no kernels to wrap; expected one of this project's, such as host"
        )
    found.plant(loaded)
    return loaded
