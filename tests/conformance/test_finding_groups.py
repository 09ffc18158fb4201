"""One fault is one finding, whatever the number of cases that show it; two faults are two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kdtr.conformance import Finding, GateResult, Verdict
from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.finding import Place
from kdtr.conformance.finding_groups import Group, grouped, without_numbers

Judge = Callable[..., GateResult]


def finding(
    case: str,
    *hints: str,
    mode: str = "stepwise",
    stage: str = "logits",
    rules: tuple[str, ...] = ("FWD-4",),
    verdict: Verdict = Verdict.FAIL,
    summary: str = "3 of 9 differ",
    n_rows: int = 1,
    bundle: str = "b.kdtr",
    fit: float = 1.0,
) -> Finding:
    looks_like = tuple(Hint(says, fit=fit) for says in hints)
    place = Place(bundle, case, mode, "round0")
    return Finding(
        verdict, place, stage, summary, rules=rules, looks_like=looks_like, n_rows=n_rows
    )


def cases(findings: list[Finding]) -> list[list[str]]:
    return [[one.place.case for one in group.findings] for group in grouped(findings)]


def test_numbers_are_the_case_s_and_not_the_fault_s() -> None:
    assert "the root is at L - # = #, path #" == without_numbers(
        "the root is at L - 1 = 12, path 0-2-3"
    )
    assert "rows # of # (slots #) are times #" == without_numbers(
        "rows 1, 2 and 5 of 7 (slots 3..4) are times -1.5e-3"
    )
    assert "bfloat16 or float32" == without_numbers("bfloat16 or float32")


def test_what_looks_alike_is_one_whatever_the_stage_the_simplest_first() -> None:
    one = finding("late", "L is taken as 5", n_rows=9)
    other = finding("early", "L is taken as 13", n_rows=4, stage="mask", rules=("MASK-1",))

    assert [["early", "late"]] == cases([one, other])


def test_what_looks_otherwise_is_another() -> None:
    assert [["a"], ["b"]] == cases([finding("a", "it leaks"), finding("b", "it is scaled")])
    assert [["a"], ["b"]] == cases([finding("a", "it leaks"), finding("b")])


def test_a_shared_explanation_must_be_shared_by_all() -> None:
    """b and c are explained by the first finding's hints, and by none in common."""
    both = finding("a", "it leaks", "it is scaled")

    assert [["a", "b"], ["c"]] == cases(
        [both, finding("b", "it leaks"), finding("c", "it is scaled")]
    )


def test_without_an_explanation_stage_and_rule_decide() -> None:
    plain = finding("a", summary="1 of 4 differ")

    assert [["a", "b"]] == cases([plain, finding("b", summary="7 of 9 differ")])
    assert [["a"], ["b"]] == cases([plain, finding("b", stage="targets")])
    assert [["a"], ["b"]] == cases([plain, finding("b", rules=("LOSSLESS",))])
    weak = [finding(case, f"only row {case} differs", fit=0.5) for case in "ab"]
    assert [["a", "b"]] == cases(weak)


def test_verdicts_are_not_mixed() -> None:
    tie = finding("a", verdict=Verdict.NEAR_TIE)

    assert [["b"], ["a"]] == cases([tie, finding("b")])


def test_errors_go_by_their_words() -> None:
    def error(case: str, text: str) -> Finding:
        return finding(case, verdict=Verdict.ERROR, stage="answer", rules=(), summary=text)

    assert [["a", "c"], ["b"]] == cases(
        [error("a", "no slot 7"), error("b", "no stream"), error("c", "no slot 12")]
    )


def test_findings_of_an_x_ray_and_of_the_script_are_one_only_if_they_say_the_same() -> None:
    x_rays = [finding("k2", mode="x-ray", summary=text) for text in ("row saw", "row turned")]
    scripts = [finding("state", mode="script", bundle=b, summary="raised") for b in ("a", "b")]

    assert [2, 1, 1] == sorted((len(g.findings) for g in grouped(x_rays + scripts)), reverse=True)


def test_what_round_gets_wrong_is_not_told_again_for_shipped() -> None:
    traced = finding("a", "it leaks", mode="round")
    shipped = finding("a", mode="shipped", stage="path", rules=("ACC-1",))

    (group,) = grouped([traced, shipped])

    assert ["round", "shipped"] == group.modes()
    assert [] == group.also_in()
    assert 2 == len(grouped([shipped, finding("b", "it leaks", mode="round")]))


def test_other_cases_are_named_once_and_with_their_bundle_where_there_are_several() -> None:
    here = [finding(case, "x", mode=mode) for case in "abc" for mode in ("stepwise", "round")]
    there = finding("a", "x", bundle="dir/other.kdtr", n_rows=2)

    assert ["b", "c"] == grouped(here)[0].also_in()
    assert ["b/b", "b/c", "other/a"] == grouped([*here, there])[0].also_in()


def test_a_case_speaks_against_an_explanation_that_does_not_fit_it() -> None:
    first, other = finding("a", "it leaks", "it is causal"), finding("b", "it leaks")
    group = Group([first, other])

    assert [] == group.against(first.looks_like[0])
    assert [other] == group.against(first.looks_like[1])


def test_a_case_with_as_many_explanations_as_are_told_speaks_against_none() -> None:
    """More may have fitted than the three that a finding keeps."""
    first = finding("a", "it leaks")
    group = Group([first, finding("b", "one", "two", "three")])

    assert [] == group.against(first.looks_like[0])


@pytest.mark.parametrize("fault", ["sibling_visible", "no_compaction", "position_by_index"])
def test_a_planted_fault_is_one_finding_over_cases_and_modes(
    judge: Judge, tiny: Path, fault: str
) -> None:
    gate = judge("planted_faults:make_engine", tiny, "y-tree", "star", "ar", fault=fault)

    (group,) = grouped(gate.findings)
    assert ("y-tree", ["star"]) == (group.first.place.case, group.also_in())
    assert {"stepwise", "round", "shipped"} <= set(group.modes())
    assert len(gate.findings) == len(group.findings) >= 6  # all are kept
