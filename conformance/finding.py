"""What the judge says: a verdict per case and mode, and a finding for the first divergence."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kdtr.contract import rule


class Verdict(Enum):
    """In the order in which they weigh."""

    PASS = "pass"
    NEAR_TIE = "near tie"  # a decision thinner than the bounds: not a failure, with its gap
    UNSUPPORTED = "unsupported"  # the engine lacks the verb: not passed, not failed
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


@dataclass(frozen=True, slots=True)
class Finding:
    """One divergence, with everything a person needs to look it up.

    where     coordinates by name, for example "layer 2, row 3 (path 0-2-3), head 1"
    summary   what differs
    expected  and actual: the values there, as text
    rules     ids that a difference first seen here breaks
    """

    verdict: Verdict
    place: Place
    stage: str
    summary: str
    where: str = ""
    expected: str = ""
    actual: str = ""
    rules: tuple[str, ...] = ()
    reproduce: str = ""

    def lines(self) -> list[str]:
        """The finding as text, without colour."""
        place = self.place
        head = f"{self.verdict.value.upper()}  {place.case} / {place.mode} / {place.point}"
        text = [f"{head}: {self.stage}: {self.summary}"]
        if self.where:
            text.append(f"  at        {self.where}")
        if self.expected:
            text.append(f"  expected  {self.expected}")
        if self.actual:
            text.append(f"  actual    {self.actual}")
        text.extend(f"  {rule_id:<9} {rule(rule_id)}" for rule_id in self.rules)
        if self.reproduce:
            text.append(f"  again     {self.reproduce}")
        return text


@dataclass(slots=True)
class CaseResult:
    """One case in one mode: the verdict, and how much was compared.

    headroom   the largest error seen, as a fraction of its bound; None: nothing numeric compared
    unshown    stages that the engine does not show: unsupported, never passed
    blocked    points not reached, because of the first finding
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
    unshown: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)

    def saw(self, ratio: float) -> None:
        self.headroom = ratio if self.headroom is None else max(self.headroom, ratio)
