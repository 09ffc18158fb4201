"""What to do about a finding of an engine that shows too little to explain it.

A wrong position, a wrong mask and a wrong cache all end in wrong logits. Where the engine shows
nothing of what lies between, the finding says what to show next.
"""

from __future__ import annotations

import re
from dataclasses import replace

from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.diagnosis_snapshot import convicts_the_cache, knows_the_cache
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import Finding, Verdict
from kdtr.contract import EngineInfo

# Numbers that a wrong cache makes wrong, if the scores before them were not seen to be right.
_READ_THE_CACHE = frozenset(
    {"scores", "out_latent", "attn_out", "router_scores", "hidden", "final_hidden", "logits"}
)
_CACHE_RULES = ("COMMIT-1", "COMMIT-3")


def placed(finding: Finding, info: EngineInfo, case: GoldenCase) -> Finding:
    """The finding with the number of rows that lead up to it, and with its next step."""
    finding = replace(finding, n_rows=_rows_until(case, finding.place.point))
    if finding.verdict is not Verdict.FAIL:
        return finding
    convicted = any(convicts_the_cache(hint) for hint in finding.looks_like)
    suspect = "" if convicted else _cache_suspect(finding, info, case)
    if convicted or suspect:
        added = tuple(rule_id for rule_id in _CACHE_RULES if rule_id not in finding.rules)
        return replace(finding, next_step=suspect, rules=finding.rules + added)
    return replace(finding, next_step=_stages_to_show(finding, info))


def _rows_until(case: GoldenCase, point: str) -> int:
    """Rows that an engine is fed up to this point: the fewer, the simpler the finding."""
    sizes = [len(chunk) for chunk in case.inputs.chunks]
    sizes += [len(entry.tree) for entry in case.inputs.rounds]
    points = case.inputs.points()
    if point in points:
        return sum(sizes[: points.index(point) + 1])
    return sum(sizes) if point == "close" else 0


def _stages_to_show(finding: Finding, info: EngineInfo) -> str:
    """For a result of a forward that is wrong, for reasons that were not shown."""
    mode = MODE[finding.place.mode]
    if not mode.traces or not _ends_a_forward(finding, info):
        return ""
    of_prefill = " of prefill" if finding.place.point.startswith("chunk") else ""
    layout = [stage for stage in ("positions", "mask") if stage not in info.stages]
    if mode.name == "forward":  # there both are given
        layout = []
    if layout and finding.stage == "targets":
        return (
            "if verify() returned logits they were right, and the argmax is wrong; if not, return "
            f"them, and show the {_stages(layout)}"
        )
    walks = mode.name in ("round", "offline") and finding.stage in ("path", "bonus")
    by_walk = ["targets"] if walks else []
    if layout:
        faults = [stage.removesuffix("s") for stage in layout] + ["walk"] * len(by_walk)
        return (
            f"show the {_stages(layout + by_walk)}{of_prefill} to learn which: a wrong "
            f"{_listed(faults, 'or')} is first seen there"
        )
    if "scores" not in info.stages:
        return f"show the stage scores{of_prefill} to learn in which layer it begins"
    return ""


def _stages(names: list[str]) -> str:
    return f"stage{'s' if len(names) > 1 else ''} {_listed(names, 'and')}"


def _listed(names: list[str], joint: str) -> str:
    *most, last = names
    return f"{', '.join(most)} {joint} {last}" if most else last


def _ends_a_forward(finding: Finding, info: EngineInfo) -> bool:
    """Whether what differs is the forward's own result; a walk over right targets is not."""
    if finding.stage in ("path", "bonus"):
        return finding.place.mode != "stepwise" and not {"targets", "logits"} & info.stages
    by_prefill = finding.stage == "root" and finding.place.point.startswith("chunk")
    return finding.stage in ("logits", "targets") or (by_prefill and "logits" not in info.stages)


def _cache_suspect(finding: Finding, info: EngineInfo, case: GoldenCase) -> str:
    """For row 0 of a round after a commit whose cache was not shown: COMMIT-1, COMMIT-3.

    It sees the cache and itself. Numbers alone tell that it was right in the round before: a
    decision may be the first to turn out wrong long after the fault.
    """
    points = case.inputs.points()
    if not finding.place.point.startswith("round") or finding.place.point == "round0":
        return ""
    before = points[points.index(finding.place.point) - 1]
    left, here = case.expectation(before), case.expectation(finding.place.point)
    path, slots = left.get("path"), left.get("slots")
    assert path is not None
    assert slots is not None
    scores_were_right = (
        finding.stage != "scores" and "scores" in info.stages and here.get("scores", 0) is not None
    )
    if finding.stage not in _READ_THE_CACHE or scores_were_right:
        return ""
    if not re.search(r"\brow 0\b", finding.where):
        return ""
    missing = [] if "snapshot" in info.verbs else ["snapshot()"]
    if left.get("cache_c_kv") is None:  # then rows are held against those that the engine showed
        rows = [name for name in ("c_kv", "k_pe") if name not in info.stages]
        missing += [f"the {_stages(rows)}"] if rows else []
    if not missing or any(knows_the_cache(hint) for hint in finding.looks_like):
        return ""
    first = int(slots[0])
    where = f"slot {first}" if len(path) == 1 else f"slots {first}..{first + len(path) - 1}"
    kept = f"kept path {'-'.join(str(node) for node in path)}, which belongs in {where}"
    return (
        f"suspect the cache that {before} left: it {kept} ({' and '.join(_CACHE_RULES)}); "
        f"{_listed(missing, 'and')} would tell"
    )
