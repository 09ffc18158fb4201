"""Every variant before the judge, over processes: up to the first finding, small cases first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.finding import Finding
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.families.family import Variant
from kdtr.conformance.mutants.families.occasion import Occasion, Watch
from kdtr.conformance.mutants.trial import LogitsOnly

OPTIONS = {"page_size": 3, "split_size": 5}  # every prompt and tree crosses their edges


@dataclass(frozen=True, slots=True)
class Catch:
    """What became of one variant.

    judged      entries, up to the one that killed it
    by          that one; None where the variant lives
    at          mode and point of the first finding
    stage       of the first finding
    actual      what the engine showed there, and where
    rules       that it cites, and its best explanation
    says        the finding in a line
    named       whether one of the rules is the variant's own
    equivalent  of one that lives: in every entry it shows, bit for bit, what an honest engine does
    """

    variant: str
    judged: int
    by: Entry | None = None
    at: str = ""
    stage: str = ""
    actual: str = ""
    rules: tuple[str, ...] = ()
    says: str = ""
    named: bool = False
    equivalent: bool = False


class Hunter:
    """Judges variants of the host engine against a docket, in a fixed order of its entries.

    occasions  of an honest engine: a fault that is never at work in an entry is not judged there
    """

    def __init__(
        self,
        docket: Docket,
        order: Sequence[Entry],
        occasions: dict[Entry, frozenset[Occasion]],
        *,
        logits_only: bool = False,
    ) -> None:
        self._docket = docket
        self._order = order
        self._occasions = occasions
        self._logits_only = logits_only
        self._honest: dict[Entry, tuple[str, ...]] = {}

    def hunt(self, variant: Variant) -> Catch:
        engine = make_variant(variant)
        shown: Any = LogitsOnly(engine) if self._logits_only else engine
        entries = [one for one in self._order if self._is_at_work(variant, one)]
        run = EngineRun(self._docket, shown)
        differs = False
        for judged, entry in enumerate(entries, start=1):
            # The first case kills most. What is like an honest engine's need not be judged.
            if judged > 1 and not entry.is_script and not self._differs(variant, entry):
                continue
            finding = run.finding(entry)
            if finding is not None:
                return _catch(variant, judged, entry, finding)
            differs = differs or (not entry.is_script and self._differs(variant, entry))
        return Catch(variant.name, len(entries), equivalent=not differs)

    def killer(self, variant: Variant, entries: Sequence[Entry]) -> Entry | None:
        """The first of these entries that kills it."""
        run = EngineRun(self._docket, make_variant(variant))
        for entry in entries:
            if self._is_at_work(variant, entry) and run.finding(entry) is not None:
                return entry
        return None

    def _is_at_work(self, variant: Variant, entry: Entry) -> bool:
        return any(variant.when.holds(now) for now in self._occasions[entry])

    def _differs(self, variant: Variant, entry: Entry) -> bool:
        """Whether the case shows anything that is not an honest engine's, bit for bit."""
        if entry not in self._honest:
            honest = EngineRun(self._docket, honest_engine())
            self._honest[entry] = tuple(honest.behaviour(entry))
        shown = EngineRun(self._docket, make_variant(variant)).behaviour(entry)
        pairs = zip_longest(self._honest[entry], shown)
        return any(expected != found for expected, found in pairs)  # up to the first


def occasions(
    docket: Docket, load: Callable[[], Any], entries: Iterable[Entry]
) -> dict[Entry, frozenset[Occasion]]:
    """What is under way in each entry, in any mode, of an engine that makes no fault."""
    found: dict[Entry, frozenset[Occasion]] = {}
    for entry in entries:
        engine, seen = load(), set[Occasion]()
        Watch(engine, seen.add)
        run = EngineRun(docket, engine)
        if entry.is_script:
            run.finding(entry)
        else:
            deque(run.behaviour(entry), maxlen=0)
        found[entry] = frozenset(seen)
    return found


def honest_engine() -> Any:
    return load_engine("host", OPTIONS)


def make_variant(variant: Variant) -> Any:
    """The host engine with this one fault."""
    engine = honest_engine()
    variant.plant(engine)
    return engine


def _catch(variant: Variant, judged: int, entry: Entry, finding: Finding) -> Catch:
    hint = finding.looks_like[0] if finding.looks_like else None
    rules = tuple(dict.fromkeys((*finding.rules, *(hint.rules if hint else ()))))
    says = f"{finding.stage}: {finding.summary}" + (f"; looks like {hint}" if hint else "")
    named = bool({*variant.rules} & {*rules})
    return Catch(
        variant.name,
        judged,
        entry,
        f"{finding.place.mode} / {finding.place.point}",
        finding.stage,
        f"{finding.where}: {finding.actual}",
        rules,
        says,
        named,
    )
