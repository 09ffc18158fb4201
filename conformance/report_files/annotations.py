"""Findings as annotations of a CI job: lines that its runner reads from standard output.

They name no file of the engine's: a verdict on what an engine did does not know the line that is to
blame, and a wrong mark in a diff misleads. GitHub shows such annotations on the page of the run.
"""

from __future__ import annotations

from collections.abc import Mapping

from kdtr.conformance.bundle_names import names_to_tell
from kdtr.conformance.plain_text import printable
from kdtr.conformance.report_files.run import Fault, Run
from kdtr.contract import rule

_MOST = 10  # errors of a step that GitHub shows; what follows is dropped without a word


def github_annotations(run: Run) -> list[str]:
    """`::error title=...::...` for each fault that makes the run fail; the last of many tells how
    many more there are."""
    bad = [fault for fault in run.faults if fault.is_bad]
    if not bad and run.why_failed():
        return [_error("kdtr gate failed", run.why_failed())]
    shown = bad if len(bad) <= _MOST else bad[: _MOST - 1]
    names = names_to_tell(run.gate.results)
    lines = [
        _error(" ".join([*fault.rules()[:1], fault.title()]), _told(fault, names))
        for fault in shown
    ]
    if len(shown) < len(bad):
        more = f"{len(bad) - len(shown)} more faults; all are in the report"
        lines.append(_error("kdtr gate failed", [more]))
    return lines


def _told(fault: Fault, names: Mapping[str, str]) -> list[str]:
    first = fault.first
    seen = f"{first.headline(names.get(first.place.bundle, ''))}: {first.summary}"
    lines = [seen + (f", at {first.where}" if first.where else "")]
    lines += [f"expected {first.expected}, actual {first.actual}"] if first.expected else []
    n = len(fault.group.findings)
    n_bundles = len({finding.place.bundle for finding in fault.group.findings})
    of = f" of {n_bundles} bundles" if n_bundles > 1 else ""
    lines += [f"seen in {n} cases and modes{of}"] if n > 1 else []
    lines += [f"{rule_id}: {rule(rule_id)}" for rule_id in fault.rules()[:1]]
    return lines + ([f"again: {first.reproduce}"] if first.reproduce else [])


def _error(title: str, lines: list[str]) -> str:
    head = _escaped(printable(title)).replace(":", "%3A").replace(",", "%2C")
    return f"::error title={head}::{_escaped(chr(10).join(map(printable, lines)))}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
