"""Variants over processes, and the choice of the quick corpus from what they are killed by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.families.all import VARIANTS
from kdtr.conformance.mutants.families.family import Variant
from kdtr.conformance.mutants.families.hunt import Catch, Hunter, honest_engine, occasions
from kdtr.conformance.mutants.families.occasion import ALWAYS, Occasion
from kdtr.conformance.mutants.processes import in_any_order, processes
from kdtr.conformance.mutants.zoo import MUTANTS
from kdtr.conformance.quick_corpus import QuickCase, QuickCorpus
from kdtr.contract import CaseError

Progress = Callable[[str], None]
Occasions = dict[Entry, frozenset[Occasion]]
FIRST = Entry("base", "trees")  # every stage, every kind of round: it kills three in four

# The list's, as variants that are always at work: "list: M042".
LISTED: dict[str, Variant] = {
    f"list: {number}": Variant("list", number, one.rules, ALWAYS, one.plant)
    for number, one in MUTANTS.items()
}
SUBJECTS: dict[str, Variant] = {**LISTED, **VARIANTS}


def hunt_all(
    names: Iterable[str],
    bundles: Sequence[str],
    *,
    first: Sequence[Entry] = (FIRST,),
    only_first: bool = False,
    logits_only: bool = False,
    workers: int = 2,
    progress: Progress = lambda _: None,
) -> dict[str, Catch]:
    """What became of each, by name: the `first` entries first, then all others, small ones first.

    only_first  those alone
    """
    names = [*names]
    with Docket(bundles) as docket:
        missing = [str(one) for one in first if one not in docket.entries]
        if missing:
            raise CaseError(
                f"{', '.join(missing)} is not asked of these bundles in this order; give the whole "
                "corpus, in the order of its names"
            )
        at_work = occasions(docket, honest_engine, first if only_first else docket.entries)
        others = () if only_first else docket.entries
        order = (*first, *(one for one in others if one not in first))
    caught: dict[str, Catch] = {}
    with processes(workers, _begin, tuple(bundles), order, at_work, logits_only) as pool:
        for name, catch in in_any_order(pool, _hunt, ((one, (one,)) for one in names)):
            caught[name] = catch
            progress(f"{len(caught)} of {len(names)} variants")
    return {name: caught[name] for name in names}


def choose_quick(
    caught: dict[str, Catch],
    bundles: Sequence[str],
    sums: dict[str, str],
    *,
    workers: int = 2,
    progress: Progress = lambda _: None,
) -> QuickCorpus:
    """The killers, less every one that the others make up for, those of fewest kills first.

    What is left cannot do without any of its cases: each has a subject that it alone kills. FIRST
    is there in any case: it records every stage, so that a finding is where the fault begins.
    """
    with Docket(bundles) as docket:
        order = docket.entries
        at_work = occasions(docket, honest_engine, order)
        ids = {entry: docket.case(entry).inputs.case_id for entry in order}
        files = {name: bundle.path.name for name, bundle in docket.bundles.items()}
    by: dict[str, Entry] = {name: one.by for name, one in caught.items() if one.by is not None}
    kept = [one for one in order if one == FIRST or one in set(by.values())]
    alone: dict[Entry, list[str]] = {}
    with processes(workers, _begin, tuple(bundles), order, at_work, False) as pool:
        some = [one for one in kept if one != FIRST]
        for entry in sorted(some, key=lambda one: [*by.values()].count(one)):
            others = tuple(one for one in kept if one != entry)
            mine = [name for name, killer in by.items() if killer == entry]
            # What is seldom at work is killed by few: with those it is soon known.
            mine.sort(key=lambda name: _at_work(SUBJECTS[name], at_work))
            moved: dict[str, Entry] = {}
            for first in range(0, len(mine), _AT_ONCE * workers):
                tasks = [(n, (n, others)) for n in mine[first : first + _AT_ONCE * workers]]
                found = dict(in_any_order(pool, _killer, tasks))
                moved.update({name: one for name, one in found.items() if one is not None})
                lonely = sorted(name for name, one in found.items() if one is None)
                if lonely:
                    alone[entry] = lonely
                    break
            else:
                kept.remove(entry)
                by.update(moved)
            progress(f"{entry}: {'kept' if entry in alone else 'not needed'}")
    cases = tuple(
        QuickCase(files[one.bundle], one.case, ids[one], tuple(alone.get(one, ()))) for one in kept
    )
    used = {one.bundle for one in cases}
    lives = {name: one.equivalent for name, one in caught.items() if one.by is None}
    return QuickCorpus(cases, {k: v for k, v in sums.items() if k in used}, len(order), lives)


_AT_ONCE = 4  # subjects per worker that are asked before the answer is looked at


def _at_work(variant: Variant, occasions: Occasions) -> int:
    """In how many entries."""
    return sum(any(map(variant.when.holds, seen)) for seen in occasions.values())


_HUNTER: list[Hunter] = []  # of a worker


def _begin(
    bundles: tuple[str, ...], order: tuple[Entry, ...], occasions: Occasions, logits_only: bool
) -> None:
    _HUNTER[:] = [Hunter(Docket(bundles), order, occasions, logits_only=logits_only)]


def _hunt(name: str) -> Catch:
    return _HUNTER[0].hunt(SUBJECTS[name])


def _killer(name: str, entries: tuple[Entry, ...]) -> Entry | None:
    return _HUNTER[0].killer(SUBJECTS[name], entries)
