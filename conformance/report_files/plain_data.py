"""Runs as plain data: dictionaries of texts, numbers and lists, as JSON knows them."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from kdtr.conformance.diagnosis_scene import Hint
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.excerpt import Excerpt, Number
from kdtr.conformance.finding import CaseResult, Compared, Finding
from kdtr.conformance.report_experiments import Experiment
from kdtr.conformance.report_files.run import Fault, Header, Run

Data = dict[str, Any]


def header_data(header: Header) -> Data:
    return {
        "engine": header.engine,
        "command": header.command,
        "started": header.started,
        "seconds": round(header.seconds, 3),
        "versions": dict(header.versions),
        "bundles": [
            {"path": one.path, "bytes": one.n_bytes, "sha256": one.sha256} for one in header.bundles
        ],
    }


def engine_data(run: Run) -> Data:
    info = run.info
    return {
        "name": str(info.name),
        "version": str(info.version),
        "device": str(info.device),
        "profile": asdict(info.profile),
        "verbs": sorted(info.verbs),
        "stages": sorted(info.stages),
        "conventions": {str(name): str(text) for name, text in sorted(info.conventions.items())},
    }


def case_data(run: Run, result: CaseResult) -> Data:
    return {
        "bundle": result.bundle,
        "case": result.case,
        "mode": result.mode,
        "verdict": result.verdict.value,
        "points": result.points,
        "comparisons": result.comparisons,
        "rows": result.rows,
        "headroom": number(result.headroom),
        "blocked": result.blocked,
        "blocked_by": result.blocked_by,
        "not_checked": result.not_checked,
        "excused_rows": result.excused_rows,
        "unshown": sorted(result.unshown),
        "refused": result.refused,
        "faults": sorted({run.numbers[id(finding)] for finding in result.findings}),
    }


def comparison_data(result: CaseResult, compared: Compared) -> Data:
    return {
        "bundle": result.bundle,
        "case": result.case,
        "mode": result.mode,
        "point": compared.point,
        "stage": compared.stage,
        "layer": compared.layer,
        "rows": compared.rows,
        "headroom": number(compared.headroom),
        "same": compared.same,
    }


def finding_data(run: Run, finding: Finding) -> Data:
    place = finding.place
    return {
        "fault": run.numbers[id(finding)],
        "verdict": finding.verdict.value,
        "bundle": place.bundle,
        "case": place.case,
        "mode": place.mode,
        "point": place.point,
        "stage": finding.stage,
        "summary": finding.summary,
        "where": finding.where,
        "expected": finding.expected,
        "actual": finding.actual,
        "rules": list(finding.rules),
        "blame": finding.blame,
        "next_step": finding.next_step,
        "reproduce": finding.reproduce,
        "rows_fed": finding.n_rows,
        "looks_like": [_hint(hint) for hint in finding.looks_like],
        "excuse": None if finding.excuse is None else asdict(finding.excuse),
        "excerpt": None if finding.excerpt is None else _excerpt(finding.excerpt),
        "drawing": None if finding.drawing is None else _drawing(finding.drawing),
    }


def fault_data(fault: Fault) -> Data:
    why = fault.explanations
    return {
        "number": fault.number,
        "verdict": fault.first.verdict.value,
        "title": fault.title(),
        "rules": list(fault.rules()),
        "findings": len(fault.group.findings),
        "explanations": [_hint(hint) for hint in why.rivals],
        "experiments": [
            {"tells": list(one.names), **_experiment(one.experiment)} for one in why.tellings
        ],
        "ruled_out": [{"says": one.hint.says, "against": one.against} for one in why.ruled_out],
    }


def verdict_data(run: Run) -> Data:
    return {
        "passed": run.passed,
        "quick": run.gate.quick is not None,
        "part": run.gate.part,
        "counts": run.counts(),
        "why_failed": run.why_failed(),
    }


def number(value: Number | None) -> Number | str | None:
    """JSON has no numbers that are not finite: "inf", "-inf" and "nan" are texts.

    >>> number(0.5), number(float("inf")), number(None)
    (0.5, 'inf', None)
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _hint(hint: Hint) -> Data:
    return {
        "says": hint.says,
        "rules": list(hint.rules),
        "fit": number(hint.fit),
        "seen_in": hint.seen_in,
    }


def _experiment(experiment: Experiment) -> Data:
    return {"says": experiment.says, "command": experiment.command}


def _excerpt(excerpt: Excerpt) -> Data:
    return {
        "where": excerpt.where,
        "axis": excerpt.axis,
        "columns": list(excerpt.columns),
        "at": excerpt.at,
        "length": excerpt.length,
        "expected": [number(value) for value in excerpt.expected],
        "actual": [number(value) for value in excerpt.actual],
        "bound": number(excerpt.bound),
        "rows": [
            {"name": row.name, "wrong": row.wrong, "worst": number(row.worst)}
            for row in excerpt.rows
        ],
    }


def _drawing(drawing: Drawing) -> Data:
    return {
        "committed_len": drawing.committed_len,
        "is_chunk": drawing.is_chunk,
        "rows": list(drawing.rows),
        "tokens": list(drawing.tokens),
        "parents": list(drawing.parents),
        "positions": {"expected": list(drawing.positions), "shown": _list(drawing.shown_positions)},
        "slots": {"expected": list(drawing.slots), "shown": _list(drawing.shown_slots)},
        "path": {"expected": list(drawing.path), "shown": _list(drawing.shown_path)},
        "moves": None if drawing.shown_moves is None else [list(m) for m in drawing.shown_moves],
    }


def _list(values: tuple[int, ...] | None) -> list[int] | None:
    return None if values is None else list(values)
