"""Judging one case in one mode: stage by stage, in order, up to the first divergence."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kdtr.conformance import running
from kdtr.conformance.alternatives import Alternatives
from kdtr.conformance.alternatives_fit import ShownPoint
from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.diagnosis_scene import Key
from kdtr.conformance.drive import Driver, Mode, Pin
from kdtr.conformance.finding import CaseResult, Finding, Verdict
from kdtr.conformance.judge_stage import At, StageJudge, place_of
from kdtr.conformance.near_tie import thin_rows
from kdtr.conformance.noise_floor import CaseNoise
from kdtr.conformance.observe import AnswerError, Observation
from kdtr.conformance.raised import RAISED, in_words, told
from kdtr.conformance.taint import Taint
from kdtr.contract import (
    Acceptance,
    CacheError,
    EngineError,
    EngineInfo,
    Model,
    ModelConfig,
    Session,
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
        if not judge.begin(session):
            result.blocked = len(points)
            return result
        driver = Driver(session, info, config, traces=mode.traces)
        for number, point in enumerate(points):
            goes_on = judge.point(driver, point)
            result.points += 1
            if not goes_on:
                result.blocked = len(points) - number - 1
                break
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
        self._alternatives = Alternatives(
            config, case, noise, mode, traced=mode.traces and bool(info.stages)
        )
        self._stages = StageJudge(result, config, case, self._alternatives)
        self._suspect_since: int | None = None  # the layer from which the cache may differ
        self._before: dict[Key, np.ndarray] = {}  # what was seen at the point before

    def begin(self, session: Session) -> bool:
        """Set the root of a case without a prompt; whether the case goes on."""
        try:
            if self._case.inputs.root is not None:
                session.set_root(self._case.inputs.root)
        except RAISED as error:
            self.report_error("open", "set_root", error)
            return False
        return True

    def point(self, driver: Driver, point: str) -> bool:
        """Drive and judge one chunk or round; whether the case goes on."""
        place = place_of(self._result, point)
        running.at(place.text(Path(place.bundle).name))
        seen = Observation(self._config.num_hidden_layers)
        error: BaseException | None = None
        try:
            self._drive(driver, point, self._case.expectation(point), seen)
        except RAISED as raised:  # an engine may raise anything
            error = raised
        # What was shown before the error is judged first: it may name the cause.
        try:
            goes_on = self._compare(point, seen, complete=error is None)
        except RAISED as own:  # no verdict, and none of the engine's doing
            text = f"kdtr itself raised {told(own)} in comparing what was shown; please report it"
            self._add(Finding(Verdict.ERROR, place_of(self._result, point), "answer", text))
            return False
        if not goes_on:
            return False
        error = error or seen.fault
        if error is not None:
            self.report_error(point, "answer", error)
            return False
        return True

    def report_error(self, point: str, stage: str, error: BaseException) -> None:
        rules = _broken_by(error) if stage == "answer" else ()
        place = place_of(self._result, point)
        self._add(Finding(Verdict.ERROR, place, stage, in_words(error), rules=rules))

    def _drive(
        self, driver: Driver, point: str, expectation: Expectation, seen: Observation
    ) -> None:
        inputs, i = self._case.inputs, int(point.removeprefix("chunk").removeprefix("round"))
        pin = pin_of(expectation, is_chunk=point.startswith("chunk"))
        if point.startswith("chunk"):
            self._mode.drive_chunk(driver, inputs.chunks[i], pin, seen)
        else:
            self._mode.drive_round(driver, inputs.rounds[i], pin, seen)

    def _compare(self, point: str, seen: Observation, *, complete: bool) -> bool:
        """Stage by stage; whether the case goes on. A near tie hides what depends on it."""
        hidden_by_tie: set[Source] = set()
        seen.sort_experts()
        shown = self._shown(point, seen)
        self._alternatives.look(shown)
        expectation = self._alternatives.expectation(point)
        taint = self._taint(point, expectation)
        for stage, layer in stage_order(self._config.num_hidden_layers):
            taint.enter(stage, layer)
            if stage.name == "expert_ids" and (stage.name, layer) not in seen.arrays:
                self._suspect(shown, expectation, layer, taint)
            expected = self._expected(point, expectation, stage, layer)
            if expected is None or self._mode.hides(stage) or stage.source in hidden_by_tie:
                continue
            if stage.source in _DOWNSTREAM and taint.decides_moved and not self._mode.pinned:
                continue
            actual = seen.arrays.get((stage.name, layer))
            if actual is None:
                unfit = seen.unfit.get((stage.name, layer))
                if unfit is not None:
                    self.report_error(point, stage.name, unfit)
                    return False
                if complete and not self._unshown(point, stage, layer):
                    return False
                continue
            at = At(shown, expectation, stage, layer, expected, actual, self._before)
            finding = self._stages.compare(at, taint)
            while finding is not None and self._alternatives.expectation(point) is not expectation:
                # Other experts: what follows from them is the truth from here on.
                self._add(finding)
                expectation = self._alternatives.expectation(point)
                taint = self._taint(point, expectation)
                taint.enter(stage, layer)
                expected = self._expected(point, expectation, stage, layer)
                if expected is None:  # a cache, if the walk may be another
                    finding = None
                    break
                at = At(shown, expectation, stage, layer, expected, actual, self._before)
                finding = self._stages.compare(at, taint)
            if finding is None:
                continue
            self._add(finding)
            if finding.verdict is not Verdict.NEAR_TIE:
                return False
            if stage.source in (Source.LAYER, Source.FORWARD):
                continue  # not checked: what follows is left out, row by row
            hidden_by_tie.add(Source.WALK)
            if not self._pins(point):
                return False
        self._result.excused_rows += taint.n_moved
        self._suspect_since = taint.commits_suspect_since
        self._before = seen.arrays
        if taint.commits_moved or (taint.decides_moved and not self._mode.pinned):
            return False
        return self._pins(point) or self._same_walk(point, expectation)

    def _same_walk(self, point: str, expectation: Expectation) -> bool:
        """Whether a session that lives with its decisions is where the record is."""
        golden = self._case.expectation(point)
        return all(
            np.array_equal(one, other)
            for name in ("path", "root")
            if (one := golden.get(name)) is not None
            and (other := expectation.get(name)) is not None
        )

    def _expected(
        self, point: str, expectation: Expectation, stage: Stage, layer: int | None
    ) -> np.ndarray | None:
        if stage.source is not Source.JUDGE:
            return expectation.get(stage.name, layer)
        slots, path = expectation.get("slots"), self._committed(point, expectation).get("path")
        assert slots is not None
        before = int(slots[0])  # rows committed before this point
        if stage.name == "untouched":
            return np.ones(before, dtype=bool) if before else None
        return np.ones(len(slots) if path is None else len(path), dtype=bool)

    def _committed(self, point: str, expectation: Expectation) -> Expectation:
        """Where the path is, that the session commits."""
        return self._case.expectation(point) if self._mode.pinned else expectation

    def _shown(self, point: str, seen: Observation) -> ShownPoint:
        noise, profile = self._noise.point(point), self._info.profile
        return ShownPoint(point, seen.arrays, noise, self._mode, self._config, profile)

    def _taint(self, point: str, expectation: Expectation) -> Taint:
        """At the beginning of a point."""
        mask = expectation.get("mask")
        assert mask is not None
        path = self._committed(point, expectation).get("path")
        taint = Taint(self._config.num_hidden_layers, mask, path, self._suspect_since)
        if self._alternatives.guessed:  # where one choice was guessed, so may be any other
            taint.suspect(np.ones(len(mask), dtype=bool), -1)
        return taint

    def _suspect(
        self, shown: ShownPoint, expectation: Expectation, layer: int | None, taint: Taint
    ) -> None:
        """The engine does not show this layer's choice: where it is thin, it may be another."""
        assert layer is not None
        rows = thin_rows(expectation, layer, shown.noise)
        if rows is not None and rows.thin.any():
            taint.suspect(rows.thin, layer)

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

    def _add(self, finding: Finding) -> None:
        self._result.findings.append(finding)
        weight = list(Verdict).index
        self._result.verdict = max(self._result.verdict, finding.verdict, key=weight)


def _broken_by(error: BaseException) -> tuple[str, ...]:
    """What an engine breaks that raises this.

    A case asks for no more slots than its session was opened with: an engine without room takes
    rows of its own into account, or more slots for a row than one.
    """
    if isinstance(error, AnswerError):
        return error.rules
    return ("SLOT-3", "PAD-1") if isinstance(error, CacheError) else ()


def pin_of(expectation: Expectation, *, is_chunk: bool) -> Pin:
    """What the modes that follow the recorded history are given of a point."""
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
