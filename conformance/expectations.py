"""What an engine is known to do wrong: entries of a file that lives with the engine.

An entry selects findings by patterns and says why they are taken as they are. What it selects does
not fail the gate and is told as excused, with the reason; an entry that selects nothing any more
does (expectations_outcome.py). The judge never sees the file: verdicts are made first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path

from kdtr.conformance.finding import CaseResult, Excuse, Finding, Verdict
from kdtr.conformance.xray_gate import XRAY

CASE_FIELDS = ("bundle", "case", "mode")
FINDING_FIELDS = ("point", "stage", "rule", "summary")
CEILINGS = {
    "max_near_ties": "near ties",
    "max_not_checked": "near ties that were not checked",
    "max_not_supported": "cases that are not supported",
}
Patterns = tuple[str, ...]  # any of them; * ? and [abc] as in a shell


class Kind(Enum):
    """What an entry expects."""

    FAILS = "fails"  # a wrong answer
    RAISES = "raises"  # an error in place of an answer
    NEAR_TIE = "near tie"  # no failure as it is; not counted against max_near_ties
    NOT_SUPPORTED = "not supported"  # no failure either; not counted against max_not_supported

    @property
    def verdict(self) -> Verdict:
        return _VERDICT[self]


_VERDICT = {
    Kind.FAILS: Verdict.FAIL,
    Kind.RAISES: Verdict.ERROR,
    Kind.NEAR_TIE: Verdict.NEAR_TIE,
    Kind.NOT_SUPPORTED: Verdict.UNSUPPORTED,
}


def bundle_fits(bundle: str, patterns: Patterns) -> bool:
    """By the file's name, with `.kdtr` or without.

    >>> bundle_fits("build/golden/tiny.kdtr", ("tin?",)), bundle_fits("tiny.kdtr", ("base",))
    (True, False)
    """
    path = Path(bundle)
    return any(fnmatchcase(name, one) for one in patterns for name in (path.name, path.stem))


@dataclass(frozen=True, slots=True)
class Entry:
    """One expectation. A field that is not in `select` is not looked at.

    select   patterns by field: CASE_FIELDS, and FINDING_FIELDS where there are findings
    expires  the last day on which it holds, in UTC
    """

    id: str
    kind: Kind
    reason: str
    select: Mapping[str, Patterns]
    link: str = ""
    expires: date | None = None

    def has_expired(self, today: date) -> bool:
        return self.expires is not None and today > self.expires

    def selects(self, result: CaseResult) -> bool:
        """Whether a case in a mode is among those that it speaks of, however they end."""
        patterns = self.select.get("bundle")
        if patterns is not None and not bundle_fits(result.bundle, patterns):
            return False
        return self._fits("case", (result.case,)) and self._fits("mode", (result.mode,))

    def takes(self, finding: Finding) -> bool:
        """Whether it speaks of this finding, of a result that it selects."""
        return (
            finding.verdict is self.kind.verdict
            and self._fits("point", (finding.place.point,))
            and self._fits("stage", (finding.stage,))
            and self._fits("rule", finding.rules)
            and self._fits("summary", (finding.summary,))
        )

    def _fits(self, name: str, texts: Iterable[str]) -> bool:
        patterns = self.select.get(name)
        return patterns is None or any(fnmatchcase(t, one) for t in texts for one in patterns)


@dataclass(frozen=True, slots=True)
class MustPass:
    """Cases that no entry may excuse, each as patterns (bundle, case, mode).

    corpus  SHA-256 of the SHA256SUMS that the list was made for, in hex
    """

    corpus: str
    cases: tuple[tuple[str, str, str], ...]

    def names(self, result: CaseResult) -> bool:
        return any(must_pass(one, result) for one in self.cases)


def must_pass(patterns: tuple[str, str, str], result: CaseResult) -> bool:
    """Whether one entry of the list names the result."""
    bundle, case, mode = patterns
    in_bundle = bundle_fits(result.bundle, (bundle,))
    return in_bundle and fnmatchcase(result.case, case) and fnmatchcase(result.mode, mode)


@dataclass(frozen=True, slots=True)
class Expectations:
    """A file that was read (expectations_file.py).

    ceilings  by name, of CEILINGS
    today     the day on which entries expire or not, in UTC
    """

    path: str
    today: date
    entries: tuple[Entry, ...] = ()
    must_pass: MustPass | None = None
    ceilings: Mapping[str, int] = field(default_factory=dict)

    def hold(self, results: Sequence[CaseResult]) -> None:
        """Excuse what is expected in results as they were judged: of one bundle, or of all."""
        for result in results:
            if self.must_pass is None or not self.must_pass.names(result):
                self._hold(result)
        xrayed = [result for result in results if result.mode == XRAY]
        told = [finding.verdict for one in xrayed for finding in one.findings]
        if Verdict.EXCUSED in told and not any(verdict.is_bad for verdict in told):
            for one in xrayed:
                if one.verdict.is_bad:  # it shows what an earlier model told
                    one.verdict = Verdict.EXCUSED

    def _hold(self, result: CaseResult) -> None:
        entries = [
            entry
            for entry in self.entries
            if not entry.has_expired(self.today) and entry.selects(result)
        ]
        if result.verdict is Verdict.UNSUPPORTED:
            result.expected |= {e.id for e in entries if e.kind is Kind.NOT_SUPPORTED}
            result.counted = not result.expected
            return
        was_bad = any(finding.verdict.is_bad for finding in result.findings)
        findings = []
        for finding in result.findings:
            taken = [entry for entry in entries if entry.takes(finding)]
            result.expected |= {entry.id for entry in taken}
            findings.append(_excused(finding, taken[0]) if taken else finding)
        result.findings = findings
        ties = [f for f in findings if f.verdict is Verdict.NEAR_TIE]
        result.counted = not ties or any(tie.excuse is None for tie in ties)
        if was_bad and not any(finding.verdict.is_bad for finding in findings):
            result.verdict = Verdict.EXCUSED


def _excused(finding: Finding, entry: Entry) -> Finding:
    verdict = Verdict.EXCUSED if finding.verdict.is_bad else finding.verdict
    return replace(finding, verdict=verdict, excuse=Excuse(entry.id, entry.reason, entry.link))
