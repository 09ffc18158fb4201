"""A mutant before the judge: every case in the gate's order, up to the first finding.

Where logits alone were shown and the gate's finding does not name the fault, the x-ray set is
asked too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kdtr.conformance.finding import Finding
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.mutant import Mutant
from kdtr.conformance.xray import run_xray
from kdtr.contract import EngineInfo


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one mutant.

    judged  cases, up to the one that killed it
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


def shown_whole(docket: Docket, mutant: Mutant, run: EngineRun) -> Trial:
    """With all stages shown: named is the declared stage and the rule, at first."""
    judged, finding = run.first(docket.in_gate_order)
    return _trial(judged, finding, mutant, by_stage=True)


def by_logits_alone(docket: Docket, mutant: Mutant, engine: Any) -> Trial:
    """Named is the rule, by the best explanation or by the x-ray set."""
    hidden = LogitsOnly(engine)
    run = EngineRun(docket, hidden)
    judged, finding = run.first(_small_models_first(docket))
    run.close()
    trial = _trial(judged, finding, mutant, by_stage=False)
    if trial.named:
        return trial
    read = run_xray(hidden).findings
    by_xray = _trial(judged + 1, read[0] if read else None, mutant, by_stage=False)
    return by_xray if by_xray.named or not trial.killed else trial


def _small_models_first(docket: Docket) -> Sequence[Entry]:
    """What a diagnosis costs grows with them, and which stages were recorded makes no difference
    here."""
    vocab = {name: bundle.config.vocab_size for name, bundle in docket.bundles.items()}
    return sorted(docket.in_gate_order, key=lambda one: vocab[one.bundle])


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
