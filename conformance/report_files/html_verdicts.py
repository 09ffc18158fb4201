"""The verdicts of a run as a table, and what was compared, by stage."""

from __future__ import annotations

from dataclasses import dataclass

from kdtr.conformance.finding import CaseResult
from kdtr.conformance.report_files.html_elements import Content, Element, element
from kdtr.conformance.report_files.html_fault import verdict_word
from kdtr.conformance.report_files.run import Run
from kdtr.conformance.report_table import modes_of
from kdtr.contract import STAGES


def verdict_table(run: Run) -> Element:
    """A body per bundle, a line per case, a column per mode; a bad verdict links to its fault."""
    results = run.gate.results
    modes = modes_of(results)
    head = element(
        "tr",
        [element("th", name, scope="col") for name in ("case", *modes)],
        [element("th", name, scope="col", class_="right") for name in ("compared", "error/bound")],
    )
    bodies = []
    for bundle, name in run.bundle_names().items():
        of = [result for result in results if result.bundle == bundle]
        columns = len(modes) + 3
        title = element("th", name, colspan=columns, scope="rowgroup", class_="bundle")
        lines = [
            _line(run, case, modes, [one for one in of if one.case == case])
            for case in dict.fromkeys(result.case for result in of)
        ]
        bodies.append(element("tbody", element("tr", title), lines))
    table = element("table", element("thead", head), bodies, class_="verdicts", id="verdict-table")
    return element("div", table, class_="scroll")


def _line(run: Run, case: str, modes: list[str], results: list[CaseResult]) -> Element:
    by_mode = {result.mode: result for result in results}
    headrooms = [one.headroom for one in results if one.headroom is not None]
    bad = any(result.verdict.is_bad for result in results)
    return element(
        "tr",
        element("th", case, scope="row"),
        [element("td", _cell(run, by_mode.get(mode))) for mode in modes],
        element("td", sum(result.comparisons for result in results), class_="right"),
        element("td", f"{max(headrooms):.2g}" if headrooms else "", class_="right"),
        data_bad="yes" if bad else "no",
    )


def _cell(run: Run, result: CaseResult | None) -> Content:
    if result is None:
        return None
    word = verdict_word(result.verdict.value)
    if not result.findings:
        return word
    return element("a", word, href=f"#fault-{run.numbers[id(result.findings[0])]}")


@dataclass(slots=True)
class _Sum:
    comparisons: int = 0
    rows: int = 0
    differed: int = 0
    headroom: float | None = None


def stage_table(run: Run) -> Element | None:
    """What was compared, in the order of the computation, and the largest error in its bound."""
    sums: dict[str, _Sum] = {}
    for result in run.gate.results:
        for one in result.compared:
            total = sums.setdefault(one.stage, _Sum())
            total.comparisons += 1
            total.rows += one.rows
            total.differed += not one.same
            if one.headroom is not None:
                total.headroom = max(total.headroom or 0.0, one.headroom)
    if not sums:
        return None
    names = ("stage", "comparisons", "rows", "with a difference", "error/bound")
    head = [
        element("th", name, scope="col", class_="right" if name != "stage" else None)
        for name in names
    ]
    lines = [
        element(
            "tr",
            element("th", stage.name, scope="row"),
            [
                element("td", text, class_="right")
                for text in (
                    str(of.comparisons),
                    str(of.rows),
                    f"✗ {of.differed}" if of.differed else "0",
                    "exact" if of.headroom is None else f"{of.headroom:.2g}",
                )
            ],
        )
        for stage in STAGES
        if (of := sums.get(stage.name)) is not None
    ]
    table = element("table", element("thead", element("tr", head)), element("tbody", lines))
    return element("div", table, class_="scroll")
