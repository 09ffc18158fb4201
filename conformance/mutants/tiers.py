"""Which part of the suite kills a mutant: smoke, tiny, the corpus, how much of the quick corpus.

The x-ray set is no tier here: it takes a quarter of a minute for a mutant and more. What it says of
those that logits alone do not name is in the trials.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kdtr.conformance.mutants.families.docket import Docket, Entry

TINY = "tiny"  # the name of its bundle


@dataclass(frozen=True, slots=True)
class Tiers:
    """What kills one mutant; "" where a tier lets it live.

    smoke   the first case without a branch, of any bundle
    tiny    the first case of the tiny bundle, in the gate's order
    corpus  the same of the corpus
    quick   every case of the quick corpus that does
    of      how many that has
    """

    smoke: str
    tiny: str
    corpus: str
    quick: tuple[str, ...]
    of: int


def tiers(docket: Docket, quick: Iterable[Entry], engine: Any) -> Tiers:
    """Each tier up to its first kill, the quick corpus whole."""
    models: dict[str, Any] = {}
    killed: dict[Entry, bool] = {}

    def kills(entry: Entry) -> bool:
        if entry not in killed:
            killed[entry] = docket.first_finding(engine, models, entry) is not None
        return killed[entry]

    def first(entries: Iterable[Entry]) -> str:
        return next((str(one) for one in entries if kills(one)), "")

    in_order, quick = docket.in_gate_order, tuple(quick)
    killing = tuple(str(one) for one in quick if kills(one))
    return Tiers(
        smoke=first(one for one in in_order if docket.is_smoke(one)),
        tiny=first(one for one in in_order if one.bundle == TINY),
        corpus=first(one for one in in_order if one.bundle != TINY),
        quick=killing,
        of=len(quick),
    )
