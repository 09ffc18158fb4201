"""Which part of the suite kills a mutant: smoke, tiny, the corpus, how much of the quick corpus.

The x-ray set is no tier here: it takes a quarter of a minute for a mutant and more. What it says of
those that logits alone do not name is in the trials.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun

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


def tiers(docket: Docket, quick: Iterable[Entry], run: EngineRun) -> Tiers:
    """Each tier up to its first kill, the quick corpus whole."""

    def first(entries: Iterable[Entry]) -> str:
        return next((str(one) for one in entries if run.finding(one) is not None), "")

    in_order, quick = docket.in_gate_order, tuple(quick)
    killing = tuple(str(one) for one in quick if run.finding(one) is not None)
    return Tiers(
        smoke=first(one for one in in_order if docket.is_smoke(one)),
        tiny=first(one for one in in_order if one.bundle == TINY),
        corpus=first(one for one in in_order if one.bundle != TINY),
        quick=killing,
        of=len(quick),
    )
