"""Findings of one fault, over many cases and modes, as one: the simplest first.

A fault is known by what a finding looks like: a hint that fits every element, whatever the numbers
in it. Without one, by the stage at which it is seen first and the rule that this breaks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kdtr.conformance.diagnosis import MOST
from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.state_script import SCRIPT

# Not those of a name, as bfloat16.
_NUMBERS = re.compile(r"(?<![A-Za-z_\d])-?\d[\d.]*(?:e[-+]?\d+)?(?:(?:, |-| and )\d+)*")


@dataclass(slots=True)
class Group:
    """`findings` of one fault, the first one that of the simplest case."""

    findings: list[Finding]
    _fault: frozenset[str] = field(default_factory=frozenset)  # what all that tell enough look like

    @property
    def first(self) -> Finding:
        return self.findings[0]

    def also_in(self) -> list[str]:
        """The other cases, in the order of their findings; with their bundle, if there are more."""
        several = len({finding.place.bundle for finding in self.findings}) > 1
        names = [_case_name(finding, with_bundle=several) for finding in self.findings]
        return [name for name in dict.fromkeys(names) if name != names[0]]

    def modes(self) -> list[str]:
        """Every mode that shows it, in the order in which they run."""
        seen = {finding.place.mode for finding in self.findings}
        return [mode for mode in MODE if mode in seen]

    def against(self, hint: Hint) -> list[Finding]:
        """Findings of the first one's stage that the hint does not fit: it is not that alone."""
        said = without_numbers(hint.says)
        return [
            finding
            for finding in self.findings
            if finding.stage == self.first.stage
            and (fault := _looks_like(finding))
            and len(fault) < MOST  # else it may have been left out
            and said not in fault
        ]

    def takes(self, finding: Finding) -> bool:
        """Whether the finding is of this fault; if so it is kept."""
        if not self._is_same(finding):
            return False
        shared = self._fault & _looks_like(finding)
        self._fault = shared or self._fault
        self.findings.append(finding)
        return True

    def _is_same(self, finding: Finding) -> bool:
        first = self.first
        if first.verdict is not finding.verdict:
            return False
        if any(_is_traced_twin(one, finding) for one in self.findings):
            return True
        fault = _looks_like(finding)
        if self._fault or fault:
            return bool(self._fault & fault)
        same_stage = first.stage == finding.stage
        by_words = finding.verdict is Verdict.ERROR or finding.place.mode not in MODE
        if by_words or first.place.mode not in MODE:
            return same_stage and _words(first) == _words(finding)
        return same_stage and first.rules[:1] == finding.rules[:1]


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Every finding in one group; groups and what is in them in the order of `in_order`."""
    groups: list[Group] = []
    for finding in in_order(findings):
        if not any(group.takes(finding) for group in groups):
            groups.append(Group([finding], _looks_like(finding)))
    return groups


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """What failed before near ties, and the earliest point of the simplest case first.

    Numbers come before the script: a session with wrong numbers may fail both.
    """

    def place(one: Finding) -> tuple[bool, bool, int]:
        return not one.verdict.is_bad, one.place.mode == SCRIPT, one.n_rows

    return sorted(findings, key=place)


def without_numbers(text: str) -> str:
    """The text with # for numbers, and for lists of them: they are the case's, not the fault's.

    >>> without_numbers("L = 13: rows 1, 2 and 5 of 7 are times 0.77")
    'L = #: rows # of # are times #'
    """
    return _NUMBERS.sub("#", text)


def certain(hints: Sequence[Hint]) -> list[Hint]:
    """Those that fit every element."""
    return [hint for hint in hints if hint.fit >= 1]


def _looks_like(finding: Finding) -> frozenset[str]:
    return frozenset(without_numbers(hint.says) for hint in certain(finding.looks_like))


def _is_traced_twin(traced: Finding, finding: Finding) -> bool:
    """`shipped` is `round` without a trace: what was wrong there is so here, and is seen later."""
    one, other = traced.place, finding.place
    same_case = (one.bundle, one.case) == (other.bundle, other.case)
    return same_case and (one.mode, other.mode) == ("round", "shipped")


def _words(finding: Finding) -> tuple[str, tuple[str, ...]]:
    return without_numbers(finding.summary), finding.rules


def _case_name(finding: Finding, *, with_bundle: bool) -> str:
    place = finding.place
    return f"{Path(place.bundle).stem}/{place.case}" if with_bundle else place.case
