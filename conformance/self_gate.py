"""`kdtr gate --self`: an engine against itself, with the model that it runs in production.

No weights, no golden numbers: the engine loads its model by whatever name it has for it, and its
own plain decoding says what the rows of its trees must be (FWD-4, FWD-5, LOSSLESS, SLOT-2,
COMMIT-3). What lies within its own noise is no difference.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kdtr.conformance import running
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.gate import GateResult
from kdtr.conformance.judge_bundle import Progress
from kdtr.conformance.noted_engine import noted
from kdtr.conformance.raised import RAISED, told, words
from kdtr.conformance.self_checks import CHECKS, Bench, Check, Wrong
from kdtr.conformance.self_model import SelfModel, load_self
from kdtr.conformance.self_noise import SelfNoise, coarsest_roundoff, measure
from kdtr.contract import Engine, KdtrError

SELF = "self"  # the mode's name
NOISE = "noise"  # the first check: what the others are measured by
MAX_LEN = 128  # slots of a session, unless told otherwise
_PROMPTS = (5, 17, 33)  # tokens, of which the noise is measured


@dataclass(frozen=True, slots=True)
class SelfRequest:
    """What to load and how to ask; `command` is for the reproduction lines.

    source      the model, in the engine's own words: a path, a name
    vocab_size  where the loaded model does not tell
    max_len     slots of a session
    only        names of checks; empty: all
    """

    source: str
    vocab_size: int | None = None
    max_len: int = MAX_LEN
    seed: int = 0
    only: frozenset[str] = frozenset()
    command: str = "kdtr"

    def line(self, engine_name: str, options: Mapping[str, Any], check: str) -> str:
        words = [self.command, "gate", "--self", "--engine", engine_name]
        for key, value in options.items():
            words += ["--engine-option", f"{key}={value!r}"]
        words += ["--model", self.source]
        if self.vocab_size is not None:
            words += ["--vocab-size", str(self.vocab_size)]
        if self.seed:
            words += ["--seed", str(self.seed)]
        if self.max_len != MAX_LEN:
            words += ["--max-len", str(self.max_len)]
        # The noise is measured in any case.
        return shlex.join(words if check == NOISE else [*words, "--case", check])


def run_self(
    engine: Engine,
    request: SelfRequest,
    *,
    engine_name: str,
    options: Mapping[str, Any] | None = None,
    progress: Progress = lambda _: None,
) -> GateResult:
    """Judge the engine against itself; the first check that fails blocks those after it.

    Raises UnsupportedError where the engine lacks what this needs, KdtrError of the engine's own
    where it refuses the model.
    """
    running.at("self")
    model = load_self(
        noted(engine), request.source, vocab_size=request.vocab_size, max_len=request.max_len
    )
    gate = GateResult(part="gate --self")
    try:
        _goes_on(NOISE, progress)
        noise, result = _noise(model, request)
        gate.results.append(result)
        blocked_by = "" if noise is not None else NOISE
        for name, check in CHECKS:
            if request.only and name not in request.only:
                continue
            _goes_on(name, progress)
            result = CaseResult(request.source, name, SELF)
            if blocked_by or noise is None:
                result.verdict, result.blocked = Verdict.BLOCKED, 1
                result.blocked_by = blocked_by
            else:
                _run(result, Bench(model, noise, request.seed), check)
                blocked_by = name if result.verdict.is_bad else ""
            gate.results.append(result)
    finally:
        closed = _close(model)
    gate.results += [] if closed is None else [closed]
    for result in gate.results:
        line = request.line(engine_name, options or {}, result.case)
        result.findings = [replace(finding, reproduce=line) for finding in result.findings]
    return gate


def _goes_on(check: str, progress: Progress) -> None:
    progress(check)
    running.at(f"{SELF} / {check}")


def _noise(model: SelfModel, request: SelfRequest) -> tuple[SelfNoise | None, CaseResult]:
    """The engine's noise; None where its answers for the same tokens are no answers to compare."""
    result = CaseResult(request.source, NOISE, SELF)
    bench = Bench(model, SelfNoise(0.0, "", 0, 0.0), request.seed)
    try:
        noise = measure(model, [bench.tokens(f"noise {n}", n) for n in _PROMPTS])
    except RAISED as error:
        _error(result, error)
        return None, result
    result.comparisons = result.rows = noise.samples
    if not noise.is_more_than_rounding(coarsest_roundoff(model)):
        return noise, result
    wrong = Wrong(
        ("FWD-1", "LOSSLESS"),
        NOISE,
        f"the engine's answers for the same tokens lie {noise.relative:.2g} of a row's scale "
        "apart, more than its declared precision explains",
        noise.worst,
        "chunks of a prompt, or rows of one call, are not independent",
    )
    _fail(result, wrong)
    return None, result


def _close(model: SelfModel) -> CaseResult | None:
    """What is wrong with closing the model."""
    try:
        model.model.close()
    except RAISED as error:
        result = CaseResult("model", "close", SELF)
        _error(result, error)
        return result
    return None


def _run(result: CaseResult, bench: Bench, check: Check) -> None:
    try:
        wrong = check(bench)
    except RAISED as error:
        _error(result, error)
        return
    result.points = 1
    result.comparisons = result.rows = bench.rows
    if bench.rows:
        result.saw(bench.headroom)
    if wrong is not None:
        _fail(result, wrong)
    elif bench.tie:
        result.verdict = Verdict.NEAR_TIE
        place = Place(result.bundle, result.case, SELF, "rounds")
        rules = ("LOSSLESS", "NUM-2")
        result.findings.append(Finding(Verdict.NEAR_TIE, place, "targets", bench.tie, rules=rules))


def _fail(result: CaseResult, wrong: Wrong) -> None:
    result.verdict = Verdict.FAIL
    place = Place(result.bundle, result.case, SELF, wrong.point)
    summary = wrong.summary + (
        f"; it looks like this: {wrong.looks_like}" if wrong.looks_like else ""
    )
    result.findings.append(
        Finding(Verdict.FAIL, place, "logits", summary, wrong.where, rules=wrong.rules)
    )


def _error(result: CaseResult, error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        raise error
    result.verdict = Verdict.ERROR
    place = Place(result.bundle, result.case, SELF, "answer")
    text = words(error) if isinstance(error, KdtrError) else f"the engine raised {told(error)}"
    result.findings.append(Finding(Verdict.ERROR, place, "answer", text))
