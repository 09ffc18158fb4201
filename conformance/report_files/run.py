"""A run as reports tell it: what was judged and how, the verdicts, and the faults, numbered.

The header alone differs between two runs of the same engine on the same bundles.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kdtr.conformance.bundle_names import short_names
from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.finding_groups import Group, grouped
from kdtr.conformance.gate import GateResult
from kdtr.conformance.report import closing_line
from kdtr.conformance.report_experiments import Bench
from kdtr.conformance.report_hypotheses import Explanations, explained
from kdtr.contract import EngineInfo, rules_version

_TOLD_VERSIONS = ("kdtr", "numpy", "ml_dtypes")
_CHUNK = 1 << 20  # bytes
_TITLE = 140  # characters


@dataclass(frozen=True, slots=True)
class BundleSum:
    """A golden bundle of the run, by its bytes."""

    path: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Header:
    """When, with what and by which command: no other part of a report depends on these.

    engine    as it was asked for: "my_engine:make_engine"
    command   the line that was run, for a shell
    started   UTC, "2026-01-31T12:00:00Z"; it took `seconds`
    versions  (name, version) of the judge and of what it computes with
    """

    engine: str
    command: str
    started: str
    seconds: float
    versions: tuple[tuple[str, str], ...]
    bundles: tuple[BundleSum, ...]


def header(engine: str, words: Sequence[str], bundles: Sequence[str]) -> Header:
    """Of a run that begins now; a bundle that cannot be read is the gate's to refuse.

    words  of the command, its name first
    """
    return Header(
        engine=engine,
        command=shlex.join(words),
        started=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=0.0,
        versions=(*_versions(), ("Python", platform.python_version())),
        bundles=tuple(_sum(path) for path in bundles if os.access(path, os.R_OK)),
    )


def _versions() -> list[tuple[str, str]]:
    found = [("rules", str(rules_version()))]
    for name in _TOLD_VERSIONS:
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            found.append((name, "not installed as a package"))
    return found


def _sum(path: str) -> BundleSum:
    digest, n_bytes = hashlib.sha256(), 0
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            n_bytes += len(chunk)
    return BundleSum(str(path), n_bytes, digest.hexdigest())


@dataclass(frozen=True)
class Fault:
    """A group of findings as one fault of the run.

    number  from 1, the most telling first; what is excused and near ties come after what failed
    """

    number: int
    group: Group
    explanations: Explanations

    @property
    def first(self) -> Finding:
        return self.group.first

    @property
    def is_bad(self) -> bool:
        """Whether it makes the run fail."""
        return self.first.verdict.is_bad

    def rules(self) -> tuple[str, ...]:
        """Ids, the best explanation's own first: of the stage's rules it knows which one."""
        best = self.explanations.rivals[0].rules if self.explanations.rivals else ()
        return tuple(dict.fromkeys((*best, *self.first.rules)))

    def title(self) -> str:
        """The best explanation, or what differs and where it lies: one line, cut if it is long."""
        why = self.explanations
        if why.rivals:
            return _cut(why.rivals[0].says)
        told = why.partial[0][0].says if why.partial else self.first.summary
        return _cut(f"{self.first.stage}: {told}")


@dataclass(frozen=True)
class Run:
    """Everything that a report may say.

    options  names that the engine's factory takes: what can be experimented with
    """

    header: Header
    info: EngineInfo
    gate: GateResult
    options: frozenset[str] = frozenset()

    @property
    def passed(self) -> bool:
        return self.gate.passed

    def why_failed(self) -> list[str]:
        """Why it failed, but for its findings: nothing was asserted, expectations are unmet."""
        return [*([self.gate.shortfall] if self.gate.shortfall else []), *self.gate.unmet]

    @property
    def name(self) -> str:
        """What ran: a part of the gate is never called the gate."""
        if self.gate.quick is not None:
            return "quick corpus, not the whole gate,"
        return self.gate.part or "kdtr gate"

    def counts(self) -> dict[str, int]:
        """How many results have which verdict, in the order in which verdicts weigh."""
        return {one.value: self.gate.count(one) for one in Verdict if self.gate.count(one)}

    def bundle_names(self) -> dict[str, str]:
        """A short name for each bundle: its file's stem, or its path where two share one."""
        return short_names(result.bundle for result in self.gate.results)

    def verdict_line(self) -> str:
        """As on a terminal."""
        return closing_line(self.gate, self.header.seconds).strip()

    @cached_property
    def faults(self) -> tuple[Fault, ...]:
        """What is bad first, then what is excused, then near ties."""
        bench = Bench(self.info, self.options, self.gate.results)
        groups = sorted(grouped(self.gate.findings), key=_rank)  # stable
        return tuple(
            Fault(number, group, explained(group, bench))
            for number, group in enumerate(groups, start=1)
        )

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The number of the fault of a finding, by the finding's id()."""
        return {
            id(finding): fault.number for fault in self.faults for finding in fault.group.findings
        }


def _cut(text: str) -> str:
    """The first line, or its beginning: a title."""
    first = text.split("\n", 1)[0]
    return first if len(first) <= _TITLE else f"{first[:_TITLE].rsplit(' ', 1)[0]} ..."


def _rank(group: Group) -> tuple[bool, bool]:
    verdict = group.first.verdict
    return not verdict.is_bad, verdict is not Verdict.EXCUSED
