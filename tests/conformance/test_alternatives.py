"""An unseen choice of experts excuses what follows from it, and no more (NUM-2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from planted_faults import make_engine, make_swapped_experts

from kdtr.conformance import CaseResult, GateResult, Verdict, alternatives_search, load_engine
from kdtr.conformance.alternatives import Answer
from kdtr.conformance.alternatives_search import ThinChoice
from kdtr.conformance.case import CasePlan, Planted

Judge = Callable[..., GateResult]
PLAN = CasePlan(
    "ties", "thin", ("NUM-2",), (Planted((-1, 0, 0, 2), (0, 2, 3)), Planted((-1,))), ((3, 0, 7),)
)


@pytest.fixture(scope="module")
def thin_experts(record: Callable[..., Path], small_model: SimpleNamespace) -> Path:
    """Experts 2i and 2i + 1 score alike, to within a float32 rounding or two."""
    weights = dict(small_model.weights)
    for name in weights:
        if name.endswith("mlp.gate.weight"):
            gate = weights[name].astype(np.float32)
            gate[1::2] = gate[::2] * np.float32(1 + 2.0**-22)
            weights[name] = gate
        if name.endswith("e_score_correction_bias"):
            weights[name] = np.repeat(weights[name][::2], 2)
    return record([PLAN], weights=weights)


def logits_only(engine: Any, *without: str) -> Any:
    info = replace(engine.info, stages=frozenset(), verbs=engine.info.verbs - {*without})
    return SimpleNamespace(info=info, load=engine.load)


def stepwise(gate: GateResult) -> CaseResult:
    return next(result for result in gate.results if result.mode == "stepwise")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_choices_that_are_not_shown_are_found_and_told(
    judge: Judge, thin_experts: Path, dtype: str
) -> None:
    gate = judge(logits_only(make_swapped_experts(dtype)), thin_experts)

    assert gate.passed
    result = stepwise(gate)
    assert Verdict.NEAR_TIE is result.verdict
    assert (3, 0, 0) == (result.points, result.blocked, result.not_checked)
    assert {"logits"} == {finding.stage for finding in result.findings}
    assert result.findings[0].summary.startswith(
        "an unseen choice of experts explains it: round0, layer 1, row "
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_behind_such_choices_traded_weights_of_two_experts_fail(
    judge: Judge, thin_experts: Path, dtype: str
) -> None:
    gate = judge(logits_only(make_swapped_experts(dtype, traded=True)), thin_experts)

    assert not gate.passed
    (finding,) = stepwise(gate).findings
    assert (Verdict.FAIL, "logits") == (finding.verdict, finding.stage)
    assert " of thin choices of experts explains it" in finding.summary


# base.kdtr / page-end: in bfloat16 the host engine chooses otherwise at the thin choice of row 3 in
# layer 1 of round0, and row 3 is the one that sees a sibling too many.


def test_a_thin_row_of_the_corpus_passes_as_a_near_tie(judge: Judge, corpus: Path) -> None:
    engine = logits_only(load_engine("host", {"dtype": "bfloat16"}))

    gate = judge(engine, corpus / "base.kdtr", "page-end")

    assert gate.passed
    result = stepwise(gate)
    assert Verdict.NEAR_TIE is result.verdict
    assert 0 == result.blocked == result.not_checked
    (finding,) = result.findings
    assert (
        "an unseen choice of experts explains it: round0, layer 1, row 3 took 3, 5, 6, 7 for "
        "3, 4, 5, 6, which hangs on 0.0015, less than 0.023"
    ) == finding.summary


@pytest.mark.parametrize("fault", ["sibling_visible", "position_by_index"])
def test_and_with_a_fault_it_fails(judge: Judge, corpus: Path, fault: str) -> None:
    engine = logits_only(make_engine(fault, dtype="bfloat16"), "snapshot")

    gate = judge(engine, corpus / "base.kdtr", "page-end", modes=["stepwise"])

    assert not gate.passed
    assert [Verdict.FAIL] == [f.verdict for f in gate.findings if f.verdict.is_bad]


def test_more_outcomes_than_may_be_tried_are_not_checked_and_counted(
    judge: Judge, thin_experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives_search, "MOST_OUTCOMES", 0)

    gate = judge(logits_only(make_swapped_experts(traded=True)), thin_experts, modes=["stepwise"])

    (result,) = gate.results
    assert Verdict.NEAR_TIE is result.verdict
    assert result.not_checked
    assert result.excused_rows
    assert result.findings[0].summary.startswith("not checked: ")
    assert not gate.passed  # and nothing else was asserted
    assert gate.shortfall.startswith("nothing was firmly asserted")


def test_where_nothing_differs_no_outcome_is_computed(
    judge: Judge, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(alternatives_search.Search, "run", run)

    assert judge(logits_only(load_engine("host")), small).passed


# What is said


THIN = ThinChoice(("round0", 1, 3), (3, 4), ((3, 5),), 0.0015, 0.023)


def answer(**fields: Any) -> Answer:
    known = {"found": False, "other": (), "checked": True, "n_thin": 2, "tried": 3, "nearest": 4.25}
    return Answer(**{**known, **fields})


def test_what_was_found_is_told_choice_by_choice() -> None:
    one = "round0, layer 1, row 3 took 3, 5 for 3, 4, which hangs on 0.0015, less than 0.023"
    found = answer(found=True, other=((THIN, (3, 5)),) * 5)

    assert f"an unseen choice of experts explains it: {one}; {one}; {one}; and 2 more" == str(found)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            "none of 3 outcomes of thin choices of experts explains it, the nearest is out of "
            "bounds by 4.25 times",
        ),
        (
            {"tried": 1, "nearest": np.inf},
            "none of 1 outcome of thin choices of experts explains it",
        ),
        ({"tried": 0, "nearest": np.inf}, "no thin choice of experts explains it"),
        ({"checked": False}, "not checked: 2 thin choices of experts"),
        ({"checked": False, "n_thin": 1}, "not checked: 1 thin choice of experts"),
    ],
)
def test_what_was_not_found_is_told(fields: dict[str, Any], text: str) -> None:
    assert text == str(answer(**fields))
