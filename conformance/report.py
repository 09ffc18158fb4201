"""The verdict on a terminal: a table, the findings, what was not shown, and a closing line."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from kdtr.conformance.expectations_outcome import excused_lines
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.finding_groups import grouped
from kdtr.conformance.gate import GateResult
from kdtr.conformance.plain_text import engine_name
from kdtr.conformance.report_experiments import Bench
from kdtr.conformance.report_group import group_lines
from kdtr.conformance.report_table import below_the_table, case_table, points
from kdtr.conformance.unshown import unshown_lines
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import EngineInfo


def print_report(
    console: Console,
    info: EngineInfo,
    gate: GateResult,
    seconds: float,
    options: frozenset[str] = frozenset(),
) -> None:
    """Everything about a run. Plain text where the console is no terminal.

    options  of the engine's factory, as far as it names them: what can be experimented with
    """
    profile = info.profile
    console.print(
        Text(
            f"{engine_name(info)}: weights {profile.weights}, latents {profile.latents}, "
            f"accumulation {profile.accumulation}"
        ),
        soft_wrap=True,
    )
    golden = [result for result in gate.results if result.mode != XRAY]
    if golden:
        console.print(case_table(golden, console.width))
    for line in below_the_table(gate.results, console.width):
        console.print(Text(line))
    bench = Bench(info, options, gate.results)
    told: set[str] = set()
    for group in grouped(finding for finding in gate.findings if finding.excuse is None):
        console.print()
        for line in group_lines(group, bench, console.width, told):
            console.print(Text(line, style=_line_style(line)), soft_wrap=True)
        told.update(group.first.rules)
    warning = profile_warning(gate.results)
    for line in (*(("", warning) if warning else ()), *_not_shown(gate.results)):
        console.print(Text(line))
    for line in expected_lines(gate, console.width):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(closing_line(gate, seconds), style=_verdict_style(gate)), soft_wrap=True)


def _line_style(line: str) -> str:
    """Rows of a picture that are wrong, and the head of a finding, stand out where colours are."""
    is_head = line.startswith(("FAIL  ", "ERROR  "))
    return "bold red" if is_head or line.lstrip().startswith(">") else ""


def closing_line(gate: GateResult, seconds: float) -> str:
    """One line for a log: the counts, and the verdict in words."""
    counts = ", ".join(
        f"{gate.count(verdict)} {verdict.value}" for verdict in Verdict if gate.count(verdict)
    )
    comparisons = sum(result.comparisons for result in gate.results)
    rows = sum(result.rows for result in gate.results)
    by_ties = sum(r.blocked for r in gate.results if r.verdict is Verdict.NEAR_TIE)
    verdict = "passed" if gate.passed else "FAILED"
    nothing_bad = not any(result.verdict.is_bad for result in gate.results)
    if gate.shortfall and (nothing_bad or comparisons == 0):
        verdict += f": {gate.shortfall}"
    elif gate.unmet and nothing_bad:
        verdict += ": the expectations are unmet"
    not_reached = f"{points(by_ties)} not reached because of near ties; " if by_ties else ""
    unchecked = sum(result.not_checked for result in gate.results)
    if unchecked:
        ties = "near tie" if unchecked == 1 else "near ties"
        not_reached += f"{unchecked} {ties} not checked; "
    return (
        f"\n{_which(gate)} {verdict}: {counts or 'no case ran'}; {not_reached}{comparisons} "
        f"comparisons of {rows} rows in {seconds:.1f} s"
    )


def expected_lines(gate: GateResult, width: int) -> Iterator[str]:
    """What an expectations file has excused, and where it does not hold."""
    if gate.expectations is None:
        return
    excused = excused_lines(gate.expectations, gate.results, width)
    if excused:
        yield ""
        yield f"expected by {gate.expectations.path}:"
        yield from excused
    yield from ("", *gate.unmet) if gate.unmet else ()
    yield from ("", *gate.unknown) if gate.unknown else ()


def _which(gate: GateResult) -> str:
    """What ran: a part of the gate is never called the gate."""
    if gate.quick is None:
        return gate.part or "gate"
    ran = {(one.bundle, one.case) for one in gate.results}
    n, bundles = len(ran), len({bundle for bundle, _ in ran})
    return f"quick corpus ({n} of {gate.quick.of} cases, of {bundles} bundles; not the whole gate)"


_IDLE = 2.0**-7  # of a bound: the next finer dtype of storage is 8 times finer, float32 65,536


def profile_warning(results: list[CaseResult]) -> str:
    """Where the errors are those of another profile than the declared one; else ""."""
    headrooms = [r.headroom for r in results if r.headroom is not None and r.comparisons > 1]
    used = max(headrooms, default=1.0)
    if not 0 < used < _IDLE:
        return ""
    return (
        f"the largest error is {used:.2g} of its bound: the engine is more precise than it "
        "declares, and faults of that size pass; look at EngineInfo.profile"
    )


def unshown_stages(results: list[CaseResult]) -> set[str]:
    """Of what was judged, the stages that the engine did not show."""
    judged = [result for result in results if result.verdict is not Verdict.UNSUPPORTED]
    return {name for result in judged for name in result.unshown}


def _not_shown(results: list[CaseResult]) -> Iterator[str]:
    lines = unshown_lines(unshown_stages(results))
    if lines:
        yield ""
        yield "not shown, so neither passed nor failed; worth showing in this order:"
        yield from lines


def _verdict_style(gate: GateResult) -> str:
    return "bold green" if gate.passed else "bold red"
