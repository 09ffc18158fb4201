"""One engine in one process, and the judge of each bundle: made once, when first needed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.engine_loader import importable_here, load_engine, option_names
from kdtr.conformance.expectations import Expectations
from kdtr.conformance.finding import CaseResult, Finding
from kdtr.conformance.finding_groups import grouped
from kdtr.conformance.gate import reproducible
from kdtr.conformance.judge_bundle import BundleJudge, Question
from kdtr.conformance.report_experiments import Bench as Experiments
from kdtr.conformance.report_group import group_lines
from kdtr.conformance.xray import xray_models
from kdtr.conformance.xray_gate import xray_results
from kdtr.contract import Engine

_WIDTH = 80  # of texts: a worker of pytest-xdist knows no terminal


class Bench:
    """Gives verdicts as `kdtr gate` does.

    name, options  of the engine
    expectations   what is excused; None: nothing
    """

    def __init__(
        self, name: str, options: Mapping[str, Any], expectations: Expectations | None
    ) -> None:
        self._name = name
        self._options = options
        self._expectations = expectations
        self._engine: Engine | None = None
        self._judges: dict[str, BundleJudge] = {}
        self._models: Sequence[str] = ()
        self._xrayed: list[CaseResult] | None = None
        self._command = _command()
        self._paths = ExitStack()

    def engine(self) -> Engine:
        """Raises EngineError, each time, where it cannot be made."""
        if self._engine is None:
            self._paths.enter_context(importable_here())
            self._engine = load_engine(self._name, self._options)
        return self._engine

    def end(self) -> None:
        """Let the engine go."""
        self._engine = self._xrayed = None
        self._judges.clear()
        self._paths.close()

    def ask(self, bundle: GoldenBundle, asked: Sequence[Question]) -> None:
        """Name all that this run asks of a bundle, in the gate's order, before the first result."""
        self._judges[str(bundle.path)] = BundleJudge(self.engine(), bundle, asked)

    def asks(self, bundle: GoldenBundle) -> bool:
        return str(bundle.path) in self._judges

    def result(self, bundle: GoldenBundle, question: Question) -> CaseResult | None:
        """The verdict; None: a mode that an engine without stages is not asked for."""
        result = self._judges[str(bundle.path)].result(question)
        return None if result is None else self._finished(result)

    def close(self, bundle: GoldenBundle) -> CaseResult | None:
        """Close its model; what is wrong with that. A later result loads it again."""
        judge = self._judges.get(str(bundle.path))
        result = None if judge is None else judge.close()
        return None if result is None else self._finished(result)

    def ask_xray(self, names: Sequence[str]) -> None:
        self._models = names

    def xray(self, name: str) -> CaseResult:
        """The verdict on one x-ray model: all that are asked are read together, as in the gate.

        Findings of golden cases do not block them here: no process knows all of these.
        """
        if self._xrayed is None:
            self._xrayed = xray_results(
                self.engine(),
                (),
                engine_name=self._name,
                options=self._options,
                command=self._command,
                progress=lambda _: None,
                models=[model for model in xray_models() if model.name in self._models],
            )
            if self._expectations is not None:
                self._expectations.hold(self._xrayed)
        found = (result for result in self._xrayed if result.case == name)
        return next(
            found, self._xrayed[0]
        )  # one result for all, where the engine offers too little

    def text(self, result: CaseResult, findings: Sequence[Finding]) -> str:
        """Findings of a result, as the gate's report prints them."""
        options = option_names(self._name)
        experiments = Experiments(self.engine().info, options, [result])
        told: set[str] = set()
        lines: list[str] = []
        for group in grouped(findings):
            lines += [""] * bool(lines) + group_lines(group, experiments, _WIDTH, told)
            told.update(group.first.rules)
        return "\n".join(lines)

    def _finished(self, result: CaseResult) -> CaseResult:
        """A copy, reproducible and excused: what the judge keeps blocks others as it was."""
        result = replace(result, findings=[*result.findings], expected=set())
        reproducible(result, self._name, self._options, self._command)
        if self._expectations is not None:
            self._expectations.hold([result])
        return result


def _command() -> str:
    """kdtr as a shell would start the one of this Python."""
    here, found = Path(sys.executable).with_name("kdtr"), shutil.which("kdtr")
    if not here.exists() or (found is not None and Path(found).samefile(here)):
        return "kdtr"
    return str(here)
