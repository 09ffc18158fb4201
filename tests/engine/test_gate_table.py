"""What the page of `make gate-gpu` says of near ties and of skipped tests (benchmarks/kernels)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import kdtr.conformance
from kdtr.conformance.cli import main

KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
BASE = Path(kdtr.conformance.__file__).parent / "corpus" / "base.kdtr"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(KERNELS)
    return importlib.import_module("gate_table")


def test_a_near_tie_is_told_with_bundle_case_and_point(
    table: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gate.jsonl"
    options = ["--engine", "host", "--engine-option", "dtype=bfloat16", "--jsonl", str(file)]
    part = ["--case", "ar", "--case", "page-end", "--mode", "stepwise", "--mode", "round"]

    assert main(["gate", str(BASE), *part, *options]) == 0
    report = table.read_report(file)

    assert "NEAR TIE  page-end / stepwise / round0: expert_ids" in capsys.readouterr().out
    assert 0.1 < report.headroom < 1
    (tie,) = report.near_ties  # once, although two modes meet it
    assert tie.startswith("base, page-end, round0: expert_ids: the choice of row 3 hangs on ")


def test_near_ties_stand_once_with_the_runs_that_met_them(table: Any) -> None:
    both, one = table.Reported(0.2, ("a", "b")), table.Reported(0.3, ("b",))

    lines = list(table.near_tie_lines({"plain": both, "graphs=False": both, "guarded": one}))

    told = [line for line in lines if line.startswith(("In ", "- "))]
    assert ["In `plain`, `graphs=False`:", "- a"] == told[:2]
    assert ["In `plain`, `graphs=False`, `guarded`:", "- b"] == told[2:]
    assert [] == list(table.near_tie_lines({"plain": table.Reported(0.2, ())}))


def test_a_gate_that_wrote_no_report_has_nothing_to_say(table: Any, tmp_path: Path) -> None:
    assert table.Reported(0.0, ()) == table.read_report(tmp_path / "none.jsonl")


def test_skipped_tests_are_told_with_their_reasons(table: Any) -> None:
    one = "SKIPPED [1] laws/watched.py:32: it does not offer verify_batch\n39 passed, 1 skipped"
    other = one + "\nSKIPPED [12] tests/test_x.py: no device: none"

    lines = list(table.skipped_lines({"odd": one, "aligned": other, "device tests": "9 passed"}))

    assert [
        "- watched.py: it does not offer verify_batch (in 2 of 3 parts: odd; aligned)",
        "- test_x.py: no device (in 1 of 3 parts: aligned)",
    ] == [line for line in lines if line.startswith("- ")]
    assert [] == list(table.skipped_lines({"odd": "40 passed in 3 s"}))


def test_the_line_that_sums_a_part_up(table: Any) -> None:
    assert "39 passed, 5 skipped in 34.43s" == table.said("...\n39 passed, 5 skipped in 34.43s\n\n")
    assert "gate passed: 3 pass" == table.said("NEAR TIE x\ngate passed: 3 pass\n")
    assert "" == table.said("Killed\n")
