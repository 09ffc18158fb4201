"""What the judge says: a verdict per case and mode, and a finding for the first divergence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.excerpt import Excerpt
from kdtr.conformance.plain_text import entry
from kdtr.contract import rule


class Verdict(Enum):
    """In the order in which they weigh."""

    PASS = "pass"
    NEAR_TIE = "near tie"  # a decision thinner than the bounds: not a failure, with its gap
    BLOCKED = "blocked"  # it takes for granted what an earlier check found wrong
    # The engine lacks the verb, or refuses the model: not passed, not failed.
    UNSUPPORTED = "unsupported"
    EXCUSED = "excused"  # it failed or raised as an expectations file says (expectations.py)
    FAIL = "fail"
    ERROR = "error"  # the engine raised, or answered with something that is not an answer

    @property
    def is_bad(self) -> bool:
        return self in (Verdict.FAIL, Verdict.ERROR)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run: bundle, case, mode, and point (`chunk0`, `round2`)."""

    bundle: str
    case: str
    mode: str
    point: str

    def text(self, bundle: str = "") -> str:
        """As in "base: trees / stepwise / round0"; `bundle` is its name, "" where that is known.

        What is called as what it is in, is named once: "all / load".
        """
        names = (self.case, self.mode, self.point)
        seen = " / ".join(name for before, name in pairwise(("", *names)) if name != before)
        return f"{f'{bundle}: ' if bundle else ''}{seen}"


@dataclass(frozen=True, slots=True)
class Excuse:
    """Why a finding is taken as it is: an entry of an expectations file, by its id."""

    entry: str
    reason: str
    link: str = ""

    def __str__(self) -> str:
        more = ", ".join(filter(None, (self.entry, self.link)))
        return f"{self.reason} ({more})"


@dataclass(frozen=True, slots=True)
class Finding:
    """One divergence, with everything a person needs to look it up.

    where      coordinates by name, for example "layer 2, row 3 (path 0-2-3), head 1"
    summary    what differs
    expected   and actual: the values there, as text
    rules      ids that a difference first seen here breaks
    looks_like why it may look so, the best explanation first
    next_step  what to show next, where the engine shows too little to tell the cause
    reproduce  the command that shows this finding alone
    n_rows     rows fed to the engine up to there: findings are told in this order
    blame      whose fault it must be, where a smoke case says so (smoke.py)
    excuse     of an excused finding, or of a near tie that is expected; else None
    drawing    the round as a picture, where it was driven
    excerpt    the numbers around the element that is named
    Drawing and excerpt are no part of what makes findings equal.
    """

    verdict: Verdict
    place: Place
    stage: str
    summary: str
    where: str = ""
    expected: str = ""
    actual: str = ""
    rules: tuple[str, ...] = ()
    looks_like: tuple[Hint, ...] = ()
    next_step: str = ""
    reproduce: str = ""
    n_rows: int = 0
    blame: str = ""
    excuse: Excuse | None = None
    drawing: Drawing | None = field(default=None, compare=False, repr=False)
    excerpt: Excerpt | None = field(default=None, compare=False, repr=False)

    def headline(self, bundle: str = "") -> str:
        """The place with the stage, which a check of a script does not have beside its name."""
        stage = "" if self.stage == self.place.point else f": {self.stage}"
        return self.place.text(bundle) + stage

    def lines(self, width: int = 80, told: Iterable[str] = ()) -> list[str]:
        """The finding as text, without colour; of the rules in `told`, the ids alone."""
        text = self.what_lines(width) + self.rule_lines(width, told)
        for hint in self.looks_like:
            text += entry("looks like", str(hint), width)
        return text + self.then_lines(width)

    def what_lines(self, width: int, bundle: str = "") -> list[str]:
        """What differs, where, and the picture of it; `bundle` is its name, where that tells."""
        text = [f"{self.verdict.value.upper()}  {self.headline(bundle)}: {self.summary}"]
        if self.excuse is not None:
            text += entry("excuse", str(self.excuse), width)
        if self.blame:
            text += entry("blame", self.blame, width)
        if self.where:
            text.append(f"  at        {self.where}")
        if self.expected:
            text.append(f"  expected  {self.expected}")
        if self.actual:
            text.append(f"  actual    {self.actual}")
        return text + (self.drawing.lines(width) if self.drawing is not None else [])

    def rule_lines(self, width: int, told: Iterable[str]) -> list[str]:
        """The sentences of the rules; of those in `told`, the ids alone."""
        text: list[str] = []
        above = set(told)
        for rule_id in self.rules:
            if rule_id not in above:
                text += entry(rule_id, rule(rule_id), width)
        again = [rule_id for rule_id in self.rules if rule_id in above]
        if again:
            text += entry("breaks" if again == [*self.rules] else "also", ", ".join(again), width)
        return text

    def then_lines(self, width: int) -> list[str]:
        """What to do next, and how to see it again."""
        text = entry("next", self.next_step, width) if self.next_step else []
        if self.reproduce:
            text.append(f"  again     {self.reproduce}")  # one line, to be copied
        return text


@dataclass(frozen=True, slots=True)
class Compared:
    """One comparison, of all rows of a stage at a point: what reports and tables are made of.

    rows      how many
    headroom  the largest error as a fraction of its bound; None: compared exactly
    same      False: a difference was found, which may be a near tie
    """

    point: str
    stage: str
    layer: int | None
    rows: int
    headroom: float | None
    same: bool


@dataclass(slots=True)
class CaseResult:
    """One case in one mode: the verdict, and how much was compared.

    headroom   the largest error seen, as a fraction of its bound; None: nothing numeric compared
    unshown    stages that the engine does not show: unsupported, never passed
    blocked    points not reached, because of the first finding
    blocked_by what found the fault that blocks the whole case: "ar / stepwise"
    branched   of such a case: whether it has branches, which the one that blocks it has not
    not_checked  differences that thin choices of experts may explain, and too many to try
    excused_rows  rows that such a difference leaves unjudged
    expected   ids of the entries of an expectations file that hold here
    counted    whether a near tie, or what is not supported, counts against the file's ceilings
    refused    why the engine does not load the model, in its words: unsupported, never passed
    compared   every comparison with a recorded case, in order
    """

    bundle: str
    case: str
    mode: str
    verdict: Verdict = Verdict.PASS
    points: int = 0
    comparisons: int = 0
    rows: int = 0
    headroom: float | None = None
    blocked: int = 0
    blocked_by: str = ""
    branched: bool = False
    not_checked: int = 0
    excused_rows: int = 0
    expected: set[str] = field(default_factory=set)
    counted: bool = True
    refused: str = ""
    unshown: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)

    def saw(self, ratio: float) -> None:
        self.headroom = ratio if self.headroom is None else max(self.headroom, ratio)
