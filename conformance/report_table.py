"""The verdicts as a table: a line per case, a column per mode; and what its marks mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.plain_text import entry, printable
from kdtr.conformance.state_script import SCRIPT
from kdtr.conformance.xray_gate import XRAY

_STYLE = {
    Verdict.PASS: "green",
    Verdict.NEAR_TIE: "yellow",
    Verdict.BLOCKED: "dim",
    Verdict.UNSUPPORTED: "dim",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold red",
}


def points(n: int) -> str:
    return f"{n} point{'' if n == 1 else 's'}"


def case_table(results: list[CaseResult]) -> Table:
    """A line per case, a column per mode; without rulers, so that it fits in 80 columns."""
    modes = _modes(results)
    pad = 1 if len(modes) <= 5 else 0
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, pad, 0, 0))
    table.add_column("case", overflow="fold")
    for mode in modes:
        table.add_column(mode, min_width=len(mode))
    table.add_column("compared", justify="right", no_wrap=True)
    table.add_column("error/bound", justify="right", no_wrap=True)
    by_case: dict[tuple[str, str], dict[str, CaseResult]] = {}
    for result in results:
        by_case.setdefault((result.bundle, result.case), {})[result.mode] = result
    bundle = None
    for (of_bundle, case), by_mode in by_case.items():
        if of_bundle != bundle and len({result.bundle for result in results}) > 1:
            table.add_section()
            table.add_row(Text(printable(Path(of_bundle).name), style="bold"))
        bundle = of_bundle
        headrooms = [r.headroom for r in by_mode.values() if r.headroom is not None]
        table.add_row(
            printable(case),
            *(_cell(by_mode.get(mode)) for mode in modes),
            str(sum(result.comparisons for result in by_mode.values())),
            f"{max(headrooms):.2g}" if headrooms else "",
        )
    return table


def _modes(results: list[CaseResult]) -> list[str]:
    """Those that ran, in the order of MODES; then `load` and `close`, where a model failed."""
    ran = dict.fromkeys(result.mode for result in results)
    return [mode for mode in MODE if mode in ran] + [mode for mode in ran if mode not in MODE]


def _cell(result: CaseResult | None) -> Text:
    if result is None:
        return Text("")
    text = "-" if result.verdict is Verdict.UNSUPPORTED else result.verdict.value
    return Text(text, style=_STYLE[result.verdict])


def below_the_table(results: list[CaseResult], width: int) -> Iterator[str]:
    """What its marks mean, where they occur."""
    cases: dict[tuple[str, ...], list[str]] = {}  # by what they need, beyond what their mode needs
    for mode in _modes([result for result in results if result.mode != XRAY]):
        of_mode = [result for result in results if result.mode == mode]
        unsupported = [result for result in of_mode if result.verdict is Verdict.UNSUPPORTED]
        common: set[str] = set()
        if len(unsupported) == len(of_mode):
            common = set.intersection(*(result.unshown for result in unsupported))
        if common:
            yield f"{mode}: not offered, needs {', '.join(sorted(common))}"
        for result in unsupported:
            if result.unshown - common:
                needed = cases.setdefault(tuple(sorted(result.unshown - common)), [])
                needed.append(result.case)
    for verbs, names in cases.items():
        yield f"{', '.join(dict.fromkeys(names))}: not offered, needs {', '.join(verbs)}"
    scripts = [r for r in results if r.mode == SCRIPT and r.verdict is not Verdict.UNSUPPORTED]
    left_out = sorted({verb for result in scripts for verb in result.unshown})
    if left_out:
        yield f"{SCRIPT}: without the checks that need {', '.join(left_out)}"
    yield from _refused(results)
    yield from _blocked(results)
    yield from _xrayed(results, width)


def _refused(results: list[CaseResult]) -> Iterator[str]:
    """Models that the engine says it cannot compute, and its words."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.refused:
            name = result.case if result.mode == XRAY else Path(result.bundle).name
            names.setdefault(result.refused, []).append(name)
    for words, of in names.items():
        yield f"{', '.join(of)}: not loaded: {words}"


def _blocked(results: list[CaseResult]) -> Iterator[str]:
    """Points after a finding of their own case; then whole cases, and by what."""
    own = sum(result.blocked for result in results if not result.blocked_by)
    if own:
        yield f"{points(own)} blocked: not reached, because a finding ends its case"
    by: dict[str, int] = {}
    for result in results:
        if result.blocked_by and result.mode != XRAY:
            by[result.blocked_by] = by.get(result.blocked_by, 0) + 1
    for blocker, n in by.items():
        yield f"{n} case{'' if n == 1 else 's'} blocked by {blocker}"


def _xrayed(results: list[CaseResult], width: int) -> list[str]:
    """The x-ray models by their verdicts: they have one mode, and so no columns."""
    models = [result for result in results if result.mode == XRAY]
    if not models:
        return []
    if models[0].blocked_by:
        return entry(XRAY, f"blocked by {models[0].blocked_by}", width)
    names: dict[str, list[str]] = {}
    for model in models:
        is_judged = model.verdict is not Verdict.UNSUPPORTED
        names.setdefault(model.verdict.value if is_judged else "not judged", []).append(model.case)
    parts = [f"{verdict} {', '.join(of)}" for verdict, of in names.items()]
    headrooms = [model.headroom for model in models if model.headroom is not None]
    if headrooms:
        parts.append(f"error/bound {max(headrooms):.2g}")
    return entry(XRAY, "; ".join(parts), width)
