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
from kdtr.conformance.diagnosis import diagnose
from kdtr.conformance.diagnosis_scene import Hint, Key, Scene
from kdtr.conformance.drive import Driver, Mode, Pin
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.near_tie import Decisions, thin_choices
from kdtr.conformance.noise_floor import CaseNoise
from kdtr.conformance.observe import Observation
from kdtr.conformance.raised import RAISED, origin, shortened, told
from kdtr.conformance.taint import Taint
from kdtr.contract import (
    NO_LIMIT,
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
    noise: CaseNoise,
    mode: Mode,
    until: str | None = None,
) -> CaseResult:
    """Drive a session of `model` through the case and compare all that it shows.

    noise  what rounding alone may do to the case at the engine's profile
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
    judge = _CaseJudge(result, info, config, case, noise, mode)
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
        noise: CaseNoise,
        mode: Mode,
    ) -> None:
        self._result = result
        self._info = info
        self._config = config
        self._case = case
        self._noise = noise
        self._mode = mode
        self._why = ""  # of the thin choice that was suspected last
        self._suspect_since: int | None = None  # the layer from which the cache may differ
        self._before: dict[Key, np.ndarray] = {}  # what was seen at the point before

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
        taint = self._taint(expectation)
        for stage, layer in stage_order(self._config.num_hidden_layers):
            taint.enter(stage, layer)
            if stage.name == "expert_ids" and (stage.name, layer) not in seen.arrays:
                self._suspect(point, expectation, layer, taint)
            expected = _expected(expectation, stage, layer)
            if expected is None or self._mode.hides(stage) or stage.source in hidden_by_tie:
                continue
            if stage.source in _DOWNSTREAM and taint.decides_moved and not self._mode.pinned:
                continue
            actual = seen.arrays.get((stage.name, layer))
            if actual is None:
                if complete and not self._unshown(point, stage, layer):
                    return False
                continue
            finding = self._compare_stage(
                point, expectation, stage, layer, expected, actual, seen, taint
            )
            if finding is None:
                continue
            if finding.verdict is Verdict.FAIL:
                judged = taint.judged(stage, expected, actual, suspects=False)
                scene = self._scene(
                    point, expectation, stage, layer, actual if judged is None else judged, seen
                )
                finding = replace(finding, looks_like=_hints(scene))
            self._add(finding)
            if finding.verdict is not Verdict.NEAR_TIE:
                return False
            if stage.source in (Source.LAYER, Source.FORWARD):
                continue  # other experts: what follows from them is left out, row by row
            hidden_by_tie.add(Source.WALK)
            if not self._pins(point):
                return False
        self._result.excused_rows += taint.n_moved
        self._suspect_since = taint.commits_suspect_since
        self._before = seen.arrays
        return not (taint.commits_moved or (taint.decides_moved and not self._mode.pinned))

    def _scene(
        self,
        point: str,
        expectation: Expectation,
        stage: Stage,
        layer: int | None,
        actual: np.ndarray,
        seen: Observation,
    ) -> Scene:
        """The divergence as a diagnosis looks at it."""
        expected = _expected(expectation, stage, layer)
        assert expected is not None
        inputs = self._case.inputs
        points = inputs.points()
        i = points.index(point) - len(inputs.chunks)
        return Scene(
            stage,
            layer,
            expected,
            actual,
            expectation,
            self._config,
            None if stage.exact else self._noise.point(point).bound(stage, layer, expected),
            tuple(self._case.expectation(one) for one in points[: points.index(point)]),
            seen.arrays,
            self._before,
            inputs.rounds[i].limit if i >= 0 else NO_LIMIT,
        )

    def _taint(self, expectation: Expectation) -> Taint:
        mask = expectation.get("mask")
        assert mask is not None
        layers = self._config.num_hidden_layers
        return Taint(layers, mask, expectation.get("path"), self._suspect_since)

    def _suspect(
        self, point: str, expectation: Expectation, layer: int | None, taint: Taint
    ) -> None:
        """The engine does not show this layer's choice: where it is thin, it may be another."""
        assert layer is not None
        if expectation.get("router_scores", layer) is None:
            return
        thin, why = thin_choices(expectation, layer, self._noise.point(point))
        if thin.any():
            taint.suspect(thin, layer)
            self._why = why

    def _compare_stage(
        self,
        point: str,
        expectation: Expectation,
        stage: Stage,
        layer: int | None,
        expected: np.ndarray,
        actual: np.ndarray,
        seen: Observation,
        taint: Taint,
    ) -> Finding | None:
        """The stage's first difference: of the rows that are firm, then of the suspects."""
        difference = compare_form(stage, expected, actual)
        if difference is not None:
            where = "" if layer is None else f"layer {layer}"
            return self._finding(point, stage, difference, where)
        judged = taint.judged(stage, expected, actual, suspects=False)
        if judged is not None:
            difference = self._compare_values(point, stage, layer, expected, judged).difference
            if difference is not None:
                where = self._where(expectation, stage, layer, difference)
                finding = self._finding(point, stage, difference, where)
                tie = self._near_tie(point, expectation, stage, layer, expected, judged, seen)
                if tie is None:
                    return finding
                if stage.name == "expert_ids":
                    assert layer is not None
                    taint.choose((expected != judged).any(axis=1), layer)
                return replace(finding, verdict=Verdict.NEAR_TIE, summary=tie)
        suspects = taint.judged(stage, expected, actual, suspects=True)
        if suspects is None:
            return None
        difference = self._compare_values(point, stage, layer, expected, suspects).difference
        if difference is None:
            return None
        where = self._where(expectation, stage, layer, difference)
        taint.give_up()
        finding = self._finding(point, stage, difference, where)
        return replace(finding, verdict=Verdict.NEAR_TIE, summary=self._why)

    def _where(
        self, expectation: Expectation, stage: Stage, layer: int | None, difference: Difference
    ) -> str:
        parents = expectation.get("parents")
        nodes = None if parents is None else tuple(int(p) for p in parents)
        return coordinates(stage, layer, difference.index, nodes)

    def _near_tie(
        self,
        point: str,
        expectation: Expectation,
        stage: Stage,
        layer: int | None,
        expected: np.ndarray,
        actual: np.ndarray,
        seen: Observation,
    ) -> str | None:
        if actual.dtype.kind not in "iu" or actual.ndim != expected.ndim:
            return None
        bonus = seen.arrays.get(("bonus", None))
        decisions = Decisions(
            expectation,
            self._config,
            self._info.profile,
            self._noise.point(point),
            logits=seen.arrays.get(("logits", None)),
            bonus=None if bonus is None else int(bonus),
            router_scores={
                at: array
                for (name, at), array in seen.arrays.items()
                if name == "router_scores" and at is not None
            },
        )
        return decisions.near_tie(stage, layer, expected, actual)

    def _compare_values(
        self,
        point: str,
        stage: Stage,
        layer: int | None,
        expected: np.ndarray,
        actual: np.ndarray,
    ) -> Comparison:
        if stage.exact:
            comparison = compare_exact(expected, actual)
        else:
            bound = self._noise.point(point).bound(stage, layer, expected)
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


def _hints(scene: Scene) -> tuple[Hint, ...]:
    """A diagnosis is a help, and never in the way of the finding itself."""
    try:
        return diagnose(scene)
    except RAISED as error:
        return (Hint(f"no diagnosis: it raised {told(error)}", fit=0.0),)


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
