"""A run as reports tell it: faults in order, excuses, names, and a header that tells the bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kdtr.conformance import GateResult, Verdict
from kdtr.conformance.finding import CaseResult, Excuse
from kdtr.conformance.report_files import Run
from kdtr.conformance.report_files.run import header

from .conftest import finding

RunOf = Callable[..., Run]


def test_what_failed_is_told_before_near_ties_and_numbered(run: Run) -> None:
    assert [1, 2, 3] == [fault.number for fault in run.faults]
    assert [True, True, False] == [fault.is_bad for fault in run.faults]
    assert [Verdict.FAIL, Verdict.ERROR, Verdict.NEAR_TIE] == [
        fault.first.verdict for fault in run.faults
    ]


def test_a_fault_of_many_cases_is_one(run_of: RunOf) -> None:
    run = run_of(finding("a"), finding("b"), finding("c", mode="stepwise"))

    (fault,) = run.faults
    assert 3 == len(fault.group.findings)
    assert {1} == set(run.numbers.values())


def test_a_fault_is_named_by_its_best_explanation_and_the_rule_of_it(run_of: RunOf) -> None:
    best = replace(finding().looks_like[0], rules=("FWD-1",))

    (fault,) = run_of(finding(looks_like=(best,))).faults
    (unknown,) = run_of(finding(looks_like=())).faults

    assert ("positions are L + index", ("FWD-1", "POS-1")) == (fault.title(), fault.rules())
    assert ("positions: 2 of 4 differ", ("POS-1", "FWD-1")) == (unknown.title(), unknown.rules())


def test_a_title_is_one_short_line(run_of: RunOf) -> None:
    (long,) = run_of(finding(summary="wrong " * 60, looks_like=())).faults
    (raised,) = run_of(finding(summary="it raised\nTraceback:\n...", looks_like=())).faults

    assert long.title().startswith("positions: wrong wrong")
    assert long.title().endswith("wrong ...")
    assert 144 >= len(long.title())
    assert "positions: it raised" == raised.title()


def test_what_is_excused_is_told_between_what_failed_and_near_ties(run_of: RunOf) -> None:
    run = run_of(
        finding("tie", verdict=Verdict.NEAR_TIE, stage="targets", looks_like=()),
        finding("known", verdict=Verdict.EXCUSED, excuse=Excuse("e1", "the kernel is new")),
        finding("late", n_rows=9, stage="root", looks_like=()),
    )

    assert ["late", "known", "tie"] == [fault.first.place.case for fault in run.faults]
    assert [True, False, False] == [fault.is_bad for fault in run.faults]
    assert {"near tie": 1, "excused": 1, "fail": 1} == run.counts()


def test_why_a_run_failed_without_a_finding(run: Run, run_of: RunOf) -> None:
    assert [] == run.why_failed()
    assert ["nothing was compared"] == replace(run_of(), gate=GateResult()).why_failed()


def test_bundles_are_named_shortly_unless_two_share_a_name(run_of: RunOf) -> None:
    paths = ("a/x.kdtr", "b/x.kdtr", "b/y.kdtr")
    run = replace(run_of(), gate=GateResult([CaseResult(path, "ar", "round") for path in paths]))

    assert ["a/x.kdtr", "b/x.kdtr", "y"] == list(run.bundle_names().values())


def test_the_header_tells_the_bytes_and_the_command(tmp_path: Path) -> None:
    bundle = tmp_path / "b.kdtr"
    bundle.write_bytes(b"bytes")

    made = header("mine:make", ["kdtr", "gate", "a b"], [str(bundle), str(tmp_path / "none")])

    (told,) = made.bundles
    assert (5, hashlib.sha256(b"bytes").hexdigest()) == (told.n_bytes, told.sha256)
    assert "kdtr gate 'a b'" == made.command
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", made.started)
    assert {"rules", "kdtr", "numpy", "ml_dtypes", "Python"} == dict(made.versions).keys()
