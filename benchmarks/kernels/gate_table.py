"""The page of gate.py, beside this file: what each part said, near ties, and what was skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Reported(NamedTuple):
    """What the JSON lines of `kdtr gate --jsonl` say of one run.

    headroom   the largest error of any comparison, of its bound; 0 where nothing was compared
    near_ties  one sentence each, with bundle, case and point
    """

    headroom: float
    near_ties: tuple[str, ...]


def read_report(path: Path) -> Reported:
    """Of a file that a gate has written; nothing of one that it could not write."""
    if not path.exists():
        return Reported(0.0, ())
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    headrooms = [line["headroom"] or 0.0 for line in lines if line["kind"] == "case"]
    near = {  # once, in order, whatever modes see it
        f"{Path(line['bundle']).stem}, {line['case']}, {line['point']}: "
        f"{line['stage']}: {line['summary']}" + (f" ({line['where']})" if line["where"] else "")
        for line in lines
        if line["kind"] == "finding" and line["verdict"] == "near tie"
    }
    return Reported(max(headrooms, default=0.0), tuple(sorted(near)))


def near_tie_lines(reports: dict[str, Reported]) -> Iterator[str]:
    """Markdown: each near tie once, and which of the runs met it, by what tells these apart."""
    met: dict[str, list[str]] = {}
    for part, report in reports.items():
        for tie in report.near_ties:
            met.setdefault(tie, []).append(part)
    if not met:
        return
    yield ""
    yield "## Near ties"
    yield ""
    yield "The engine chose otherwise than the reference, and the choice hangs on less than the two"
    yield "bounds (NUM-2): a near tie, and no failure. Behind it are points that were not reached."
    runs = dict.fromkeys(tuple(parts) for parts in met.values())
    for parts in runs:
        yield ""
        yield f"In {', '.join(f'`{part}`' for part in parts)}:"
        yield ""
        yield from (f"- {tie}" for tie, met_by in sorted(met.items()) if tuple(met_by) == parts)


def skipped_lines(outputs: dict[str, str]) -> Iterator[str]:
    """Markdown: each reason for which pytest skipped a test, up to a colon, and in how many parts;
    which, where they are few."""
    said: dict[str, list[str]] = {}
    for part, output in outputs.items():
        for reason in dict.fromkeys(_skipped(output)):
            said.setdefault(reason, []).append(part)
    if not said:
        return
    yield ""
    yield "## Skipped"
    yield ""
    for reason, parts in said.items():
        named = f": {'; '.join(parts)}" if len(parts) < 3 else ""
        yield f"- {reason} (in {len(parts)} of {len(outputs)} parts{named})"


def _skipped(output: str) -> Iterable[str]:
    for line in output.splitlines():
        if match := re.match(r"SKIPPED \[\d+\] (\S+?)(?::\d+)?: (.*)", line):
            yield f"{Path(match[1]).name}: {match[2].split(': ')[0]}"


def said(output: str) -> str:
    """The line that sums a part up: of the gate, of pytest, of the sanitizer."""
    marks = ("gate passed", "gate FAILED", " passed", " failed", "ERROR SUMMARY", "RACECHECK")
    for line in reversed(output.splitlines()):
        if any(mark in line for mark in marks):
            return line.strip("= ").replace("|", "/")
    return ""
