"""Runs to report: one made by hand with a finding of every kind, and one of six planted faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import (
    CaseResult,
    Compared,
    Finding,
    GateResult,
    Selection,
    Verdict,
    load_engine,
    run_gate,
)
from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.excerpt import Excerpt, RowFare
from kdtr.conformance.finding import Excuse, Place
from kdtr.conformance.report_files.run import BundleSum, Header, Run
from kdtr.contract import EngineInfo, NumericProfile

EXAMPLES = Path(__file__).resolve().parents[3] / "docs/examples/python"
SIX = ("all-moe", "half-split", "latent-eps", "no-q-lora", "softmax", "yarn")

INFO = EngineInfo(
    "mine", "1.2", "cpu", NumericProfile(), frozenset({"prefill", "verify", "commit"})
)
HEADER = Header(
    engine="my_engine:make",
    command="kdtr gate b.kdtr --engine my_engine:make",
    started="2026-01-31T12:00:00Z",
    seconds=1.5,
    versions=(("rules", "1"), ("kdtr", "0.1.0")),
    bundles=(BundleSum("b.kdtr", 9, "ab" * 32),),
)
DRAWING = Drawing(
    tokens=(9, 8, 7, 6),
    parents=(-1, 0, 0, 2),
    positions=(5, 6, 6, 7),
    mask=np.tril(np.ones((4, 9), dtype=bool), k=5),
    path=(0, 2, 3),
    rows=(2, 3),
    shown_positions=(5, 6, 7, 8),
    shown_mask=None,
    slots=(5, 6, 7, 8),
    shown_slots=(5, 6, 7, 8),
)
EXCERPT = Excerpt(
    where="row 2, head 1",
    axis="slot",
    columns=(3, 4, 5),
    at=4,
    length=9,
    expected=(0.5, 0.25, float("-inf")),
    actual=(0.5, 0.75, float("-inf")),
    bound=0.01,
    rows=(RowFare("row 0", 0, 0.5), RowFare("row 1", 2, 50.0)),
)


def finding(case: str = "y", mode: str = "round", **fields: Any) -> Finding:
    """A wrong position, but for what `fields` say."""
    made = Finding(
        Verdict.FAIL,
        Place("b.kdtr", case, mode, "round0"),
        "positions",
        "2 of 4 differ",
        where="row 2 (path 0-2)",
        expected="6",
        actual="7",
        rules=("POS-1", "FWD-1"),
        looks_like=(Hint("positions are L + index", ("POS-1",)),),
        reproduce=f"kdtr gate b.kdtr --engine my_engine:make --case {case} --mode {mode}",
        n_rows=4,
        drawing=DRAWING,
        excerpt=EXCERPT,
    )
    return replace(made, **fields)


def result(case: str, mode: str, verdict: Verdict = Verdict.PASS, **fields: Any) -> CaseResult:
    fields.setdefault("comparisons", 7)
    return CaseResult("b.kdtr", case, mode, verdict, **fields)


def every_kind() -> GateResult:
    """A pass, a near tie, a failure, an error, a blocked and an unsupported case."""
    tie = finding(
        "tie", verdict=Verdict.NEAR_TIE, summary="a near tie", rules=("NUM-2",), looks_like=(),
        drawing=None, excerpt=None, stage="targets",
    )  # fmt: skip
    error = finding(
        "loud", verdict=Verdict.ERROR, stage="answer", summary="the engine raised KeyError: 'x'",
        where="", expected="", actual="", rules=(), looks_like=(), drawing=None, excerpt=None,
    )  # fmt: skip
    compared = [
        Compared("chunk0", "positions", None, 4, None, True),
        Compared("chunk0", "scores", 1, 4, 0.25, True),
        Compared("round0", "logits", None, 4, float("inf"), False),
    ]
    return GateResult(
        [
            result("ar", "stepwise", compared=compared, headroom=0.25, unshown={"scores", "mask"}),
            result("tie", "round", Verdict.NEAR_TIE, findings=[tie], not_checked=2),
            result("y", "round", Verdict.FAIL, findings=[finding()], blocked=3),
            result("loud", "round", Verdict.ERROR, findings=[error]),
            result("late", "round", Verdict.BLOCKED, blocked_by="y / round", comparisons=0),
            result("ar", "decode", Verdict.UNSUPPORTED, unshown={"decode()"}, comparisons=0),
        ]
    )


@pytest.fixture
def run() -> Run:
    """One with a result of every kind, by hand."""
    return Run(HEADER, INFO, every_kind())


@pytest.fixture
def run_of() -> Callable[..., Run]:
    """run_of(finding, ...): a run in which each is the finding of a case."""

    def run_of(*findings: Finding) -> Run:
        results = [
            result(one.place.case, one.place.mode, one.verdict, findings=[one]) for one in findings
        ]
        return Run(HEADER, INFO, GateResult(results))

    return run_of


@pytest.fixture
def excused(run_of: Callable[..., Run]) -> Run:
    """A run whose one failure is expected."""
    excuse = Excuse("e1", "a known gap", "https://x.test/7")
    return run_of(finding(verdict=Verdict.EXCUSED, excuse=excuse))


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>&amp;\"'`]]>--> | **x** [y](javascript:z)"
    "\x1b[2J\x00\x07\u202e\ud800\n::error::planted\n# heading"
)


@pytest.fixture
def hostile(run_of: Callable[..., Run]) -> Run:
    """A run whose engine writes markup, commands and control characters wherever it can."""
    info = replace(INFO, name=HOSTILE, version=HOSTILE, device=HOSTILE)
    raised = finding(
        summary=HOSTILE, where=HOSTILE, expected=HOSTILE, actual=HOSTILE, blame=HOSTILE,
        next_step=HOSTILE, looks_like=(Hint(HOSTILE, ("POS-1",)),), reproduce=f"kdtr {HOSTILE}",
    )  # fmt: skip
    return replace(run_of(raised), info=replace(info, conventions={HOSTILE: HOSTILE}))


@pytest.fixture(scope="session")
def six_faults(corpus: Path) -> Run:
    """The example of the docs: six models, each with another fault."""
    sys.path.append(str(EXAMPLES))
    engine = load_engine("six_faults:make_engine")
    bundles = [str(corpus / f"{name}.kdtr") for name in SIX]
    modes = frozenset({"stepwise", "round", "shipped"})
    gate = run_gate(
        engine,
        bundles,
        engine_name="six_faults:make_engine",
        selection=Selection(modes=modes),
    )
    return Run(HEADER, engine.info, gate)
