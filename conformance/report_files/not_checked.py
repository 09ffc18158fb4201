"""What a run leaves open, in sentences: neither passed nor failed."""

from __future__ import annotations

from collections.abc import Iterator

from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.report import profile_warning
from kdtr.conformance.report_table import blocked, not_offered
from kdtr.conformance.xray_gate import XRAY


def left_open(results: list[CaseResult]) -> Iterator[str]:
    """A sentence for each thing that was not judged, and why."""
    yield from not_offered(results)
    yield from blocked(results)
    yield from _xray(results)
    unchecked = sum(result.not_checked for result in results)
    if unchecked:
        yield (
            f"{_count(unchecked, 'difference')} not checked: a thin choice of experts may explain "
            "them, and there are too many to try"
        )
    rows = sum(result.excused_rows for result in results)
    if rows:
        yield f"{_count(rows, 'row')} not judged: they follow from a near tie"
    warning = profile_warning(results)
    if warning:
        yield warning


def _xray(results: list[CaseResult]) -> Iterator[str]:
    models = [result for result in results if result.mode == XRAY]
    if models and models[0].blocked_by:
        yield f"x-ray models blocked by {models[0].blocked_by}"
    left = [one.case for one in models if one.verdict is Verdict.UNSUPPORTED]
    if left:
        yield f"x-ray models not judged: {', '.join(left)}"


def _count(n: int, one: str) -> str:
    return f"{n} {one}{'' if n == 1 else 's'}"
