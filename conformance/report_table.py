"""The verdicts as a table: a line per case, a column per mode; and what its marks mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from kdtr.conformance.bundle_names import names_to_tell
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.plain_text import entry, printable
from kdtr.conformance.state_script import SCRIPT
from kdtr.conformance.xray_gate import XRAY

_NAMED = 4  # bundles; of more, their number
_STYLE = {
    Verdict.PASS: "green",
    Verdict.NEAR_TIE: "yellow",
    Verdict.BLOCKED: "dim",
    Verdict.UNSUPPORTED: "dim",
    Verdict.EXCUSED: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold red",
}


def points(n: int) -> str:
    return f"{n} point{'' if n == 1 else 's'}"


def case_table(results: list[CaseResult], width: int = 80) -> Group:
    """A line per case, a column per mode; without rulers, so that it fits in 80 columns.

    A bundle's name has a line of its own: as a cell it would be broken in the middle of a word.
    """
    modes = modes_of(results)
    by_case: dict[tuple[str, str], dict[str, CaseResult]] = {}
    for result in results:
        by_case.setdefault((result.bundle, result.case), {})[result.mode] = result
    bundles: dict[str, list[list[Text]]] = {}
    for (bundle, case), by_mode in by_case.items():
        bundles.setdefault(bundle, []).append(_row(case, by_mode, modes))
    head = [Text(name, style="bold") for name in ("case", *modes, "compared", "error/bound")]
    every = [head, *(row for rows in bundles.values() for row in rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(head))]
    gap = 2 if len(modes) <= 5 else 1
    rest = sum(widths[1:]) + gap * (len(widths) - 1)
    widths[0] = min(widths[0], max(_LEAST_CASE, width - rest))
    parts: list[RenderableType] = [
        _rows(widths, gap, [head]),
        Text("─" * (widths[0] + rest), no_wrap=True, overflow="crop"),
    ]
    for number, (bundle, rows) in enumerate(bundles.items()):
        if len(bundles) > 1:
            parts += [Text()] * bool(number) + [Text(printable(Path(bundle).name), style="bold")]
        parts.append(_rows(widths, gap, rows))
    return Group(*parts)


_LEAST_CASE = 8  # columns for an alias, which is folded


def _row(case: str, by_mode: dict[str, CaseResult], modes: list[str]) -> list[Text]:
    headrooms = [r.headroom for r in by_mode.values() if r.headroom is not None]
    return [
        Text(printable(case)),
        *(_cell(by_mode.get(mode)) for mode in modes),
        Text(str(sum(result.comparisons for result in by_mode.values()))),
        Text(f"{max(headrooms):.2g}" if headrooms else ""),
    ]


def _rows(widths: list[int], gap: int, rows: list[list[Text]]) -> Table:
    """In columns of these widths; the last two are numbers."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, gap, 0, 0))
    for i, width in enumerate(widths):
        justify: JustifyMethod = "right" if i >= len(widths) - 2 else "left"
        table.add_column(width=width, overflow="fold", justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def modes_of(results: list[CaseResult]) -> list[str]:
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
    yield from not_offered(results)
    yield from blocked(results)
    yield from _xrayed(results, width)


def not_offered(results: list[CaseResult]) -> Iterator[str]:
    """Modes, cases and checks that were left out, and the verbs that they need."""
    cases: dict[tuple[str, ...], list[str]] = {}  # by what they need, beyond what their mode needs
    for mode in modes_of([result for result in results if result.mode != XRAY]):
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


def _refused(results: list[CaseResult]) -> Iterator[str]:
    """Models that the engine says it cannot compute, and its words."""
    names: dict[str, list[str]] = {}
    for result in results:
        if result.refused:
            name = result.case if result.mode == XRAY else Path(result.bundle).name
            names.setdefault(result.refused, []).append(name)
    for words, of in names.items():
        yield f"{', '.join(of)}: not loaded: {words}"


def blocked(results: list[CaseResult]) -> Iterator[str]:
    """Points after a finding of their own case; then whole cases, and by what."""
    own = sum(result.blocked for result in results if not result.blocked_by)
    if own:
        yield f"{points(own)} blocked: not reached, because a finding ends its case"
    names = names_to_tell(results)
    by: dict[str, list[str]] = {}  # the bundle of each case
    for result in results:
        if result.blocked_by and result.mode != XRAY:
            by.setdefault(result.blocked_by, []).append(result.bundle)
    for blocker, of in by.items():
        shown = list(dict.fromkeys(names[bundle] for bundle in of if names))
        told = f" of {', '.join(shown)}" if shown else ""
        if len(shown) > _NAMED:
            told = f" of {len(shown)} bundles"
        yield f"{len(of)} case{'' if len(of) == 1 else 's'}{told} blocked by {blocker}"


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
