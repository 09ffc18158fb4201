"""A run as JSON lines, for programs: docs/reports.md says what is in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from kdtr.conformance.report_files.plain_data import (
    Data,
    case_data,
    comparison_data,
    engine_data,
    fault_data,
    finding_data,
    header_data,
    verdict_data,
)
from kdtr.conformance.report_files.run import Run

# An engine's text may hold halves of pairs, which UTF-8 lacks and strict readers refuse: as text.
_SURROGATE = re.compile("[\ud800-\udfff]")
SCHEMA = 1  # grows when a field changes its meaning or goes; fields may be added without


def json_lines(run: Run) -> bytes:
    """One object a line, in UTF-8; the header is the first, the verdict the last."""
    lines = (json.dumps(one, ensure_ascii=False, allow_nan=False) for one in _objects(run))
    return "".join(f"{_SURROGATE.sub(_escaped, line)}\n" for line in lines).encode("utf-8")


def _escaped(half: re.Match[str]) -> str:
    return f"\\\\u{ord(half[0]):04x}"


def _objects(run: Run) -> Iterator[Data]:
    yield {"kind": "run", "schema": SCHEMA, **header_data(run.header)}
    yield {"kind": "engine", **engine_data(run)}
    for fault in run.faults:
        yield {"kind": "fault", **fault_data(fault)}
    for result in run.gate.results:
        yield {"kind": "case", **case_data(run, result)}
        for finding in result.findings:
            yield {"kind": "finding", **finding_data(run, finding)}
        for compared in result.compared:
            yield {"kind": "comparison", **comparison_data(result, compared)}
    yield {"kind": "verdict", **verdict_data(run)}
