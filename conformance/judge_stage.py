"""Comparing one stage at one point: what differs, whether it may, and why it looks so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from kdtr.conformance.alternatives import Alternatives
from kdtr.conformance.alternatives_fit import ShownPoint
from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.compare import (
    Comparison,
    Difference,
    compare_exact,
    compare_form,
    compare_numeric,
    coordinates,
)
from kdtr.conformance.diagnosis import diagnose
from kdtr.conformance.diagnosis_scene import Hint, Key, Scene
from kdtr.conformance.excerpt import excerpt
from kdtr.conformance.finding import CaseResult, Compared, Finding, Place, Verdict
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.taint import Taint
from kdtr.contract import NO_LIMIT, ModelConfig, Source, Stage


def place_of(result: CaseResult, point: str) -> Place:
    """A point of the case and mode that the result is of."""
    return Place(result.bundle, result.case, result.mode, point)


@dataclass(frozen=True, slots=True, eq=False)
class At:
    """A stage that is compared: what was shown at its point, and the truth of the point.

    before  what was shown at the point before
    """

    shown: ShownPoint
    expectation: Expectation
    stage: Stage
    layer: int | None
    expected: np.ndarray
    actual: np.ndarray
    before: Mapping[Key, np.ndarray]

    def bound(self) -> np.ndarray | None:
        """The largest honest error of each row; None: compared exactly."""
        if self.stage.exact:
            return None
        return self.shown.noise.bound(self.stage, self.layer, self.expected)


class StageJudge:
    """Compares the stages of one case in one mode, and counts that in its result."""

    def __init__(
        self,
        result: CaseResult,
        config: ModelConfig,
        case: GoldenCase,
        alternatives: Alternatives,
    ) -> None:
        self._result = result
        self._config = config
        self._case = case
        self._alternatives = alternatives

    def compare(self, at: At, taint: Taint) -> Finding | None:
        """The stage's first difference: of the rows that are firm, then of the suspects."""
        stage, expected, actual = at.stage, at.expected, at.actual
        difference = compare_form(expected, actual)
        walk = stage.source is Source.WALK and actual.ndim == expected.ndim
        if difference is not None and not walk:
            return self._diagnosed(self._finding(at, difference, actual), at, actual)
        tied: Finding | None = None
        for suspects in (False, True):
            judged = taint.judged(stage, expected, actual, suspects=suspects)
            if judged is None:
                continue
            found = difference or self._compare_values(at, judged).difference
            if found is None:
                continue
            finding = self._finding(at, found, judged)
            decisions = at.shown.decisions(at.expectation)
            tie = decisions.near_tie(stage, at.layer, expected, judged)
            if tie is not None:
                if stage.name == "expert_ids":
                    self._take(at, judged)
                tied = tied or replace(finding, verdict=Verdict.NEAR_TIE, summary=tie)
                continue
            if suspects:
                finding = self._searched(finding, taint)
            if finding.verdict is Verdict.FAIL:
                return self._diagnosed(finding, at, judged)
            return finding
        return tied

    def _take(self, at: At, ids: np.ndarray) -> None:
        """The engine shows that it chose otherwise, as it may: that is known, and no suspicion."""
        assert at.layer is not None
        rows = np.flatnonzero((at.expected != ids).any(axis=1)).tolist()
        chosen = {row: tuple(ids[row].tolist()) for row in rows}
        self._alternatives.take(at.shown.point, at.layer, chosen)

    def _searched(self, finding: Finding, taint: Taint) -> Finding:
        """A difference that an unseen choice of experts may explain: whether one does."""
        answer = self._alternatives.search()
        if answer.found:
            return replace(finding, verdict=Verdict.NEAR_TIE, summary=str(answer))
        if answer.checked:
            return replace(finding, summary=f"{finding.summary}; {answer}")
        taint.give_up()
        self._result.not_checked += 1
        return replace(finding, verdict=Verdict.NEAR_TIE, summary=str(answer))

    def _diagnosed(self, finding: Finding, at: At, judged: np.ndarray) -> Finding:
        return replace(finding, looks_like=_hints(self._scene(at, judged)))

    def _compare_values(self, at: At, judged: np.ndarray) -> Comparison:
        bound = at.bound()
        if bound is None:
            comparison = compare_exact(at.expected, judged)
        else:
            comparison = compare_numeric(at.expected, judged, bound, at.stage.row_axes)
        self._count(at, comparison)
        return comparison

    def _scene(self, at: At, judged: np.ndarray) -> Scene:
        """The divergence as a diagnosis looks at it."""
        inputs, point = self._case.inputs, at.shown.point
        points = inputs.points()
        i = points.index(point) - len(inputs.chunks)
        return Scene(
            at.stage,
            at.layer,
            at.expected,
            judged,
            at.expectation,
            self._config,
            at.bound(),
            tuple(self._alternatives.expectation(one) for one in points[: points.index(point)]),
            dict(at.shown.arrays),
            at.before,
            inputs.rounds[i].limit if i >= 0 else NO_LIMIT,
        )

    def _count(self, at: At, comparison: Comparison) -> None:
        rows = int(np.prod(at.expected.shape[: at.stage.row_axes], dtype=int))
        self._result.comparisons += 1
        self._result.rows += rows
        if comparison.headroom is not None:
            self._result.saw(comparison.headroom)
        same, headroom = comparison.difference is None, comparison.headroom
        self._result.compared.append(
            Compared(at.shown.point, at.stage.name, at.layer, rows, headroom, same)
        )

    def _finding(self, at: At, difference: Difference, judged: np.ndarray) -> Finding:
        parents = at.expectation.get("parents")
        nodes = None if parents is None else tuple(int(p) for p in parents)
        where = "" if at.layer is None else f"layer {at.layer}"
        if len(difference.index) == len(at.stage.axes):
            where = coordinates(at.stage, at.layer, difference.index, nodes)
        return Finding(
            Verdict.FAIL,
            place_of(self._result, at.shown.point),
            at.stage.name,
            difference.summary,
            where,
            difference.expected,
            difference.actual,
            at.stage.rules,
            excerpt=excerpt(at.stage, at.expected, judged, difference, at.bound()),
        )


def _hints(scene: Scene) -> tuple[Hint, ...]:
    """A diagnosis is a help, and never in the way of the finding itself.

    An engine may show numbers at the end of the range: guesses that overflow fit nothing.
    """
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return diagnose(scene)
    except RAISED as error:
        return (Hint(f"no diagnosis: it raised {told(error)}", fit=0.0),)
