"""JSON lines: strict JSON, a line for each thing, the header first and the verdict last."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.json_lines import SCHEMA, json_lines

from .conftest import HOSTILE, finding


def lines(run: Run) -> list[dict[str, Any]]:
    def refused(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    text = json_lines(run).decode("utf-8")
    return [json.loads(line, parse_constant=refused) for line in text.split("\n") if line]


def test_there_is_a_line_for_each_case_finding_comparison_and_fault(run: Run) -> None:
    found = lines(run)

    assert {
        "run": 1, "engine": 1, "fault": 3, "case": 6, "finding": 3, "comparison": 3, "verdict": 1,
    } == Counter(line["kind"] for line in found)  # fmt: skip
    assert ("run", SCHEMA) == (found[0]["kind"], found[0]["schema"])
    assert {"kind": "verdict", "passed": False, "quick": False, "part": "", "why_failed": []} == {
        name: value for name, value in found[-1].items() if name != "counts"
    }


def test_a_comparison_is_told_with_its_case(run: Run) -> None:
    found = [line for line in lines(run) if line["kind"] == "comparison"]

    place = {"kind": "comparison", "bundle": "b.kdtr", "case": "ar", "mode": "stepwise"}
    assert [
        {"point": "chunk0", "stage": "positions", "layer": None, "headroom": None, "same": True},
        {"point": "chunk0", "stage": "scores", "layer": 1, "headroom": 0.25, "same": True},
        {"point": "round0", "stage": "logits", "layer": None, "headroom": "inf", "same": False},
    ] == [{k: v for k, v in line.items() if k not in {*place, "rows"}} for line in found]
    assert all(line.items() >= place.items() for line in found)


def test_a_finding_is_told_with_its_numbers_and_its_fault(run: Run) -> None:
    (told,) = [
        line for line in lines(run) if line["kind"] == "finding" and line["verdict"] == "fail"
    ]

    assert (1, "y", "positions", ["POS-1", "FWD-1"], 4) == tuple(
        told[name] for name in ("fault", "case", "stage", "rules", "rows_fed")
    )
    assert [0.5, 0.75, "-inf"] == told["excerpt"]["actual"]
    assert {"expected": [5, 6, 6, 7], "shown": [5, 6, 7, 8]} == told["drawing"]["positions"]
    assert {"expected": [0, 2, 3], "shown": None} == told["drawing"]["path"]


def test_an_excuse_is_told(excused: Run) -> None:
    case, told = [line for line in lines(excused) if line["kind"] in ("case", "finding")]

    assert ("excused", "excused") == (case["verdict"], told["verdict"])
    assert {"entry": "e1", "reason": "a known gap", "link": "https://x.test/7"} == told["excuse"]


def test_text_of_an_engine_stays_within_its_line(hostile: Run) -> None:
    found = lines(hostile)

    (told,) = [line for line in found if line["kind"] == "finding"]
    assert HOSTILE.replace("\ud800", "\\ud800") == told["summary"]


def test_two_runs_differ_in_their_header_alone(run: Run, run_of: Callable[..., Run]) -> None:
    later = replace(run.header, started="2027-01-01T00:00:00Z", seconds=9.0)

    one, other = json_lines(run), json_lines(replace(run, header=later))

    assert one != other
    assert one.splitlines()[1:] == other.splitlines()[1:]
    assert json_lines(run_of(finding())) != json_lines(run_of(finding(actual="9")))
