"""Annotations of GitHub Actions: one for each fault, and nothing of an engine's is a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kdtr.conformance import GateResult
from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.annotations import github_annotations

from .conftest import finding

RunOf = Callable[..., Run]


def test_a_fault_is_an_error_with_its_rule_and_the_line_that_shows_it_again(run_of: RunOf) -> None:
    (line,) = github_annotations(run_of(finding()))

    head, message = line.removeprefix("::error ").split("::", 1)
    assert "title=POS-1 positions are L + index" == head
    assert [
        "y / round / round0: positions: 2 of 4 differ, at row 2 (path 0-2)",
        "expected 6, actual 7",
        "POS-1: Node i is at position L + depth(i), so the root is at L.",
        f"again: {finding().reproduce}",
    ] == message.split("%0A")


def test_of_several_bundles_it_names_its_own_and_counts_them(run: Run) -> None:
    places = [replace(finding().place, bundle=f"dir/{name}.kdtr") for name in ("one", "two")]
    found = [replace(finding(), place=place) for place in places]
    results = [
        replace(run.gate.results[0], bundle=one.place.bundle, findings=[one]) for one in found
    ]

    (line,) = github_annotations(replace(run, gate=GateResult(results)))

    message = line.split("::", 2)[2].split("%0A")
    assert message[0].startswith("one: y / round / round0: positions: 2 of 4 differ")
    assert "seen in 2 cases and modes of 2 bundles" in message


def test_near_ties_and_what_is_expected_are_none(run: Run, excused: Run) -> None:
    results = [*run.gate.results, *excused.gate.results]

    lines = github_annotations(replace(run, gate=GateResult(results)))

    assert ["POS-1", "answer%3A"] == [line.split()[1].removeprefix("title=") for line in lines]


def test_of_many_the_last_tells_how_many_more(run_of: RunOf) -> None:
    many = [finding(f"c{i}", stage=f"s{i}", looks_like=()) for i in range(14)]

    lines = github_annotations(run_of(*many))

    assert 10 == len(lines)
    assert "::error title=kdtr gate failed::5 more faults; all are in the report" == lines[-1]


def test_a_run_that_shows_nothing_is_an_error(run_of: RunOf) -> None:
    (line,) = github_annotations(replace(run_of(), gate=GateResult()))

    assert "::error title=kdtr gate failed::nothing was compared" == line


def test_text_of_an_engine_cannot_begin_a_command(hostile: Run) -> None:
    lines = github_annotations(hostile)

    (line,) = lines
    assert "\n" not in line
    assert "\r" not in line
    assert "," not in line.removeprefix("::error title=").split("::")[0]
    assert line.startswith("::error title=POS-1 <script>alert(1)</script>")
