"""The gate: an engine against bundles, every case in every mode."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.bundle_names import names_to_tell
from kdtr.conformance.case import CaseInput
from kdtr.conformance.drive import MODES, Mode
from kdtr.conformance.engine_options import option_words
from kdtr.conformance.expectations import Expectations
from kdtr.conformance.expectations_outcome import Unasked, unknown_lines, unmet
from kdtr.conformance.file_script import FILES, first_small
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.judge_bundle import (
    LOAD,
    BundleJudge,
    OfCase,
    Progress,
    Question,
    questions,
)
from kdtr.conformance.quick_corpus import QuickCorpus
from kdtr.conformance.state_script import CASE, SCRIPT
from kdtr.conformance.xray import xray_models
from kdtr.conformance.xray_gate import XRAY, xray_results
from kdtr.contract import CaseError, Engine

PART = "part of the gate"


@dataclass(frozen=True, slots=True)
class Selection:
    """What to run: empty means all. `until` is the last point of each case, "round2".

    quick  only these cases and scripts
    """

    cases: frozenset[str] = frozenset()
    modes: frozenset[str] = frozenset()
    until: str | None = None
    quick: QuickCorpus | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all cases run, in all modes, to their ends."""
        return self == Selection()

    def takes(self, case: CaseInput) -> bool:
        """Whether the case is selected, by alias or id."""
        return not self.cases or bool(self.cases & {case.alias, case.case_id})

    def of(
        self, bundle: GoldenBundle, modes: Sequence[Mode] = MODES, *, in_files: bool = False
    ) -> list[Question]:
        """What the gate asks of the bundle, as far as it is selected.

        in_files  whether its model is also handed over in files (file_script.py)
        """
        cases = {case.inputs.alias: case.inputs for case in bundle.cases}
        asked = questions(bundle.cases, modes, in_files=in_files)
        if self.quick is not None:
            quick = {one.case for one in self.quick.cases if one.bundle == bundle.path.name}
            asked = [question for question in asked if question.case in quick]

        def takes(question: Question) -> bool:
            if question.mode == SCRIPT:
                return self.takes_script(question.case)
            by_mode = not self.modes or question.mode in self.modes
            return by_mode and self.takes(cases[question.case])

        return [question for question in asked if takes(question)]

    def unasked(self, bundles: Sequence[GoldenBundle], modes: Sequence[Mode]) -> Unasked:
        """What the gate judges of the bundles and this selection leaves out; None where it leaves
        out the ends of cases."""
        if self.until is not None:
            return None
        whole, left = Selection(), list[CaseResult]()
        in_files = self.in_files(bundles), whole.in_files(bundles)
        for bundle in bundles:
            asked, wanted = (
                one.of(bundle, modes, in_files=bundle is file)
                for one, file in zip((self, whole), in_files, strict=True)
            )
            wanted += [] if asked else [Question("all", LOAD), Question("all", "close")]
            name = str(bundle.path)
            left += [CaseResult(name, *one) for one in wanted if one not in asked]
        return left

    def in_files(self, bundles: Sequence[GoldenBundle]) -> GoldenBundle | None:
        """The bundle whose model is also handed over in files: one for all, in whatever order."""
        if self.quick is None:
            return first_small(bundles)
        named = {one.bundle for one in self.quick.cases if one.case == FILES}
        return next((bundle for bundle in bundles if bundle.path.name in named), None)

    def takes_script(self, case: str) -> bool:
        """Whether this script is selected, as case and mode, or by neither: that of
        state_script.py, or that of file_script.py."""
        by_case = not self.cases or case in self.cases
        by_mode = not self.modes or SCRIPT in self.modes
        return by_case and by_mode and self.until is None


@dataclass(slots=True)
class GateResult:
    """All case results of a run. Nothing ran, or nothing asserted, is a failure.

    expectations  the file that the results were held to, if there is one
    unmet         why that file fails the run: stale or expired entries, too many near ties
    unknown       of which entries a part of the gate cannot tell whether they are stale
    quick         the quick corpus of which this is a run: not the whole gate
    part          what ran, in words, where it was something else than the gate or the quick corpus
    """

    results: list[CaseResult] = field(default_factory=list)
    expectations: Expectations | None = None
    unmet: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    quick: QuickCorpus | None = None
    part: str = ""

    @property
    def passed(self) -> bool:
        """Whether something was firmly asserted, nothing is bad, and the expectations are met;
        near ties are no failures, and what is excused is none."""
        bad = any(result.verdict.is_bad for result in self.results) or any(
            finding.verdict.is_bad for finding in self.findings
        )
        return not bad and not self.shortfall and not self.unmet

    @property
    def shortfall(self) -> str:
        """Why a run in which nothing is bad shows nothing either; "" where it shows something.

        The script asks what a session refuses and keeps: it asserts no number of a case.
        """
        if not any(result.comparisons for result in self.results):
            return "nothing was compared"
        asserting = [result for result in self.results if result.mode != SCRIPT] or self.results
        if not any(result.verdict is Verdict.PASS for result in asserting):
            if any(result.verdict is Verdict.EXCUSED for result in asserting):
                return (
                    "nothing was firmly asserted, as every case is excused, a near tie, blocked or "
                    "unsupported; excuse less, or judge more cases"
                )
            return (
                "nothing was firmly asserted, as every case is a near tie, blocked or unsupported; "
                "judge more cases, or show expert_ids"
            )
        return ""

    def hold(
        self,
        expectations: Expectations | None,
        bundles: Sequence[str | os.PathLike[str]],
        unasked: Unasked,
    ) -> None:
        """Excuse what is expected. `unasked`: what of `bundles` was not judged.

        Again with more results: what is excused already stays so.
        """
        if expectations is not None:
            expectations.hold(self.results)
            self.expectations = expectations
            self.unmet = unmet(expectations, self.results, bundles, unasked)
            self.unknown = unknown_lines(expectations, self.results, unasked)

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.results for finding in result.findings]

    def count(self, verdict: Verdict) -> int:
        return sum(result.verdict is verdict for result in self.results)


