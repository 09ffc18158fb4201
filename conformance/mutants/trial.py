"""A mutant before the judge: every case in the gate's order, up to the first finding.

The order is that of `kdtr gate`: bundle by bundle, plain decoding and chains first, each case in
every mode, the script last, and of the first small model its files; and the x-ray set, where
logits alone were shown and the gate's finding does not name the fault.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.drive import MODES
from kdtr.conformance.file_script import first_small, judge_files
from kdtr.conformance.finding import Finding
from kdtr.conformance.judge import judge_case
from kdtr.conformance.mutants.mutant import Mutant
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor
from kdtr.conformance.smoke import smoke_first
from kdtr.conformance.state_script import judge_state, suits
from kdtr.conformance.xray import run_xray
from kdtr.contract import EngineInfo, NumericProfile


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one mutant.

    judged  case and mode pairs, up to the one that killed it
    where   that one and the point: "base: y / round / round0"; "" where the mutant lives
    stage   of the first finding
    rules   that the finding cites, and its best explanation
    says    the finding in a line, with its best explanation
    named   whether that is the mutant's own fault
    """

    judged: int
    where: str = ""
    stage: str = ""
    rules: tuple[str, ...] = ()
    says: str = ""
    named: bool = False

    @property
    def killed(self) -> bool:
        return bool(self.where)


class LogitsOnly:
    """An engine that shows no stage and no cache: what its verbs answer, and nothing else."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        info: EngineInfo = self._engine.info
        return replace(info, stages=frozenset(), verbs=info.verbs - {"snapshot"})

    def load(self, source: Any) -> Any:
        return self._engine.load(source)


class Court:
    """The bundles, opened once: what rounding may do to a case is the same for every mutant."""

    def __init__(self, bundles: Sequence[str | os.PathLike[str]]) -> None:
        self._bundles = [GoldenBundle.open(path) for path in bundles]
        self._floors: dict[str, NoiseFloor] = {}
        self._noise: dict[tuple[str, str], CaseNoise] = {}

    def __enter__(self) -> Court:
        return self

    def __exit__(self, *_: object) -> None:
        for bundle in self._bundles:
            bundle.close()

    def try_shown(self, mutant: Mutant, engine: Any) -> Trial:
        """With all stages shown: named is the declared stage and the rule, at first."""
        judged, finding = self._first(engine, self._bundles)
        return _trial(judged, finding, mutant, by_stage=True)

    def try_logits_only(self, mutant: Mutant, engine: Any) -> Trial:
        """With logits alone: named is the rule, by the best explanation or by the x-ray set."""
        hidden = LogitsOnly(engine)
        # Small models first: what a diagnosis costs grows with them, and which stages were
        # recorded makes no difference here.
        small_first = sorted(self._bundles, key=lambda bundle: bundle.config.vocab_size)
        judged, finding = self._first(hidden, small_first)
        trial = _trial(judged, finding, mutant, by_stage=False)
        if trial.named:
            return trial
        read = run_xray(hidden).findings
        by_xray = _trial(judged + 1, read[0] if read else None, mutant, by_stage=False)
        return by_xray if by_xray.named or not trial.killed else trial

    def _first(self, engine: Any, bundles: Sequence[GoldenBundle]) -> tuple[int, Finding | None]:
        """How many case and mode pairs were judged, and the first finding that is no near tie."""
        judged = 0
        for findings in self._findings(engine, bundles):
            judged += 1
            bad = [finding for finding in findings if finding.verdict.is_bad]
            if bad:
                return judged, bad[0]
        return judged, None

    def _findings(self, engine: Any, bundles: Sequence[GoldenBundle]) -> Iterator[list[Finding]]:
        info: EngineInfo = engine.info
        in_files = first_small(bundles)
        for bundle in bundles:
            model = engine.load((bundle.config, bundle.weights))
            name = bundle.path.stem
            for case in smoke_first(bundle.cases):
                for mode in MODES:
                    if not mode.applies(case.inputs) or not (mode.traces or info.stages):
                        continue
                    noise = self._case_noise(bundle, case, info.profile)
                    yield judge_case(name, model, info, bundle.config, case, noise, mode).findings
            script = next((case.inputs for case in bundle.cases if suits(case.inputs)), None)
            if script is not None:
                yield judge_state(name, model, info, bundle.config, script).findings
            if bundle is in_files:
                noise_of = partial(self._case_noise, bundle, profile=info.profile)
                yield judge_files(name, engine, info, bundle, noise_of).findings
            model.close()

    def _case_noise(
        self, bundle: GoldenBundle, case: GoldenCase, profile: NumericProfile
    ) -> CaseNoise:
        path = str(bundle.path)
        if path not in self._floors:
            self._floors[path] = NoiseFloor.of_bundle(bundle, profile)
        key = (path, case.inputs.case_id)
        if key not in self._noise:
            self._noise[key] = self._floors[path].case(case)
        return self._noise[key]


def _trial(judged: int, finding: Finding | None, mutant: Mutant, *, by_stage: bool) -> Trial:
    if finding is None:
        return Trial(judged)
    hint = finding.looks_like[0] if finding.looks_like else None
    rules = tuple(dict.fromkeys((*finding.rules, *(hint.rules if hint else ()))))
    place = finding.place
    where = f"{place.bundle}: {place.case} / {place.mode} / {place.point}"
    says = f"{finding.stage}: {finding.summary}" + (
        f", at {finding.where}" if finding.where else ""
    )
    if hint is not None:
        says += f"; looks like {hint}"
    at_stage = finding.stage == mutant.stage
    named = bool({*mutant.rules} & {*rules}) and (at_stage or not by_stage)
    return Trial(judged, where, finding.stage, rules, says, named)
