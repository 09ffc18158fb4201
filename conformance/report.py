"""The verdict on a terminal: a table, the findings, what was not shown, and a closing line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import CaseResult, Finding, Verdict
from kdtr.conformance.gate import GateResult
from kdtr.conformance.state_script import SCRIPT
from kdtr.conformance.unshown import unshown_lines
from kdtr.contract import EngineInfo

_STYLE = {
    Verdict.PASS: "green",
    Verdict.NEAR_TIE: "yellow",
    Verdict.BLOCKED: "dim",
    Verdict.UNSUPPORTED: "dim",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold red",
}


def print_report(console: Console, info: EngineInfo, gate: GateResult, seconds: float) -> None:
    """Everything about a run. Plain text where the console is no terminal."""
    profile = info.profile
    console.print(
        f"{info.name} {info.version} on {info.device}: weights {profile.weights}, latents "
        f"{profile.latents}, accumulation {profile.accumulation}",
        soft_wrap=True,
    )
    if gate.results:
        console.print(_table(gate.results))
    for line in _below_the_table(gate.results):
        console.print(Text(line))
    told: set[str] = set()
    for finding in in_order(gate.findings):
        console.print()
        for line in finding.lines(console.width, told):
            console.print(Text(line), soft_wrap=True)
        told.update(finding.rules)
    for line in (*_on_the_profile(gate.results), *_not_shown(gate.results)):
        console.print(Text(line))
    console.print(Text(closing_line(gate, seconds), style=_verdict_style(gate)), soft_wrap=True)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """What failed before near ties, and the earliest point of the simplest case first.

    Numbers come before the script: a session with wrong numbers may fail both.
    """

    def place(one: Finding) -> tuple[bool, bool, int]:
        return not one.verdict.is_bad, one.place.mode == SCRIPT, one.n_rows

    return sorted(findings, key=place)


def closing_line(gate: GateResult, seconds: float) -> str:
    """One line for a log: the counts, and the verdict in words."""
    counts = ", ".join(
        f"{gate.count(verdict)} {verdict.value}" for verdict in Verdict if gate.count(verdict)
    )
    comparisons = sum(result.comparisons for result in gate.results)
    rows = sum(result.rows for result in gate.results)
    by_ties = sum(r.blocked for r in gate.results if r.verdict is Verdict.NEAR_TIE)
    if gate.passed:
        verdict = "passed"
    elif comparisons == 0:
        verdict = "FAILED: nothing was compared"
    else:
        verdict = "FAILED"
    not_reached = f"{_points(by_ties)} not reached because of near ties; " if by_ties else ""
    return (
        f"\ngate {verdict}: {counts or 'no case ran'}; {not_reached}{comparisons} comparisons of "
        f"{rows} rows in {seconds:.1f} s"
    )


def _points(n: int) -> str:
    return f"{n} point{'' if n == 1 else 's'}"


def _table(results: list[CaseResult]) -> Table:
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
            table.add_row(Text(Path(of_bundle).name, style="bold"))
        bundle = of_bundle
        headrooms = [r.headroom for r in by_mode.values() if r.headroom is not None]
        table.add_row(
            case,
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


def _below_the_table(results: list[CaseResult]) -> Iterator[str]:
    """What its marks mean, where they occur."""
    cases: dict[tuple[str, ...], list[str]] = {}  # by what they need, beyond what their mode needs
    for mode in _modes(results):
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
    blocked = sum(result.blocked for result in results)
    if blocked:
        yield f"{_points(blocked)} blocked: not reached, because a finding ends its case"


_IDLE = 2.0**-7  # of a bound: the next finer dtype of storage is 8 times finer, float32 65,536


def _on_the_profile(results: list[CaseResult]) -> Iterator[str]:
    """A warning where the errors are those of another profile than the declared one."""
    headrooms = [r.headroom for r in results if r.headroom is not None and r.comparisons > 1]
    used = max(headrooms, default=1.0)
    if 0 < used < _IDLE:
        yield ""
        yield (
            f"the largest error is {used:.2g} of its bound: the engine is more precise than it "
            "declares, and faults of that size pass; look at EngineInfo.profile"
        )


def _not_shown(results: list[CaseResult]) -> Iterator[str]:
    judged = [result for result in results if result.verdict is not Verdict.UNSUPPORTED]
    lines = unshown_lines(name for result in judged for name in result.unshown)
    if lines:
        yield ""
        yield "not shown, so neither passed nor failed; worth showing in this order:"
        yield from lines


def _verdict_style(gate: GateResult) -> str:
    return "bold green" if gate.passed else "bold red"
