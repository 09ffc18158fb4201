"""The x-ray set: every model, asked and judged, and findings told once each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import ml_dtypes
import numpy as np

from kdtr.conformance import running
from kdtr.conformance.finding import Finding, Place, Verdict
from kdtr.conformance.noted_engine import noted
from kdtr.conformance.raised import RAISED, line_of, told
from kdtr.conformance.xray_drive import Answer, Remark, ask
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_judge import Judgement, judge_attention
from kdtr.conformance.xray_models import AttentionXray, attention_models
from kdtr.conformance.xray_norms import NormsXray, judge_norms, norms_model
from kdtr.conformance.xray_places import BUNDLE
from kdtr.conformance.xray_routing import RoutingXray, routing_models
from kdtr.conformance.xray_routing_judge import judge_routing
from kdtr.conformance.xray_sessions import Script, scripts
from kdtr.contract import STAGE, Engine, EngineInfo, ModelConfig, UnsupportedError

Progress = Callable[[str], None]
Judge = Callable[[Sequence[Answer], Precision], Judgement]

NOT_LOADED = "not loaded: "  # before the engine's words, in a note
NEEDED = frozenset({"prefill", "verify", "commit"})
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclass(frozen=True, slots=True)
class XrayModel:
    """A generated model with its sessions and the reader of its logits.

    undisturbed  attention must be right before this model can be judged
    """

    name: str
    why: str
    config: ModelConfig
    generate: Callable[[], dict[str, np.ndarray]]
    scripts: Callable[[], Sequence[Script]]
    judge: Judge
    undisturbed: bool = False

    def tensors(self, dtype: str = "bfloat16") -> dict[str, np.ndarray]:
        """The checkpoint; every weight is exact in each of DTYPES."""
        return {name: array.astype(DTYPES[dtype]) for name, array in self.generate().items()}


@dataclass(slots=True)
class ModelResult:
    """One model: pass, fail, error or unsupported, and how much was compared."""

    name: str
    verdict: Verdict
    rows: int = 0
    compared: int = 0
    headroom: float = 0.0
    seconds: float = 0.0
    note: str = ""


@dataclass(slots=True)
class XrayResult:
    models: list[ModelResult] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether something was compared, and nothing is bad."""
        bad = any(finding.verdict.is_bad for finding in self.findings)
        bad |= any(model.verdict.is_bad for model in self.models)
        return not bad and any(model.compared for model in self.models)


def xray_models() -> tuple[XrayModel, ...]:
    """Every x-ray model; the head sizes of real models come first, because findings do."""
    order = {"visible": 0, "k2": 1}
    attention = sorted(attention_models(), key=lambda model: order.get(model.name, 2))
    return (
        *(_of_attention(model) for model in attention),
        _of_norms(norms_model()),
        *(_of_routing(model) for model in routing_models()),
    )


def _of_attention(model: AttentionXray) -> XrayModel:
    def judge(answers: Sequence[Answer], precision: Precision) -> Judgement:
        return judge_attention(model, answers, precision)

    return XrayModel(
        model.name, model.why, model.config, model.tensors, lambda: [*scripts()], judge
    )


def _of_norms(model: NormsXray) -> XrayModel:
    def judge(answers: Sequence[Answer], precision: Precision) -> Judgement:
        return judge_norms(model, answers, precision)

    return XrayModel(
        model.name, model.why, model.config, model.tensors, model.scripts, judge, undisturbed=True
    )


def _of_routing(model: RoutingXray) -> XrayModel:
    def judge(answers: Sequence[Answer], precision: Precision) -> Judgement:
        return judge_routing(model, answers, precision)

    return XrayModel(model.name, model.why, model.config, model.tensors, model.scripts, judge)


def run_xray(
    engine: Engine,
    *,
    dtype: str | None = None,
    models: Sequence[XrayModel] | None = None,
    progress: Progress = lambda _: None,
) -> XrayResult:
    """Ask and judge. `dtype`: of the checkpoints, and the rounding that is granted; None: bfloat16
    checkpoints, and what the engine declares."""
    engine, info = noted(engine), engine.info
    lacking = sorted(NEEDED - set(info.verbs))
    if lacking:
        raise UnsupportedError(
            f"engine {info.name} does not offer {', '.join(lacking)}; "
            "an x-ray needs prefill, verify and commit"
        )
    precision = Precision.of(info.profile)
    if dtype is not None:
        precision = Precision(dtype, precision.sums)
    result, told_once = XrayResult(), _ToldOnce()
    for model in xray_models() if models is None else models:
        progress(model.name)
        running.at(f"{BUNDLE} / {model.name}")
        start = time.perf_counter()
        if model.undisturbed and told_once.findings:
            note = "not judged: it needs attention to be right"
            result.models.append(ModelResult(model.name, Verdict.UNSUPPORTED, note=note))
            continue
        one = _run(engine, info, model, precision, dtype or "bfloat16", told_once)
        one.seconds = time.perf_counter() - start
        result.models.append(one)
    result.findings = told_once.all()
    return result


