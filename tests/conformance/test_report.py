"""The report as a person reads it, in 80 columns."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from rich.console import Console

from kdtr.conformance import drive, load_engine
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.finding_groups import in_order
from kdtr.conformance.gate import GateResult
from kdtr.conformance.report import closing_line, print_report
from kdtr.conformance.xray import xray_models
from kdtr.conformance.xray_gate import xray_results
from kdtr.contract import EngineInfo, NumericProfile, rule

INFO = EngineInfo("mine", "1", "cpu", NumericProfile(), frozenset({"verify"}))
MODES = (*(mode.name for mode in drive.MODES), "script")  # those that run together


def report(results: list[CaseResult], width: int = 80) -> list[str]:
    out = io.StringIO()
    print_report(Console(file=out, width=width, color_system=None), INFO, GateResult(results), 1.0)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def result(case: str, mode: str, verdict: Verdict = Verdict.PASS, **fields: Any) -> CaseResult:
    fields.setdefault("comparisons", 7)
    return CaseResult("b.kdtr", case, mode, verdict, **fields)


def not_offered(case: str, mode: str, *verbs: str) -> CaseResult:
    return result(case, mode, Verdict.UNSUPPORTED, unshown=set(verbs), comparisons=0)


def finding(case: str, n_rows: int, *rules: str, verdict: Verdict = Verdict.FAIL) -> Finding:
    place = Place("b.kdtr", case, "round", "round0")
    return Finding(verdict, place, "logits", "differ", rules=rules, n_rows=n_rows)


# The table


def test_the_table_of_all_modes_with_everything_blocked_fits() -> None:
    verdicts = cycle([Verdict.FAIL, Verdict.ERROR, Verdict.NEAR_TIE, Verdict.PASS])
    results = [
        result("prompt0-trees", mode, verdict, blocked=22, comparisons=5000, headroom=0.0123)
        for mode, verdict in zip(MODES, verdicts, strict=False)
    ]

    lines = report(results)

    assert {"case", *MODES, "compared", "error/bound"} == set(lines[1].split())
    assert ["prompt0-trees", "fail", "error", "near"] == lines[3].split()[:4]
    assert [str(5000 * len(MODES)), "0.012"] == lines[3].split()[-2:]
    assert all(len(line) <= 80 for line in lines[:-1])  # the last one is for a log
    blocked = 22 * len(MODES)
    assert f"{blocked} points blocked: not reached, because a finding ends its case" in lines


def test_names_of_bundles_stay_whole() -> None:
    names = ("a-very-long-name-of-a-bundle.kdtr", "two.kdtr")
    results = [
        CaseResult(name, "prompt0-trees", mode, comparisons=7) for name in names for mode in MODES
    ]

    lines = report(results)

    assert names[0] == lines[3]
    assert names[1] == lines[6]
    assert lines[4] == lines[7]
    assert lines[4].startswith("prompt0-trees pass")
    assert lines[1].index("forward") == lines[4].index("pass", lines[4].index("pass") + 30)
    assert all(len(line) <= 80 for line in lines[:-1])


def test_what_is_not_offered_is_a_dash_and_one_line() -> None:
    results = [
        result("y", "stepwise"),
        not_offered("y", "round", "round()"),
        not_offered("from-root", "stepwise", "set_root()"),
        not_offered("from-root", "round", "round()", "set_root()"),
    ]

    lines = report(results)

    rows = {
        line.split()[0]: line.split()[1:] for line in lines if line.startswith(("y ", "from-root "))
    }
    assert ["pass", "-", "7"] == rows["y"]
    assert ["-", "-", "0"] == rows["from-root"]
    assert "round: not offered, needs round()" in lines
    assert "from-root: not offered, needs set_root()" in lines
    assert 2 == sum("not offered" in line for line in lines)
    assert not any("blocked" in line for line in lines)


def test_checks_that_were_left_out_are_named() -> None:
    lines = report([result("state", "script", unshown={"reset()", "accept()"})])

    assert "script: without the checks that need accept(), reset()" in lines
    assert not any("not shown" in line for line in lines)


# The findings


def test_the_earliest_point_of_the_simplest_case_comes_first() -> None:
    late, early = finding("late", 40), finding("early", 4)
    tie = finding("tie", 1, verdict=Verdict.NEAR_TIE)
    same = finding("same", 4)

    script = replace(finding("state", 0), place=Place("b.kdtr", "state", "script", "twice"))

    assert [early, same, late, script, tie] == in_order([script, tie, late, early, same])


def test_a_rule_is_told_once_and_wrapped() -> None:
    first, second = finding("a", 1, "POS-1", "FWD-1"), finding("b", 2, "FWD-1", "MASK-1")
    third = replace(finding("c", 3, "POS-1", "FWD-1"), stage="root")  # another fault

    lines = report([result("a", "round", Verdict.FAIL, findings=[third, second, first])])

    text = " ".join(" ".join(lines).split())
    for rule_id in ("POS-1", "FWD-1", "MASK-1"):
        assert 1 == text.count(rule(rule_id))
    assert f"  POS-1     {rule('POS-1')}" in lines
    start = next(i for i, line in enumerate(lines) if line.startswith("  FWD-1     Prefill of P"))
    assert lines[start + 1].startswith("            ")
    assert "  also      FWD-1" in lines
    assert "  breaks    POS-1, FWD-1" in lines
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("names", "head"),
    [
        (("y", "round", "round0", "mask"), "y / round / round0: mask: differs"),
        (
            ("files", "script", "KDTR file without a tensor", "KDTR file without a tensor"),
            "files / script / KDTR file without a tensor: differs",
        ),
        (("all", "load", "load", "load"), "all / load: differs"),
        (("y", "stepwise", "open", "set_root"), "y / stepwise / open: set_root: differs"),
    ],
    ids=["stage", "check", "load", "open"],
)
def test_no_name_is_told_twice(names: tuple[str, str, str, str], head: str) -> None:
    case, mode, point, stage = names
    one = Finding(Verdict.FAIL, Place("b", case, mode, point), stage, "differs")

    assert head == f"{one.headline()}: {one.summary}"
    assert f"FAIL  {head}" == one.lines()[0]


def test_the_next_step_is_wrapped_and_the_command_is_not() -> None:
    step, command = "show the stages " + "positions and mask " * 6, "kdtr gate " + "x" * 90
    shown = replace(finding("a", 1), next_step=step, reproduce=command)

    lines = report([result("a", "round", Verdict.FAIL, findings=[shown])])

    start = next(
        i for i, line in enumerate(lines) if line.startswith("  next      show the stages")
    )
    assert lines[start + 1].startswith("            ")
    assert f"  again     {command}" in lines


# What an engine or a bundle says of itself


def test_the_name_of_an_engine_cannot_act_on_the_terminal() -> None:
    info = replace(INFO, name="loud\x1b[2J\r[red]" + "x" * 500, device="gpu\n:smile:")
    out = io.StringIO()

    print_report(Console(file=out, width=80, color_system=None), info, GateResult(), 1.0)

    head = out.getvalue().splitlines()[0]
    assert head.startswith("loud\\x1b[2J\\r[red]xxx")
    assert f"{'x' * 39}... (518 characters) 1 on gpu\\n:smile:: weights float32" in head


def test_the_text_of_a_finding_cannot_either() -> None:
    shown = replace(finding("a\x1b[1m", 1), summary="raised ValueError: \x1b]0;x\x07\nsecond line")

    lines = report([result("a\x1b[1m", "round", Verdict.FAIL, findings=[shown])])

    assert not any("\x1b" in line or "\x07" in line for line in lines)
    at = next(i for i, line in enumerate(lines) if line.startswith("FAIL  a\\x1b[1m / round"))
    assert lines[at].endswith("raised ValueError: \\x1b]0;x\\x07")
    assert "second line" == lines[at + 1]


# Several bundles


def failing(bundle: str, case: str, n_rows: int) -> CaseResult:
    shown = Finding(
        Verdict.FAIL, Place(bundle, case, "round", "round0"), "logits", "differ", n_rows=n_rows
    )
    return CaseResult(bundle, case, "round", Verdict.FAIL, comparisons=7, findings=[shown])


def test_of_several_bundles_a_heading_names_its_own_once() -> None:
    results = [failing("dir/one.kdtr", "y", 9), failing("dir/two.kdtr", "star", 4)]

    lines = report(results)

    at = lines.index("FAIL  two: star / round / round0: logits: differ")
    assert "  also in   1 case: one/y" in lines[at:]
    assert 1 == sum("two" in line for line in lines[at:])


def test_of_one_bundle_it_names_none_whatever_is_x_rayed() -> None:
    model = replace(result("k2", "x-ray"), bundle="x-ray")

    lines = report([failing("dir/one.kdtr", "y", 9), model])

    assert "FAIL  y / round / round0: logits: differ" in lines


def test_bundles_of_one_name_are_told_by_their_paths() -> None:
    lines = report([failing("a/one.kdtr", "y", 9), failing("b/one.kdtr", "y", 4)])

    assert "FAIL  b/one.kdtr: y / round / round0: logits: differ" in lines


def test_other_cases_are_counted_with_their_bundles() -> None:
    results = [
        failing(f"{i}.kdtr", case, 9) for i in range(3) for case in ("a", "b", "c", "d", "e")
    ]
    here = [failing("0.kdtr", case, 9) for case in "abc"]

    several, one = " ".join(report(results)), " ".join(report([*here, failing("1.kdtr", "x", 1)]))

    assert "  also in   14 cases of 3 bundles: 0/b, " in several
    assert " and 2 more" in several
    assert "  also in   3 cases: 0/a, 0/b, 0/c" in one


# Blocked, and the x-ray


def test_what_blocks_whole_cases_is_named() -> None:
    by = {"verdict": Verdict.BLOCKED, "blocked": 9, "blocked_by": "ar / round", "comparisons": 0}
    results = [
        result("ar", "round", Verdict.FAIL, blocked=2),
        result("y", "round", **by),
        result("star", "round", **by),
    ]

    lines = report(results)

    assert "2 points blocked: not reached, because a finding ends its case" in lines
    assert "2 cases blocked by ar / round" in lines


def test_of_several_bundles_is_said_in_which_they_are() -> None:
    by = {"verdict": Verdict.BLOCKED, "blocked": 9, "blocked_by": "ar / round", "comparisons": 0}
    results = [
        replace(result(case, "round", **by), bundle=f"{name}.kdtr")
        for name, case in (("one", "y"), ("one", "star"), ("two", "y"))
    ]
    of_many = [replace(results[0], bundle=f"{i}.kdtr") for i in range(5)]

    assert "3 cases of one, two blocked by ar / round" in report(results)
    assert "5 cases of 5 bundles blocked by ar / round" in report(of_many)


def test_the_x_ray_models_are_told_by_verdict_below_the_table() -> None:
    models = [
        result("visible", "x-ray", headroom=0.25),
        result("k2", "x-ray"),
        result("routing", "x-ray", Verdict.FAIL),
        result("half-split", "x-ray", Verdict.UNSUPPORTED, comparisons=0),
    ]

    lines = report([result("y", "round"), *models])

    assert ["case", "round", "compared", "error/bound"] == lines[1].split()
    assert [
        "  x-ray     pass visible, k2; fail routing; not judged half-split; error/bound",
        "            0.25",
    ] == lines[4:6]


def test_blocked_x_ray_models_are_one_line() -> None:
    by = {"verdict": Verdict.BLOCKED, "blocked": 1, "blocked_by": "y / stepwise: mask"}
    lines = report([result("y", "round"), *(result(name, "x-ray", **by) for name in ("a", "b"))])

    assert "  x-ray     blocked by y / stepwise: mask" in lines
    assert not any("points blocked" in line for line in lines)


def test_of_several_bundles_the_one_that_blocks_the_x_ray_is_named() -> None:
    cause = replace(finding("y", 4), stage="mask")
    models = xray_models()[:1]

    def blocked_by(**names: str) -> str:
        blocked = xray_results(
            load_engine("host"),
            [cause],
            engine_name="host",
            options={},
            command="kdtr",
            progress=lambda _: None,
            models=models,
            names={f"{stem}.kdtr": name for stem, name in names.items()},
        )
        return blocked[0].blocked_by

    assert "y / round: mask" == blocked_by()
    assert "b: y / round: mask" == blocked_by(b="b", other="other")


# What was not shown, and the last line


def test_what_was_not_shown_is_grouped_and_leaves_out_verbs() -> None:
    results = [
        result("y", "stepwise", unshown={"mask", "path", "logits"}),
        not_offered("y", "round", "round()"),
    ]

    lines = report(results)

    start = lines.index("not shown, so neither passed nor failed; worth showing in this order:")
    assert ["mask", "logits", "path"] == [line.split()[0] for line in lines[start + 1 : start + 4]]
    assert not any("round()" in line for line in lines[start:])


def test_the_closing_line_counts_what_near_ties_kept_from_being_reached() -> None:
    tie = result("y", "round", Verdict.NEAR_TIE, blocked=3)
    fail = result("z", "round", Verdict.FAIL, blocked=5)

    assert (
        "\ngate FAILED: 1 near tie, 1 fail; 3 points not reached because of near ties; "
        "14 comparisons of 0 rows in 2.0 s"
    ) == closing_line(GateResult([tie, fail]), 2)
    assert "1 point not reached" in closing_line(
        GateResult([result("y", "round", Verdict.NEAR_TIE, blocked=1)]), 2
    )
    assert "\ngate passed: 1 pass; 7 comparisons of 0 rows in 2.0 s" == closing_line(
        GateResult([result("y", "round")]), 2
    )


def test_a_gate_of_near_ties_alone_says_why_it_fails() -> None:
    tie = replace(result("y", "round", Verdict.NEAR_TIE), not_checked=2)

    line = closing_line(GateResult([tie]), 2)
    one = closing_line(GateResult([replace(tie, not_checked=1)]), 2)

    assert line.startswith(
        "\ngate FAILED: nothing was firmly asserted, as every case is a near tie, blocked or "
        "unsupported; judge more cases, or show expert_ids: 1 near tie; 2 near ties not checked; "
    )
    assert "; 1 near tie not checked; " in one
