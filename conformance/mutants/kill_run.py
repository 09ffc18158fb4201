"""Every mutant before the judge, over processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kdtr.conformance.mutants.families.docket import Docket, Entry
from kdtr.conformance.mutants.mutant import Mutant
from kdtr.conformance.mutants.processes import in_any_order, processes
from kdtr.conformance.mutants.tiers import Tiers, tiers
from kdtr.conformance.mutants.trial import Court, Trial
from kdtr.conformance.mutants.zoo import MUTANTS, make_engine

Progress = Callable[[str], None]
SHOWN, LOGITS_ONLY, TIERS = "all stages", "logits alone", "tiers"


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
    with Court(bundles):
        pass  # a file that is no bundle is refused here, and not in each worker
    kinds = (SHOWN, LOGITS_ONLY) if quick is None else (SHOWN, LOGITS_ONLY, TIERS)
    found: dict[tuple[str, str], Trial | Tiers] = {}
    with processes(workers, _begin, tuple(bundles), tuple(quick or ())) as pool:
        tasks = [((number, kind), (number, engine, kind)) for number in numbers for kind in kinds]
        for key, result in in_any_order(pool, _try, tasks):
            found[key] = result
            progress(f"{len(found)} of {len(tasks)} trials")
    return [_row(number, found) for number in numbers]


def _row(number: str, found: dict[tuple[str, str], Trial | Tiers]) -> KillRow:
    shown, logits_only = found[number, SHOWN], found[number, LOGITS_ONLY]
    asked = found.get((number, TIERS))
    assert isinstance(shown, Trial)
    assert isinstance(logits_only, Trial)
    assert asked is None or isinstance(asked, Tiers)
    return KillRow(MUTANTS[number], shown, logits_only, asked)


_COURT: list[Court] = []  # of a worker, for all its trials
_DOCKET: list[Docket] = []
_QUICK: list[Entry] = []


def _begin(bundles: tuple[str, ...], quick: tuple[Entry, ...]) -> None:
    _COURT[:] = [Court(bundles)]
    if quick:
        _DOCKET[:] = [Docket(bundles)]
        _QUICK[:] = quick


def _try(number: str, engine: str, kind: str) -> Trial | Tiers:
    made, mutant = make_engine(number, engine), MUTANTS[number]
    if kind == TIERS:
        return tiers(_DOCKET[0], _QUICK, made)
    court = _COURT[0]
    trial = court.try_shown if kind == SHOWN else court.try_logits_only
    return trial(mutant, made)
