"""Judging one case in one mode: stage by stage, in order, up to the first divergence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.compare import (
    Comparison,
    Difference,
    compare_exact,
    compare_form,
    compare_numeric,
    coordinates,
)
from kdtr.conformance.drive import Driver, Mode, Pin
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.near_tie import Decisions, unseen_choice
from kdtr.conformance.observe import Observation
from kdtr.conformance.raised import RAISED, origin, shortened, told
from kdtr.conformance.tolerance import row_bound
from kdtr.contract import (
    Acceptance,
    EngineError,
    EngineInfo,
    Model,
    ModelConfig,
    Source,
    Stage,
    stage_order,
)

_DOWNSTREAM = (Source.WALK, Source.COMMIT)  # what a choice of experts may change


def judge_case(
    bundle: str,
    model: Model,
    info: EngineInfo,
    config: ModelConfig,
    case: GoldenCase,
    mode: Mode,
    until: str | None = None,
) -> CaseResult:
    """Drive a session of `model` through the case and compare all that it shows.

    until  the last point to run, for example "round2"; None: all
    The first divergence ends the case: what follows it is consequence, counted as blocked.
    """
    result = CaseResult(bundle, case.inputs.alias, mode.name)
    missing = sorted(mode.verbs - info.verbs)
    if case.inputs.root is not None and "set_root" not in info.verbs:
        missing.append("set_root")
    if missing:
        result.verdict = Verdict.UNSUPPORTED
        result.unshown.update(f"{verb}()" for verb in missing)
        return result
    points = case.inputs.points()
    if until is not None and until in points:
        points = points[: points.index(until) + 1]
    judge = _CaseJudge(result, info, config, case, mode)
    try:
        session = model.open(max_len=case.inputs.max_len)
    except RAISED as error:
        judge.report_error("open", "open", error)
        result.blocked = len(points)
        return result
    try:
        if case.inputs.root is not None:
            session.set_root(case.inputs.root)
        driver = Driver(session, info, config, traces=mode.traces)
        for number, point in enumerate(points):
            goes_on = judge.point(driver, point)
            result.points += 1
            if not goes_on:
                result.blocked = len(points) - number - 1
                break
    except RAISED as error:
        judge.report_error("open", "set_root", error)
        result.blocked = len(points)
    finally:
        _close(session, judge)
    return result


class _CaseJudge:
    def __init__(
        self,
        result: CaseResult,
        info: EngineInfo,
        config: ModelConfig,
        case: GoldenCase,
        mode: Mode,
    ) -> None:
        self._result = result
        self._info = info
        self._config = config
        self._case = case
        self._mode = mode
        self._unseen: str | None = None  # a thin choice of experts that was not shown

    def point(self, driver: Driver, point: str) -> bool:
        """Drive and judge one chunk or round; whether the case goes on."""
        expectation = self._case.expectation(point)
        seen = Observation(self._config.num_hidden_layers)
        error: BaseException | None = None
        try:
            self._drive(driver, point, expectation, seen)
        except RAISED as raised:  # an engine may raise anything
            error = raised
        # What was shown before the error is judged first: it may name the cause.
        goes_on = self._compare(point, expectation, seen, complete=error is None)
        if not goes_on:
            return False
        error = error or seen.fault
        if error is not None:
            self.report_error(point, "answer", error)
            return False
        return True

    def report_error(self, point: str, stage: str, error: BaseException) -> None:
        place = origin(error)
        if isinstance(error, EngineError) and not place:  # the judge's own word on an answer
            summary = shortened(str(error))
        else:
            summary = f"the engine raised {told(error)}" + (f" (at {place})" if place else "")
        self._add(Finding(Verdict.ERROR, self._place(point), stage, summary))

    def _drive(
        self, driver: Driver, point: str, expectation: Expectation, seen: Observation
    ) -> None:
        inputs, i = self._case.inputs, int(point.removeprefix("chunk").removeprefix("round"))
        pin = _pin(expectation, is_chunk=point.startswith("chunk"))
        if point.startswith("chunk"):
            self._mode.drive_chunk(driver, inputs.chunks[i], pin, seen)
        else:
            self._mode.drive_round(driver, inputs.rounds[i], pin, seen)

    def _compare(
        self, point: str, expectation: Expectation, seen: Observation, *, complete: bool
    ) -> bool:
        """Stage by stage; whether the case goes on. A near tie hides what depends on it."""
        hidden_by_tie: set[Source] = set()
        seen.sort_experts()
        if not any(name == "expert_ids" for name, _ in seen.arrays):
            self._unseen = self._unseen or unseen_choice(
                expectation, self._config, self._info.profile
            )
        for stage, layer in stage_order(self._config.num_hidden_layers):
            expected = _expected(expectation, stage, layer)
            if expected is None or self._mode.hides(stage) or stage.source in hidden_by_tie:
                continue
            actual = seen.arrays.get((stage.name, layer))
            if actual is None:
                if complete and not self._unshown(point, stage, layer):
                    return False
                continue
            finding = self._compare_stage(point, expectation, stage, layer, expected, actual, seen)
            if finding is None:
                continue
            self._add(finding)
            if finding.verdict is not Verdict.NEAR_TIE:
                return False
            if stage.source is Source.LAYER:  # other experts: all that follows may differ
                return False
            hidden_by_tie.add(Source.WALK)
            if not self._pins(point):
                return False
        return True

    def _compare_stage(
        self,
        point: str,
        expectation: Expectation,
        stage: Stage,
        layer: int | None,
        expected: np.ndarray,
        actual: np.ndarray,
        seen: Observation,
    ) -> Finding | None:
        difference = compare_form(stage, expected, actual)
        if difference is not None:
            where = "" if layer is None else f"layer {layer}"
        else:
            comparison = self._compare_values(stage, layer, expected, actual)
            difference = comparison.difference
            if difference is None:
                return None
            parents = expectation.get("parents")
            nodes = None if parents is None else tuple(int(p) for p in parents)
            where = coordinates(stage, layer, difference.index, nodes)
        finding = self._finding(point, stage, difference, where)
        if self._unseen and (stage.source in _DOWNSTREAM or stage.name == "logits"):
            return replace(finding, verdict=Verdict.NEAR_TIE, summary=self._unseen)
        if actual.dtype.kind not in "iu" or actual.ndim != expected.ndim:
            return finding
        bonus = seen.arrays.get(("bonus", None))
        decisions = Decisions(
            expectation,
            self._config,
            self._info.profile,
            logits=seen.arrays.get(("logits", None)),
            bonus=None if bonus is None else int(bonus),
            router_scores={
                at: array
                for (name, at), array in seen.arrays.items()
                if name == "router_scores" and at is not None
            },
        )
        tie = decisions.near_tie(stage, layer, expected, actual)
        return finding if tie is None else replace(finding, verdict=Verdict.NEAR_TIE, summary=tie)

    def _compare_values(
        self, stage: Stage, layer: int | None, expected: np.ndarray, actual: np.ndarray
    ) -> Comparison:
        if stage.exact:
            comparison = compare_exact(expected, actual)
        else:
            bound = row_bound(stage, layer, expected, self._config, self._info.profile)
            comparison = compare_numeric(expected, actual, bound, stage.row_axes)
        self._count(stage, expected, comparison)
        return comparison

    def _pins(self, point: str) -> bool:
        """Whether the session holds golden history after this point, whatever it decided."""
        by_prefill = point.startswith("chunk") and "prefill" in self._mode.verbs
        return self._mode.pinned and (not by_prefill or "set_root" in self._info.verbs)

    def _unshown(self, point: str, stage: Stage, layer: int | None) -> bool:
        """Note a stage that was not shown; whether that is honest."""
        traced = stage.source in (Source.FORWARD, Source.LAYER) or (
            stage.source is Source.WALK and not self._mode.pinned
        )
        if traced and stage.name in self._info.stages:
            where = "" if layer is None else f" of layer {layer}"
            text = f"the engine declares the stage {stage.name}, but did not show it{where}"
            self.report_error(point, stage.name, EngineError(text))
            return False
        self._result.unshown.add(stage.name)
        return True

    def _count(self, stage: Stage, expected: np.ndarray, comparison: Comparison) -> None:
        self._result.comparisons += 1
        self._result.rows += int(np.prod(expected.shape[: stage.row_axes], dtype=int))
        if comparison.headroom is not None:
            self._result.saw(comparison.headroom)

    def _finding(self, point: str, stage: Stage, difference: Difference, where: str) -> Finding:
        return Finding(
            Verdict.FAIL,
            self._place(point),
            stage.name,
            difference.summary,
            where,
            difference.expected,
            difference.actual,
            stage.rules,
        )

    def _place(self, point: str) -> Place:
        return Place(self._result.bundle, self._result.case, self._result.mode, point)

    def _add(self, finding: Finding) -> None:
        self._result.findings.append(finding)
        weight = list(Verdict).index
        self._result.verdict = max(self._result.verdict, finding.verdict, key=weight)


def _expected(expectation: Expectation, stage: Stage, layer: int | None) -> np.ndarray | None:
    if stage.source is not Source.JUDGE:
        return expectation.get(stage.name, layer)
    slots, path = expectation.get("slots"), expectation.get("path")
    assert slots is not None
    before = int(slots[0])  # rows committed before this point
    if stage.name == "untouched":
        return np.ones(before, dtype=bool) if before else None
    return np.ones(len(slots) if path is None else len(path), dtype=bool)


def _pin(expectation: Expectation, *, is_chunk: bool) -> Pin:
    positions, mask = expectation.get("positions"), expectation.get("mask")
    root = expectation.get("root")
    assert positions is not None
    assert mask is not None
    assert root is not None
    path = expectation.get("path")
    nodes = tuple(range(len(positions))) if is_chunk or path is None else tuple(path.tolist())
    return Pin(Acceptance(nodes, int(root)), positions, mask)


def _close(session: object, judge: _CaseJudge) -> None:
    try:
        session.close()  # type: ignore[attr-defined]
    except RAISED as error:
        judge.report_error("close", "close", error)