def run_gate(
    engine: Engine,
    bundles: Sequence[str | os.PathLike[str]],
    *,
    engine_name: str,
    options: Mapping[str, Any] | None = None,
    selection: Selection = Selection(),
    progress: Progress = lambda _: None,
    command: str = "kdtr",
    xray: bool = False,
    modes: Sequence[Mode] = MODES,
    of_case: OfCase = lambda model, _: model,
    expectations: Expectations | None = None,
    unblocked: bool = False,
) -> GateResult:
    """Judge the engine. `engine_name`, `options` and `command` are for the reproduction lines.

    xray          whether the x-ray models are read too
    unblocked     whether they are read although a golden case names a cause that is not excused
    modes         in which cases are driven, as far as they are selected
    of_case       the model that a case is driven on; None where the engine was not asked that case
    expectations  what the engine is known to do wrong
    Raises BundleError for a file that is not a golden bundle, before the engine sees any, and
    CaseError for a selection that selects nothing.
    """
    opened: list[GoldenBundle] = []
    unasked: Unasked = None
    gate = GateResult(quick=selection.quick, part="" if selection.is_whole else PART)
    try:
        for path in bundles:
            opened.append(GoldenBundle.open(path))
        _check_selection(opened, selection)
        unasked = selection.unasked(opened, modes)
        in_files = selection.in_files(opened)
        for bundle in opened:
            asked = selection.of(bundle, modes, in_files=bundle is in_files)
            if selection.quick is not None and not asked:
                continue
            judge = BundleJudge(
                engine,
                bundle,
                asked,
                until=selection.until,
                progress=progress,
                of_case=of_case,
            )
            gate.results += judge.all()
    finally:
        for bundle in opened:
            bundle.close()
    for result in gate.results:
        reproducible(result, engine_name, options or {}, command)
    if xray:
        # What is excused is known to fail, and must not hide what the x-ray models show besides.
        gate.hold(expectations, bundles, None)
        gate.results += xray_results(
            engine,
            () if unblocked else gate.findings,
            engine_name=engine_name,
            options=options or {},
            command=command,
            progress=progress,
            names=names_to_tell(gate.results),
        )
    elif unasked is not None:
        unasked = [*unasked, *(CaseResult(XRAY, model.name, XRAY) for model in xray_models())]
    gate.hold(expectations, bundles, unasked)
    return gate


def _check_selection(bundles: Sequence[GoldenBundle], selection: Selection) -> None:
    cases = [case.inputs for bundle in bundles for case in bundle.cases]
    known = {case.alias for case in cases} | {case.case_id for case in cases} | {CASE, FILES}
    unknown = sorted(selection.cases - known)
    if unknown:
        raise CaseError(
            f"no case {', '.join(unknown)}; the bundles have "
            f"{', '.join(dict.fromkeys(case.alias for case in cases))}"
        )
    selected = [case for case in cases if selection.takes(case)]
    points = {point for case in selected for point in case.points()}
    if selection.until is not None and selection.until not in points:
        in_order = sorted(points, key=lambda point: (point[0], len(point), point))
        subject = "no case has" if not selection.cases else "no selected case has"
        raise CaseError(
            f"{subject} a point {selection.until!r}; the points are {', '.join(in_order)}"
        )


def reproducible(
    result: CaseResult, engine_name: str, options: Mapping[str, Any], command: str = "kdtr"
) -> None:
    """Give each finding the command that shows it alone."""
    result.findings = [
        replace(finding, reproduce=_reproduce(finding.place, engine_name, options, command))
        for finding in result.findings
    ]


def _reproduce(
    place: Place, engine_name: str, options: Mapping[str, Any], command: str = "kdtr"
) -> str:
    words = [command, "gate", place.bundle, "--engine", engine_name, *option_words(options)]
    if place.case != "all":
        words += ["--case", place.case, "--mode", place.mode]
        if place.point not in ("open", "close") and place.mode != SCRIPT:
            words += ["--until", place.point]
    return shlex.join(words)
