"""No rule is decoration: without the checks of any one of them, a fault passes.

The switch is here and not in the judge: of a faulty engine's findings those are dropped that cite
the rule, themselves or by their best explanation. What is left is what a judge without the rule
would say, and it says nothing. Most faults are at work in verify() alone, so that one mode shows
them, at the stage at which they begin; the case records every stage, and is judged in every mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import load_engine
from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.drive import MODES
from kdtr.conformance.file_script import judge_files
from kdtr.conformance.finding import Finding
from kdtr.conformance.judge import judge_case
from kdtr.conformance.mutants import MUTANTS, make_engine
from kdtr.conformance.mutants.families import VARIANTS
from kdtr.conformance.mutants.families.compaction import (
    _COLUMNS,
    _KEPT,
    _MOVES,
    _TOLD,
    _keeping,
    _moved,
    _placed,
)
from kdtr.conformance.mutants.families.family import call_of, result_of
from kdtr.conformance.mutants.families.masks import PREFIX, TREE, _seen
from kdtr.conformance.mutants.families.occasion import IN_VERIFY, Watch
from kdtr.conformance.mutants.families.slots import _LAWS, _OVER, _over, _written
from kdtr.conformance.mutants.planting import on_load, on_open, wrap
from kdtr.conformance.noise_floor import NoiseFloor
from kdtr.conformance.state_script import _CHECKS, judge_state
from kdtr.contract import STAGES, Acceptance, rules

Plant = Callable[[Any], None]


def _in_verify(plant: Callable[..., None]) -> Plant:
    return lambda engine: plant(engine, Watch(engine), IN_VERIFY)


def _times(operation: str, factor: float, part: int | None = None) -> Plant:
    """What the operation returns, or one of several, is multiplied."""

    def change(result: Any, now: Any, *args: Any) -> Any:
        if part is None:
            return result * np.float32(factor)
        return tuple(one * np.float32(factor) if i == part else one for i, one in enumerate(result))

    return _in_verify(result_of(operation, change))


def _linear(choose: Callable[[Any], list[Any]]) -> Plant:
    """What leaves these matrices is too large by a tenth."""

    def plant(engine: Any) -> None:
        watch, chosen = Watch(engine), list[Any]()

        def linear(original: Any, x: Any, weight: Any) -> Any:
            out = original(x, weight)
            is_one = any(weight is one for one in chosen)
            return out * np.float32(1.1) if is_one and IN_VERIFY.holds(watch.now) else out

        def loaded(weights: Any) -> Any:
            chosen[:] = choose(weights)
            return weights

        wrap(engine, linear=linear)
        on_load(engine, loaded)

    return plant


def _eps(kind: Callable[[Any], list[Any]]) -> Plant:
    """These norms take another eps."""

    def plant(engine: Any) -> None:
        watch, chosen = Watch(engine), list[Any]()

        def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
            is_one = any(weight is one for one in chosen)
            return original(x, weight, 0.1 if is_one and IN_VERIFY.holds(watch.now) else eps)

        def loaded(weights: Any) -> Any:
            chosen[:] = kind(weights)
            return weights

        wrap(engine, rms_norm=rms_norm)
        on_load(engine, loaded)

    return plant


def _latents(engine: Any) -> None:
    """c_kv is too large, as it is shown and as it is cached."""
    watch = Watch(engine)

    def append_normed(original: Any, cache: Any, layer: int, slots: Any, *rest: Any) -> Any:
        latents = original(cache, layer, slots, *rest)
        if not IN_VERIFY.holds(watch.now):
            return latents
        wrong = latents._replace(c_kv=latents.c_kv * np.float32(1.1))
        engine.kernels.append_latents(cache, layer, slots, wrong.c_kv, wrong.k_pe)
        return wrong

    wrap(engine, append_normed=append_normed)


def _experts_rolled(engine: Any) -> None:
    def change(result: Any, now: Any, scores: Any, *rest: Any) -> Any:
        ids, weights = result
        return np.sort((ids + 1) % scores.shape[1], axis=1), weights

    _in_verify(result_of("choose_experts", change))(engine)


def _angles(change: Callable[..., tuple[Any, Any, float]]) -> Plant:
    return _in_verify(call_of("rotary_angles", lambda original, now, *a: original(*change(*a))))


def _parents_as_told(engine: Any) -> None:
    """The last node hangs under the root, in every array that the forward is given."""

    def change(session: Any) -> None:
        stage, run = session._launcher.stage, session._launcher.run

        def faulty(name: str, rows: Any, program: Any, trace: Any) -> Any:
            if name == "verify" and rows.n > 2:
                rows.parents[-1] = 0
            return run(name, rows, program, trace)

        session._launcher.stage, session._launcher.run = stage, faulty

    on_open(engine, change)


def _accepts(change: Callable[[Acceptance, Any], Acceptance]) -> Plant:
    """accept() answers otherwise; round() walks on its own."""

    def on_session(session: Any) -> None:
        accept = session.accept
        session.accept = lambda tree, *rest, **limit: change(accept(tree, *rest, **limit), tree)

    return lambda engine: on_open(engine, on_session)


def _targets_high(session: Any) -> None:
    verify, vocab = session.verify, session._forward.config.vocab_size

    def faulty(tree: Any, **rest: Any) -> Any:
        done = verify(tree, **rest)
        return replace(done, targets=tuple((target + 1) % vocab for target in done.targets))

    session.verify = faulty


def _emits_the_root(session: Any) -> None:
    round_ = session.round

    def faulty(tree: Any, **rest: Any) -> Any:
        done = round_(tree, **rest)
        return replace(done, emitted=(*done.emitted[:-1], tree.tokens[0] - 1))

    session.round = faulty


def _variant(name: str) -> Plant:
    return VARIANTS[name].plant


def _mutant(number: str) -> Plant:
    return MUTANTS[number].plant


def _sessions(change: Callable[[Any], None]) -> Plant:
    return lambda engine: on_open(engine, change)


def _attention(name: str) -> Callable[[Any], list[Any]]:
    return lambda weights: [getattr(one.attention, name) for one in weights.layers]


# A fault that only this rule's checks stop, in the case and the script below.
WITNESSES: dict[str, Plant] = {
    "FWD-1": _variant("sessions: reset leaves the root, always"),
    "FWD-3": _mutant("M024"),
    "FWD-4": _times("embed", 1.1),
    "TREE-1": _parents_as_told,
    "TREE-2": _variant("tree arrays: build: tokens one too high, of any budget, in every build"),
    "TREE-3": _variant("tree arrays: build: tokens one too high, of any budget, in every build"),
    "TREE-4": _variant("tree arrays: build: one node too few, of any budget, in every build"),
    "POS-1": _in_verify(result_of("tree_layout", lambda r, now, *_: (r[0] + 1, r[1]))),
    "MASK-1": _in_verify(_seen(PREFIX["slot 0 is not seen"])),
    "MASK-2": _in_verify(_seen(TREE["siblings are seen"])),
    "MASK-3": _in_verify(result_of("verify_attn", lambda r, now, *_: r * np.float32("nan"))),
    "SLOT-1": _in_verify(_written(_LAWS["the last row is not written"])),
    "SLOT-2": _in_verify(_over(_OVER["slot 0 is written over too"])),
    "SLOT-3": _mutant("M064"),
    "PAD-1": _parents_as_told,
    "ACC-1": _accepts(lambda one, tree: Acceptance(one.path[:1], one.bonus)),
    "ACC-2": _accepts(lambda one, tree: Acceptance(one.path, (one.bonus + 1) % 61)),
    "ACC-3": _sessions(_emits_the_root),
    "ACC-4": _accepts(lambda one, tree: Acceptance(one.path, tree.tokens[0])),
    "COMMIT-1": _in_verify(
        _moved(_MOVES["nothing moves"], lambda n: slice(None), _COLUMNS[" of k_pe"])
    ),
    "COMMIT-2": _in_verify(_keeping(_KEPT["the whole tree"])),
    "COMMIT-3": _in_verify(_placed(_TOLD["one too high"])),
    "COMMIT-4": _in_verify(
        _moved(_MOVES["nothing moves"], lambda n: slice(None), _COLUMNS[" of c_kv"])
    ),
    "COMMIT-5": _variant("sessions: a commit of nothing is not refused, always"),
    "LOSSLESS": _linear(lambda weights: [weights.lm_head]),
    "MLA-1": _linear(_attention("q_b")),
    "MLA-2": _latents,
    "MLA-3": _times("verify_attn", 1.1),
    "MLA-4": _times("absorb_query", 1.1),
    "MLA-5": _angles(lambda p, f, a: (p, f, a * 1.1)),
    "MLA-6": _angles(lambda p, f, a: (p, f * 1.1, a)),
    "MLA-7": _angles(lambda p, f, a: (-p, f, a)),
    "NORM-1": _eps(lambda weights: [one.input_norm for one in weights.layers]),
    "MOE-1": _times("router_scores", 1.01),
    "MOE-2": _experts_rolled,
    "MOE-3": _times("choose_experts", 1.1, part=1),
    "MOE-4": _times("experts", 1.1),
    "NUM-2": _sessions(_targets_high),
    "NUM-4": _mutant("M155"),
}
# Rules that no check cites, and why.
# Judged by the case `files` alone: a mutant that breaks each.
OF_FILES = {"LOAD-1": "M137", "LOAD-2": "M135"}
UNCITED = {
    "FWD-2": "decode is a mode of its own, judged as the round of a root alone by the other rules",
    "FWD-5": "chains are cases of their own: what is wrong in them is wrong by FWD-4",
    "FWD-6": "what a prefill appends is judged by FWD-1 and COMMIT-2",
    "ACC-5": "no verb draws a token: sampling is the caller's, and its walk is that of ACC-1",
    "NUM-1": "a rule for the reference: how the truth is computed",
    "NUM-3": "a rule for the judge: what a bound is",
}


@pytest.fixture(scope="module")
def bundle() -> Iterator[GoldenBundle]:
    path = Path(__file__).parents[2] / "conformance" / "corpus" / "base.kdtr"
    bundle = GoldenBundle.open(path)
    yield bundle
    bundle.close()


def _findings(bundle: GoldenBundle, engine: Any) -> list[Finding]:
    """All that are bad, of the case that records every stage in every mode, and of the script."""
    (case,) = (one for one in bundle.cases if one.inputs.alias == "trees")
    model = engine.load((bundle.config, bundle.weights))
    noise = NoiseFloor.of_bundle(bundle, engine.info.profile).case(case)
    results = [
        judge_case("base", model, engine.info, bundle.config, case, noise, mode)
        for mode in MODES
        if mode.applies(case.inputs)
    ]
    results.append(judge_state("base", model, engine.info, bundle.config, case.inputs))
    found = [finding for result in results for finding in result.findings]
    return [finding for finding in found if finding.verdict.is_bad]


def _cites(finding: Finding, rule_id: str) -> bool:
    best = finding.looks_like[0].rules if finding.looks_like else ()
    return rule_id in (*finding.rules, *best)


def _host() -> Any:
    return load_engine("host", {"page_size": 3, "split_size": 5})


@pytest.mark.parametrize("rule_id", WITNESSES)
def test_without_a_rule_s_checks_a_fault_passes(bundle: GoldenBundle, rule_id: str) -> None:
    engine = _host()
    WITNESSES[rule_id](engine)

    found = _findings(bundle, engine)

    assert found, "the fault lives even with the rule"
    left = [one for one in found if not _cites(one, rule_id)]
    assert [] == [f"{one.place.mode}: {one.stage}: {one.summary}" for one in left]


def test_without_any_fault_there_is_nothing_to_drop(bundle: GoldenBundle) -> None:
    assert [] == _findings(bundle, _host())


def test_every_rule_that_is_checked_has_a_witness() -> None:
    by_stage = {rule_id for stage in STAGES for rule_id in stage.rules}
    by_script = {rule_id for check in _CHECKS for rule_id in check.rules}

    assert by_stage | by_script == set(WITNESSES)


def test_what_no_check_cites_has_a_reason() -> None:
    assert set(rules()) - set(WITNESSES) - set(OF_FILES) == set(UNCITED)


@pytest.mark.parametrize("rule", OF_FILES)
def test_without_a_rule_of_files_a_mutant_lives(bundle: GoldenBundle, rule: str) -> None:
    engine = make_engine(OF_FILES[rule])
    floor = NoiseFloor.of_bundle(bundle, engine.info.profile)

    found = judge_files("base", engine, engine.info, bundle, floor.case).findings

    assert found
    assert [] == [finding for finding in found if rule not in finding.rules]
