"""The verdict on a terminal: a table, the findings, and a closing line."""

from __future__ import annotations

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
    several = len({result.bundle for result in gate.results}) > 1
    console.print(_table(info, gate.results, several))
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


def _table(info: EngineInfo, results: list[CaseResult], several: bool) -> Table:
    profile = info.profile
    title = (
        f"{info.name} {info.version} on {info.device}: weights {profile.weights}, latents "
        f"{profile.latents}, accumulation {profile.accumulation}"
    )
    table = Table(title=title, title_justify="left", title_style="bold")
    if several:
        table.add_column("bundle")
    table.add_column("case")
    table.add_column("mode")
    table.add_column("verdict")
    for name in ("points", "blocked", "comparisons", "error/bound"):
        table.add_column(name, justify="right")
    table.add_column("first seen at")
    for result in results:
        verdict = Text(result.verdict.value, style=_STYLE[result.verdict])
        row: list[str | Text] = [result.case, result.mode, verdict]
        if result.verdict is Verdict.UNSUPPORTED:
            row += ["", "", "", "", f"needs {', '.join(sorted(result.unshown))}"]
        else:
            first = result.findings[0] if result.findings else None
            row += [
                str(result.points),
                str(result.blocked or ""),
                str(result.comparisons),
                "" if result.headroom is None else f"{result.headroom:.2g}",
                f"{first.place.point}: {first.stage}" if first else "",
            ]
        table.add_row(*([result.bundle] if several else []), *row)
    return table


def _verdict_style(gate: GateResult) -> str:
    return "bold green" if gate.passed else "bold red"
