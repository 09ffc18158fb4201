"""Options of a command that judges: which reports to write, and where.

A command adds them to its parser with `add_report_options`. Before it judges, `begin_reports`
refuses what could not be written; at its end, `Reports.write` writes all of them or none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kdtr.conformance.gate import GateResult
from kdtr.conformance.report_files.annotations import github_annotations
from kdtr.conformance.report_files.comparison_table import check_pyarrow, comparison_table
from kdtr.conformance.report_files.earlier_report import check_earlier
from kdtr.conformance.report_files.html_page import html_page
from kdtr.conformance.report_files.json_lines import json_lines
from kdtr.conformance.report_files.junit import junit_xml
from kdtr.conformance.report_files.markdown import markdown_summary
from kdtr.conformance.report_files.run import Header, Run, header
from kdtr.conformance.report_files.whole_files import check_targets, write_whole
from kdtr.contract import EngineInfo

_KINDS: dict[str, tuple[Callable[[Run], bytes], str]] = {
    "html": (html_page, "one page to read: verdicts, and every fault with its pictures"),
    "markdown": (markdown_summary, "a summary for the page of a CI job"),
    "junit": (junit_xml, "JUnit XML: a test case for each case and mode"),
    "jsonl": (json_lines, "JSON lines: a line for each case, finding and comparison"),
    "parquet": (comparison_table, "a table of all comparisons (needs the extra parquet)"),
}
_ANNOTATIONS = {"github": github_annotations}


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """`--html FILE` and its kind, and `--annotations`, as a group of their own."""
    group = parser.add_argument_group("reports of the run (docs/reports.md)")
    for kind, (_, what) in _KINDS.items():
        group.add_argument(f"--{kind}", metavar="FILE", help=what)
    group.add_argument(
        "--annotations",
        choices=sorted(_ANNOTATIONS),
        help="print the findings as annotations of a CI job, after the report",
    )


@dataclass(frozen=True, slots=True)
class Reports:
    """What was asked for, and what is known of the run before it starts."""

    files: dict[str, Path]
    annotations: str | None
    header: Header

    def write(
        self,
        info: EngineInfo,
        gate: GateResult,
        seconds: float,
        options: frozenset[str] = frozenset(),
    ) -> list[str]:
        """All files or none; returns the lines to print: annotations.

        options  names that the engine's factory takes
        Raises CaseError where a file cannot be written.
        """
        run = Run(replace(self.header, seconds=seconds), info, gate, options)
        contents = {f"--{kind}": (path, _KINDS[kind][0](run)) for kind, path in self.files.items()}
        write_whole(contents)
        return [] if self.annotations is None else _ANNOTATIONS[self.annotations](run)


def begin_reports(
    args: argparse.Namespace,
    words: Sequence[str],
    engine: str,
    inputs: Sequence[str] = (),
    others: Mapping[str, Path] | None = None,
) -> Reports:
    """Raises before anything is judged: CaseError for a file that could not be written, or that
    holds something else, UnsupportedError for a table without pyarrow.

    words   of the command line, the command first
    engine  as it was asked for
    inputs  files that are judged by, or are judged: their sums are told
    others  what the command writes besides, by option
    """
    asked = {kind: getattr(args, kind) for kind in _KINDS}
    files = {kind: Path(path) for kind, path in asked.items() if path is not None}
    targets = {f"--{kind}": path for kind, path in files.items()}
    check_targets({**targets, **(others or {})}, inputs)
    check_earlier(files)
    if "parquet" in files:
        check_pyarrow()
    # An engine may change the directory.
    files = {kind: path.absolute() for kind, path in files.items()}
    return Reports(files, args.annotations, header(engine, words, inputs if files else ()))
