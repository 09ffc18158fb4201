"""The whole run: the gate's closing line, what was expected, and whether that fails the session.

Reports of all processes come together in the one that was started; only there is anything shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from kdtr.conformance.drive import MODE
from kdtr.conformance.expectations import Expectations
from kdtr.conformance.expectations_outcome import unmet
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.gate import PART, GateResult
from kdtr.conformance.report import closing_line, expected_lines
from kdtr.conformance.xray_gate import XRAY
from kdtr.pytest_plugin.case_report import CLOSE, NO_ENGINE, closed, is_ours, result_of

_OUTPUT = "kdtr_cases"  # what a worker of pytest-xdist gives back


class RunSummary:
    """Collects results from test reports, as this process sees them."""

    def __init__(
        self, config: pytest.Config, expectations: Expectations | None, bundles: Mapping[str, str]
    ) -> None:
        self._config = config
        self._expectations = expectations
        self._bundles = bundles
        self._start = time.perf_counter()
        self._is_part = False
        self._n_selected = 0
        self._has_engine = True
        self._seen: set[str] = set()
        self._results: dict[tuple[str, str, str], CaseResult] = {}

    def is_part(self) -> None:
        """Some cases of the bundles are left out."""
        self._is_part = True

    def selected(self, n: int) -> None:
        self._n_selected = n

    def take(self, report: pytest.TestReport) -> None:
        self._has_engine &= NO_ENGINE not in report.user_properties
        if not is_ours(report.user_properties):
            self._take_crash(report)
            return
        result = result_of(report.user_properties)
        if report.when == "call":
            self._seen.add(report.nodeid)
            if result is not None:
                self._add(result)
        elif report.when == "teardown":
            bundle = report.nodeid.partition("::")[0]
            end = closed(bundle, report.user_properties)
            if report.failed:
                end = CaseResult(bundle, "all", CLOSE, Verdict.ERROR)
            if end is not None:
                self._add(end)

    def _take_crash(self, report: pytest.TestReport) -> None:
        """A case that ended its worker, or the engine's factory: it left no verdict."""
        bundle, _, name = report.nodeid.partition("::")
        if report.failed and bundle in {*self._bundles, XRAY}:
            case, _, mode = name.removesuffix("]").partition("[")
            self._seen.add(report.nodeid)
            self._add(CaseResult(bundle, case, mode, Verdict.ERROR))

    def take_worker(self, output: Mapping[str, Any]) -> None:
        told = output.get(_OUTPUT)
        if told is not None:
            self._n_selected = max(self._n_selected, told["selected"])
            self._is_part |= told["part"]

    def finish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output[_OUTPUT] = {"selected": self._n_selected, "part": self._is_part}
        elif not self._has_engine:  # nothing was judged: `kdtr gate` refuses it too
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        elif session.exitstatus == pytest.ExitCode.OK and not self._is_passed():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_passed(self) -> bool:
        """Cases that were chosen and skipped before they ran are no pass."""
        if self._seen:
            return self._gate().passed
        return not self._n_selected or bool(self._config.getoption("collectonly"))

    def show(self, terminal: Any) -> None:
        if not self._seen:
            if not self._is_passed():
                terminal.write_line("kdtr: nothing was judged: no case ran to its verdict")
            return
        gate = self._gate()
        terminal.section("cases (kdtr)")
        for line in expected_lines(gate, terminal.config.get_terminal_writer().fullwidth):
            terminal.write_line(line)
        terminal.write_line(closing_line(gate, time.perf_counter() - self._start).strip())

    def _add(self, result: CaseResult) -> None:
        self._results[result.bundle, result.case, result.mode] = result

    def _place(self, result: CaseResult) -> tuple[int, str, int]:
        """Workers report in any order; what is told of a run has one."""
        bundles, modes = [*self._bundles], [*MODE]
        return (
            bundles.index(result.bundle) if result.bundle in bundles else len(bundles),
            result.case,
            modes.index(result.mode) if result.mode in modes else len(modes),
        )

    def _gate(self) -> GateResult:
        gate = GateResult(sorted(self._results.values(), key=self._place))
        whole = not self._is_part and len(self._seen) == self._n_selected
        gate.part = "" if whole else PART
        if self._expectations is not None:
            gate.expectations = self._expectations
            # No process knows what was left out of a part.
            unasked = () if whole else None
            gate.unmet = unmet(self._expectations, gate.results, self._bundles.values(), unasked)
        return gate