def _run(
    engine: Engine,
    info: EngineInfo,
    model: XrayModel,
    precision: Precision,
    dtype: str,
    told_once: _ToldOnce,
) -> ModelResult:
    try:
        tensors = model.tensors(dtype)
        for array in tensors.values():
            array.flags.writeable = False
        loaded = engine.load((model.config, MappingProxyType(tensors)))
    except UnsupportedError as error:
        return ModelResult(model.name, Verdict.UNSUPPORTED, note=f"{NOT_LOADED}{line_of(error)}")
    except RAISED as error:
        text = f"load() raised {told(error)}"
        where = Place(BUNDLE, model.name, "load", "load")
        told_once.add(model.name, [Finding(Verdict.ERROR, where, "load", text)], [True])
        return ModelResult(model.name, Verdict.ERROR)
    answers = ask(loaded, info, model.scripts(), model.config.vocab_size)
    judged = Judgement()
    if answers.verified:
        judged = model.judge(answers.verified, precision)
    told_once.add(model.name, judged.findings, judged.known)
    remarks = _of_remarks(model.name, answers.remarks, told_once.findings)
    told_once.add(model.name, remarks, [True] * len(remarks))
    verdict = Verdict.FAIL if judged.findings or remarks else Verdict.PASS
    try:
        loaded.close()
    except RAISED as error:
        text = f"close() raised {told(error)}"
        where = Place(BUNDLE, model.name, "close", "close")
        told_once.add(model.name, [Finding(Verdict.ERROR, where, "close", text)], [True])
        verdict = Verdict.ERROR
    return ModelResult(
        model.name,
        verdict,
        judged.rows,
        judged.compared,
        judged.headroom,
    )


def _of_remarks(
    model: str, remarks: Sequence[Remark], findings: Sequence[Finding]
) -> list[Finding]:
    """One of each stage; an integer is not told where the logits told why it is wrong."""
    explained = {rule for finding in findings for rule in finding.rules}
    by_stage: dict[str, list[Remark]] = {}
    for remark in remarks:
        if not (remark.stage == "committed_len" and "COMMIT-2" in explained):
            by_stage.setdefault(remark.stage, []).append(remark)
    out = []
    for stage, (first, *more) in by_stage.items():
        verdict = Verdict.ERROR if first.ended else Verdict.FAIL
        text = first.text
        if more:
            text += f"; and {len(more)} more time{'s' * (len(more) > 1)}"
        where = Place(BUNDLE, model, first.script.name, first.point)
        out.append(Finding(verdict, where, stage, text, rules=first.rules))
    return out


class _ToldOnce:
    """A fault that several models show is told with the first; of one model all are told.

    A difference in words is no new fault where an earlier model has one of the same stage, or a
    known one of a stage before it: what follows is consequence.
    """

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._models: list[list[str]] = []
        self._known: list[bool] = []

    def add(self, model: str, findings: Sequence[Finding], known: Sequence[bool]) -> None:
        earlier = len(self.findings)
        for finding, is_known in zip(findings, known, strict=True):
            for i in range(earlier):
                if self._is_same(i, finding, is_known):
                    self._models[i].append(model)
                    break
            else:
                self.findings.append(finding)
                self._models.append([])
                self._known.append(is_known)

    def _is_same(self, i: int, finding: Finding, is_known: bool) -> bool:
        first = self.findings[i]
        if first.stage == finding.stage:
            return not is_known or first.rules[:1] == finding.rules[:1]
        order = [*STAGE]
        staged = first.stage in order and finding.stage in order
        before = staged and order.index(first.stage) < order.index(finding.stage)
        return before and self._known[i] and not is_known

    def all(self) -> list[Finding]:
        out = []
        for finding, models in zip(self.findings, self._models, strict=True):
            also = ", ".join(dict.fromkeys(models))
            where = ", ".join(filter(None, (finding.where, also and f"also in {also}")))
            out.append(replace(finding, where=where))
        return out
