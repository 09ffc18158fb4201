"""The verdict on a terminal: a table, the findings, and a closing line."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.gate import GateResult
from kdtr.contract import EngineInfo

_STYLE = {
    Verdict.PASS: "green",
    Verdict.NEAR_TIE: "yellow",
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
    for finding in gate.findings:
        console.print()
        for line in finding.lines():
            console.print(Text(line), soft_wrap=True)
    unshown = sorted(
        {
            name
            for result in gate.results
            if result.verdict is not Verdict.UNSUPPORTED
            for name in result.unshown
        }
    )
    if unshown:
        console.print(
            f"\nnot shown by the engine, so neither passed nor failed: {', '.join(unshown)}",
            soft_wrap=True,
        )
    console.print(Text(closing_line(gate, seconds), style=_verdict_style(gate)), soft_wrap=True)


def closing_line(gate: GateResult, seconds: float) -> str:
    """One line for a log: the counts, and the verdict in words."""
    counts = ", ".join(
        f"{gate.count(verdict)} {verdict.value}" for verdict in Verdict if gate.count(verdict)
    )
    comparisons = sum(result.comparisons for result in gate.results)
    rows = sum(result.rows for result in gate.results)
    if gate.passed:
        verdict = "passed"
    elif comparisons == 0:
        verdict = "FAILED: nothing was compared"
    else:
        verdict = "FAILED"
    return (
        f"\ngate {verdict}: {counts or 'no case ran'}; {comparisons} comparisons of {rows} rows "
        f"in {seconds:.1f} s"
    )


def _table(results: list[CaseResult]) -> Table:
    """A line per case; a column per mode, with its verdict and the points it could not reach."""
    modes = list(dict.fromkeys(result.mode for result in results))
    table = Table()
    table.add_column("case", no_wrap=True)
    for mode in modes:
        table.add_column(mode, min_width=len(mode))
    table.add_column("comparisons", justify="right", no_wrap=True)
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


def _cell(result: CaseResult | None) -> Text:
    if result is None:
        return Text("")
    text = result.verdict.value
    if result.verdict is Verdict.UNSUPPORTED:
        text += f": no {', '.join(sorted(result.unshown))}"
    elif result.blocked:
        text += f", {result.blocked} blocked"
    return Text(text, style=_STYLE[result.verdict])


def _verdict_style(gate: GateResult) -> str:
    return "bold green" if gate.passed else "bold red"
