"""The gate: an engine against bundles, every case in every mode."""

from __future__ import annotations

import ast
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CaseInput
from kdtr.conformance.drawing_sight import Sight
from kdtr.conformance.drive import MODES, Mode
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.judge import judge_case
from kdtr.conformance.next_step import placed
from kdtr.conformance.noise_floor import NoiseFloor
from kdtr.conformance.quick_corpus import QuickCorpus
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.smoke import Smoke, smoke_first
from kdtr.conformance.state_script import CASE, SCRIPT, judge_state, suits
from kdtr.conformance.xray_gate import xray_results
from kdtr.contract import CaseError, Engine

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run: empty means all. `until` is the last point of each case, "round2".

    quick  only these cases and scripts
    """

    cases: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    until: str | None = None
    quick: QuickCorpus | None = None

    def takes(self, case: CaseInput) -> bool:
        """Whether the case is selected, by alias or id."""
        if not self._is_quick(case, case.alias):
            return False
        return not self.cases or bool(self.cases & {case.alias, case.case_id})

    def takes_script(self, case: CaseInput) -> bool:
        """Whether the script of state_script.py is selected: as case and mode, or by neither."""
        if not self._is_quick(case, CASE):
            return False
        by_case = not self.cases or CASE in self.cases
        by_mode = not self.modes or SCRIPT in self.modes
        return by_case and by_mode and self.until is None

    def _is_quick(self, case: CaseInput, name: str) -> bool:
        if self.quick is None:
            return True
        return any((one.case, one.case_id) == (name, case.case_id) for one in self.quick.cases)


@dataclass(slots=True)
class GateResult:
    """All case results of a run. Nothing ran, or nothing asserted, is a failure."""

    results: list[CaseResult] = field(default_factory=list)
    quick: QuickCorpus | None = None  # of which this is a run: not the whole gate

    @property
    def passed(self) -> bool:
        """Whether something was firmly asserted and nothing is bad; near ties are no failures."""
        return not self.shortfall and not any(result.verdict.is_bad for result in self.results)

    @property
    def shortfall(self) -> str:
        """Why a run in which nothing is bad shows nothing either; "" where it shows something.

        The script asks what a session refuses and keeps: it asserts no number of a case.
        """
        if not any(result.comparisons for result in self.results):
            return "nothing was compared"
        asserting = [result for result in self.results if result.mode != SCRIPT] or self.results
        if not any(result.verdict is Verdict.PASS for result in asserting):
            return (
                "nothing was firmly asserted, as every case is a near tie, blocked or unsupported; "
                "judge more cases, or show expert_ids"
            )
        return ""

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.results for finding in result.findings]

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict is verdict for result in self.results)


def run_gate(
    engine: Engine,
    bundles: Sequence[str | os.PathLike[str]],
    *,
    engine_name: str,
    options: Mapping[str, Any] | None = None,
    selection: Selection = Selection(),
    progress: Progress = lambda _: None,
    command: str = "kdtr",
    xray: bool = False,
) -> GateResult:
    """Judge the engine. `engine_name`, `options` and `command` are for the reproduction lines.

    xray  whether the x-ray models are read too
    Raises BundleError for a file that is not a golden bundle, before the engine sees any, and
    CaseError for a selection that selects nothing.
    """
    opened: list[GoldenBundle] = []
    gate = GateResult(quick=selection.quick)
    try:
        for path in bundles:
            opened.append(GoldenBundle.open(path))
        _check_selection(opened, selection)
        for bundle in opened:
            if selection.quick is None or _has_some(bundle, selection):
                _judge_bundle(gate, engine, bundle, selection, progress)
    finally:
        for bundle in opened:
            bundle.close()
    for result in gate.results:
        result.findings = [
            replace(
                finding, reproduce=_reproduce(finding.place, engine_name, options or {}, command)
            )
            for finding in result.findings
        ]
    if xray:
        gate.results += xray_results(
            engine,
            gate.findings,
            engine_name=engine_name,
            options=options or {},
            command=command,
            progress=progress,
        )
    return gate


def _has_some(bundle: GoldenBundle, selection: Selection) -> bool:
    """Whether any case or script of the bundle is selected."""
    inputs = [case.inputs for case in bundle.cases]
    return any(
        selection.takes(one) or (suits(one) and selection.takes_script(one)) for one in inputs
    )


def _judge_bundle(
    gate: GateResult,
    engine: Engine,
    bundle: GoldenBundle,
    selection: Selection,
    progress: Progress,
) -> None:
    name = str(bundle.path)
    try:
        info = engine.info
        model = engine.load((bundle.config, bundle.weights))
    except RAISED as error:
        text = f"load() raised {told(error)}"
        gate.results.append(_model_error(name, "load", text, blocked=len(bundle.cases)))
        return
    if not callable(getattr(model, "open", None)):
        text = f"load() returned a {type(model).__name__} without open(); expected a model"
        gate.results.append(_model_error(name, "load", text, blocked=len(bundle.cases)))
        return
    floor = NoiseFloor.of_bundle(bundle, info.profile)
    smoke = Smoke(name)
    for case in smoke_first(bundle.cases):
        if not selection.takes(case.inputs):
            continue
        noise = floor.case(case)
        for mode in _modes(selection):
            if not mode.applies(case.inputs):
                continue
            if not mode.traces and not info.stages:  # every mode runs it as it ships
                continue
            result = smoke.blocked(case.inputs, mode.name)
            if result is None:
                progress(f"{case.inputs.alias} / {mode.name}")
                sight = Sight()
                watched = sight.watching(mode)
                result = judge_case(
                    name, model, info, bundle.config, case, noise, watched, selection.until
                )
                result.findings = [
                    sight.drawn(placed(finding, info, case), case) for finding in result.findings
                ]
                smoke.saw(case.inputs, result)
            gate.results.append(result)
    script = next((case.inputs for case in bundle.cases if suits(case.inputs)), None)
    if script is not None and selection.takes_script(script):
        result = smoke.blocked_script()
        if result is None:
            progress(f"{CASE} / {SCRIPT}")
            result = judge_state(name, model, info, bundle.config, script)
        gate.results.append(result)
    try:
        model.close()
    except RAISED as error:
        gate.results.append(_model_error(name, "close", f"close() raised {told(error)}"))


def _model_error(bundle: str, verb: str, text: str, *, blocked: int = 0) -> CaseResult:
    finding = Finding(Verdict.ERROR, Place(bundle, "all", verb, verb), verb, text)
    return CaseResult(bundle, "all", verb, Verdict.ERROR, blocked=blocked, findings=[finding])


def _modes(selection: Selection) -> list[Mode]:
    return [mode for mode in MODES if not selection.modes or mode.name in selection.modes]


def _check_selection(bundles: Sequence[GoldenBundle], selection: Selection) -> None:
    cases = [case.inputs for bundle in bundles for case in bundle.cases]
    known = {case.alias for case in cases} | {case.case_id for case in cases} | {CASE}
    unknown = sorted(selection.cases - known)
    if unknown:
        raise CaseError(
            f"no case {', '.join(unknown)}; the bundles have "
            f"{', '.join(dict.fromkeys(case.alias for case in cases))}"
        )
    selected = [case for case in cases if selection.takes(case)]
    points = {point for case in selected for point in case.points()}
    if selection.until is not None and selection.until not in points:
        in_order = sorted(points, key=lambda point: (point[0], len(point), point))
        subject = "no case has" if not selection.cases else "no selected case has"
        raise CaseError(
            f"{subject} a point {selection.until!r}; the points are {', '.join(in_order)}"
        )


def _reproduce(
    place: Place, engine_name: str, options: Mapping[str, Any], command: str = "kdtr"
) -> str:
    words = [command, "gate", place.bundle, "--engine", engine_name]
    for key, value in options.items():
        words += ["--engine-option", f"{key}={_option_value(value)}"]
    if place.case != "all":
        words += ["--case", place.case, "--mode", place.mode]
        if place.point not in ("open", "close") and place.mode != SCRIPT:
            words += ["--until", place.point]
    return shlex.join(words)


def _option_value(value: Any) -> str:
    """As `--engine-option` reads it back: a text that looks like a literal needs its quotes."""
    if isinstance(value, str):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return repr(value)
