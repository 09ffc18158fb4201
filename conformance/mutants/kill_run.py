"""Every mutant before the judge, over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.mutant import Mutant
from kdtr.conformance.mutants.processes import in_any_order, processes
from kdtr.conformance.mutants.tiers import Tiers, tiers
from kdtr.conformance.mutants.trial import Trial, by_logits_alone, shown_whole
from kdtr.conformance.mutants.zoo import MUTANTS, make_engine

Progress = Callable[[str], None]
SHOWN, LOGITS_ONLY = "all stages", "logits alone"


@dataclass(frozen=True, slots=True)
class KillRow:
    """One mutant's trials: with all stages shown, and with logits alone.

    tiers  which part of the suite kills it; None where that was not asked
    """

    mutant: Mutant
    shown: Trial
    logits_only: Trial
    tiers: Tiers | None = None


def run_mutants(
    numbers: Sequence[str],
    bundles: Sequence[str],
    *,
    engine: str = "host",
    workers: int = 2,
    quick: Sequence[Entry] | None = None,
    progress: Progress = lambda _: None,
) -> list[KillRow]:
    """Try these mutants of the engine against the bundles, in the order given.

    quick  the quick corpus: the tiers are asked too
    """
    with Docket(bundles):
        pass  # a file that is no bundle is refused here, and not in each worker
    found: dict[tuple[str, str], tuple[Trial, Tiers | None]] = {}
    with processes(workers, _begin, tuple(bundles), tuple(quick or ())) as pool:
        tasks = [
            ((number, kind), (number, engine, kind))
            for number in numbers
            for kind in (SHOWN, LOGITS_ONLY)
        ]
        for key, result in in_any_order(pool, _try, tasks):
            found[key] = result
            progress(f"{len(found)} of {len(tasks)} trials")
    rows = []
    for number in numbers:
        (shown, asked), (logits_only, _) = found[number, SHOWN], found[number, LOGITS_ONLY]
        rows.append(KillRow(MUTANTS[number], shown, logits_only, asked))
    return rows


_DOCKET: list[Docket] = []  # of a worker, for all its trials
_QUICK: list[Entry] = []


def _begin(bundles: tuple[str, ...], quick: tuple[Entry, ...]) -> None:
    _DOCKET[:] = [Docket(bundles)]
    _QUICK[:] = quick


def _try(number: str, engine: str, kind: str) -> tuple[Trial, Tiers | None]:
    made, mutant, docket = make_engine(number, engine), MUTANTS[number], _DOCKET[0]
    if kind == LOGITS_ONLY:
        return by_logits_alone(docket, mutant, made), None
    run = EngineRun(docket, made)
    found = shown_whole(docket, mutant, run), tiers(docket, _QUICK, run) if _QUICK else None
    run.close()
    return found
