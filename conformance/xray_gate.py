"""The x-ray set as a part of the gate: a case per model, in the mode `x-ray`.

Where a golden bundle has already named a stage at which the engine parts from the truth, the
x-ray models would show the same fault in other words: they are blocked, so that one fault gives
one finding. Where only logits were wrong, or nothing was, or what was is excused, they are read.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from kdtr.conformance.finding import CaseResult, Finding, Verdict
from kdtr.conformance.xray import (
    NOT_LOADED,
    ModelResult,
    XrayModel,
    XrayResult,
    run_xray,
    xray_models,
)
from kdtr.contract import STAGE, Engine, Source, UnsupportedError

XRAY = "x-ray"  # the mode's name, and the bundle's
_LATE = ("logits", "final_hidden", "hidden")  # where everything shows and nothing is named


def xray_results(
    engine: Engine,
    earlier: Iterable[Finding],
    *,
    engine_name: str,
    options: Mapping[str, Any],
    command: str,
    progress: Callable[[str], None],
    models: Sequence[XrayModel] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[CaseResult]:
    """Ask and judge `models` (None: all), but where an earlier finding names a stage of the
    forward; `names` are those of bundles, as far as they are told."""
    asked = xray_models() if models is None else models
    cause = next((finding for finding in earlier if _names_a_cause(finding)), None)
    if cause is not None:
        place = cause.place
        name = f"{names[place.bundle]}: " if place.bundle in names else ""
        by = f"{name}{place.case} / {place.mode}: {cause.stage}"
        return [
            CaseResult(XRAY, model.name, XRAY, Verdict.BLOCKED, blocked=1, blocked_by=by)
            for model in asked
        ]
    try:
        result = run_xray(engine, models=asked, progress=lambda name: progress(f"{XRAY} / {name}"))
    except UnsupportedError:
        return [CaseResult(XRAY, "all", XRAY, Verdict.UNSUPPORTED)]
    again = [command, "xray", "--engine", engine_name]
    for key, value in options.items():
        again += ["--engine-option", f"{key}={value!r}"]
    return [_case(model, result, again) for model in result.models]


def _names_a_cause(finding: Finding) -> bool:
    stage = STAGE.get(finding.stage)
    if not finding.verdict.is_bad or stage is None or stage.name in _LATE:
        return False
    return stage.source in (Source.FORWARD, Source.LAYER)


def _case(model: ModelResult, result: XrayResult, again: list[str]) -> CaseResult:
    findings = [
        replace(finding, reproduce=shlex.join([*again, "--model", model.name]))
        for finding in result.findings
        if finding.place.case == model.name
    ]
    case = CaseResult(XRAY, model.name, XRAY, model.verdict, 1, model.compared, model.rows)
    case.findings = findings
    if model.note.startswith(NOT_LOADED):
        case.refused = model.note.removeprefix(NOT_LOADED)
    if model.compared:
        case.saw(model.headroom)
    return case
