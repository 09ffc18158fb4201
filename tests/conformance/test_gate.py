"""Honest engines pass in every mode; what was not compared is never passed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_engines
import pytest
from hostile_engines import Hostile, changing

from kdtr.conformance import GateResult, GoldenBundle, Selection, Verdict, load_engine, run_gate
from kdtr.contract import BundleError, CaseError, UnsupportedError, Verified

Judge = Callable[..., GateResult]

# Each mode applies to each case; plain decoding, to the case of lone roots.
MODES_OF = {
    "ar": {"stepwise", "round", "shipped", "decode", "forward"},
    "y-tree": {"stepwise", "round", "shipped", "forward"},
    "best-first": {"stepwise", "round", "shipped", "forward"},
    "from-root": {"stepwise", "round", "shipped", "forward"},
}


def verdicts(gate: GateResult) -> dict[tuple[str, str], Verdict]:
    return {(result.case, result.mode): result.verdict for result in gate.results}


ALL_PASS = {(case, mode): Verdict.PASS for case, modes in MODES_OF.items() for mode in modes}


@pytest.mark.parametrize(("page_size", "split_size"), [(1, 1), (1, 64), (3, 5), (16, 5), (16, 64)])
def test_the_host_engine_passes(judge: Judge, tiny: Path, page_size: int, split_size: int) -> None:
    gate = judge(
        "host", tiny, *MODES_OF, until="round1", page_size=page_size, split_size=split_size
    )

    assert gate.passed
    assert [] == gate.findings
    assert ALL_PASS == verdicts(gate)
    assert all(result.headroom is not None and result.headroom < 1 for result in gate.results)


@pytest.mark.parametrize(
    "options",
    [{"arithmetic": "fixed"}, {"arithmetic": "fast"}, {"arithmetic": "fixed", "cache": "scratch"}],
    ids=["fixed", "fast", "scratch"],
)
def test_the_reference_passes(judge: Judge, tiny: Path, options: dict[str, str]) -> None:
    cases = ("ar", "y-tree", "from-root")
    gate = judge("reference", tiny, *cases, until="round0", **options)

    assert gate.passed
    assert {(case, mode) for case in cases for mode in MODES_OF[case]} == set(verdicts(gate))
    assert {Verdict.PASS} == set(verdicts(gate).values())


def test_the_reference_is_its_own_truth_to_the_bit(judge: Judge, tiny: Path) -> None:
    gate = judge("reference", tiny, "y-tree", until="round0")

    assert {0.0} == {result.headroom for result in gate.results}


def test_every_stage_is_shown_by_the_host_engine(judge: Judge, tiny: Path) -> None:
    gate = judge("host", tiny, "y-tree", "best-first", until="round1")

    assert {"build_parents", "build_tokens", "moves", "emitted"} & set().union(
        *(result.unshown for result in gate.results)
    ) == set()


# What is left out


def test_a_selection_that_selects_nothing_is_refused(judge: Judge, small: Path) -> None:
    with pytest.raises(CaseError) as refusal:
        judge("host", small, "z", "y")

    assert "no case z; the bundles have y, ar, drafted, from-root" == str(refusal.value)


def test_a_point_that_no_case_has_is_refused(judge: Judge, small: Path) -> None:
    with pytest.raises(CaseError) as refusal:
        judge("host", small, until="round9")

    assert "no case has a point 'round9'; the points are chunk0, round0, round1" == str(
        refusal.value
    )


def test_a_mode_that_applies_to_none_of_the_cases_fails(judge: Judge, small: Path) -> None:
    gate = judge("host", small, "y", modes=["decode"])

    assert [] == gate.results
    assert not gate.passed


def test_nothing_compared_fails_with_exit_code_1(
    kdtr: Callable[..., SimpleNamespace], small: Path
) -> None:
    run = kdtr("gate", small, "--engine", "host", "--case", "y", "--mode", "decode")

    assert 1 == run.code
    assert "gate FAILED: nothing was compared: no case ran; 0 comparisons of 0 rows" in run.out


def test_a_case_is_selected_by_alias_or_id(judge: Judge, small: Path) -> None:
    ids = judge("host", small, "ar", modes=["round"])
    bundle = GoldenBundle.open(small)
    case_id = bundle.cases[1].inputs.case_id
    bundle.close()

    by_id = judge("host", small, case_id, modes=["round"])

    assert verdicts(ids) == verdicts(by_id) == {("ar", "round"): Verdict.PASS}


def test_several_bundles_are_judged_in_turn(small: Path, tiny: Path) -> None:
    selection = Selection(frozenset({"y", "from-root"}), frozenset({"round"}))

    gate = run_gate(load_engine("host"), [small, tiny], engine_name="host", selection=selection)

    assert [(str(small), "y"), (str(small), "from-root"), (str(tiny), "from-root")] == [
        (result.bundle, result.case) for result in gate.results
    ]
    assert gate.passed


def test_a_bad_bundle_is_refused_before_the_engine_sees_the_good_one(
    small: Path, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.kdtr"
    bad.write_bytes(small.read_bytes()[:-1])
    seen: list[Any] = []
    engine = Hostile({"load": lambda original, source: seen.append(source)})

    with pytest.raises(BundleError, match=r"bad\.kdtr: "):
        run_gate(engine, [small, bad], engine_name="x")

    assert [] == seen


# Engines that offer or show less


def offering(*verbs: str, stages: frozenset[str] | None = None, **answers: Any) -> Hostile:
    def info(honest: Any) -> Any:
        kept = honest.stages if stages is None else stages
        return replace(honest, verbs=frozenset(verbs), stages=kept)

    return Hostile(answers, info=info)


def test_prefill_verify_commit_are_enough(judge: Judge, small: Path) -> None:
    gate = judge(offering("prefill", "verify", "commit"), small)

    assert gate.passed
    expected = {
        (case, mode): Verdict.UNSUPPORTED
        for case, modes in {
            "y": {"round", "shipped", "forward"},
            "ar": {"round", "shipped", "decode", "forward"},
            "drafted": {"round", "shipped", "forward"},
            "from-root": {"stepwise", "round", "shipped", "forward"},
        }.items()
        for mode in modes
    }
    expected |= {(case, "stepwise"): Verdict.PASS for case in ("y", "ar", "drafted")}
    expected["state", "script"] = expected["files", "script"] = Verdict.PASS
    assert expected == verdicts(gate)
    stepwise = {result.case: result for result in gate.results if result.mode == "stepwise"}
    not_offered = {
        *("untouched", "copied", "path", "bonus", "build_parents", "build_tokens"),
        *("cache_tokens", "cache_positions", "cache_c_kv", "cache_k_pe"),
    }
    assert not_offered == stepwise["drafted"].unshown
    assert {"set_root()"} == stepwise["from-root"].unshown
    assert 0 == stepwise["from-root"].comparisons


def test_unsupported_is_said_on_the_table_and_not_passed(
    kdtr: Callable[..., SimpleNamespace], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [offering("prefill", "verify", "commit")])

    run = kdtr("gate", small, "--engine", "hostile_engines:make_engine", "--case", "y")

    assert 0 == run.code
    assert "round: not offered, needs round()" in run.out
    assert "not shown, so neither passed nor failed; worth showing in this order:" in run.out
    assert "\npart of the gate passed: 1 pass, 3 unsupported; " in run.out


def refusing(text: str) -> Hostile:
    def load(original: Any, source: Any) -> Any:
        raise UnsupportedError(text)

    return Hostile({"load": load})


def test_a_model_that_the_engine_refuses_is_unsupported_and_not_passed(
    judge: Judge, small: Path
) -> None:
    gate = judge(refusing("scoring_func = 'softmax'; expected 'sigmoid'"), small)

    (result,) = gate.results
    assert not gate.passed
    assert ("all", "load", Verdict.UNSUPPORTED) == (result.case, result.mode, result.verdict)
    assert "scoring_func = 'softmax'; expected 'sigmoid'" == result.refused
    assert (0, []) == (result.comparisons, result.findings)


def test_the_report_says_which_model_was_refused_and_why(
    kdtr: Callable[..., SimpleNamespace], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [refusing("no softmax; expected 'sigmoid'")])

    run = kdtr("gate", small, "--engine", "hostile_engines:make_engine")

    assert 1 == run.code
    said = " ".join(run.out.split())  # lines may be wrapped
    assert f"{small.name}, visible, " in said
    assert ": not loaded: no softmax; expected 'sigmoid'" in said
    assert "gate FAILED: nothing was compared" in said


@pytest.mark.parametrize("verbs", [(), ("prefill",), ("snapshot", "accept"), ("verify", "commit")])
def test_an_engine_that_offers_too_little_fails(
    judge: Judge, small: Path, verbs: tuple[str, ...]
) -> None:
    gate = judge(offering(*verbs), small)

    assert not gate.passed
    assert {Verdict.UNSUPPORTED} == {result.verdict for result in gate.results}
    assert {0} == {result.comparisons for result in gate.results}
    assert all(result.unshown for result in gate.results)


ALL_VERBS = load_engine("host").info.verbs


def test_an_engine_that_shows_no_stage_is_judged_by_its_answers(judge: Judge, small: Path) -> None:
    gate = judge(offering(*ALL_VERBS, stages=frozenset()), small, "y")

    assert gate.passed
    by_mode = {result.mode: result for result in gate.results}
    assert {"stepwise", "round", "forward"} == set(by_mode)
    assert {"mask", "positions", "scores", "expert_ids", "hidden"} <= by_mode["stepwise"].unshown
    assert "targets" in by_mode["round"].unshown
    assert "logits" not in by_mode["forward"].unshown  # forward_tokens returns them
    # logits, targets, path, bonus, untouched, and six of the session after the commit
    assert 2 * 11 + 6 == by_mode["stepwise"].comparisons


def test_it_is_not_asked_for_a_trace(judge: Judge, small: Path) -> None:
    def no_keyword(original: Any, tree: Any) -> Any:
        return original(tree)

    gate = judge(offering(*ALL_VERBS, stages=frozenset(), verify=no_keyword), small, "y")

    assert gate.passed


def test_an_engine_without_logits(judge: Judge, small: Path) -> None:
    targets_only = changing(lambda verified: Verified(None, verified.targets))
    engine = offering("prefill", "verify", "commit", stages=frozenset(), verify=targets_only)

    gate = judge(engine, small, "y", modes=["stepwise"])

    assert gate.passed
    assert "logits" in gate.results[0].unshown
    assert 3 + 3 + 2 == gate.results[0].comparisons  # targets, length and root


def test_a_declared_stage_that_is_not_shown_is_an_error(judge: Judge, small: Path) -> None:
    def show(trace: Any, stage: str, layer: int | None, array: Any) -> None:
        if stage != "k_pe":
            trace(stage, layer, array)

    gate = judge(Hostile(show=show), small, "y")

    assert not gate.passed
    by_mode = {result.mode: result.verdict for result in gate.results}
    assert Verdict.PASS is by_mode.pop("shipped")  # nobody asks for a stage there
    assert {"stepwise", "round", "forward"} == set(by_mode)
    assert {Verdict.ERROR} == set(by_mode.values())
    assert {"the engine declares the stage k_pe, but did not show it of layer 0"} == {
        finding.summary for finding in gate.findings
    }
    assert all("k_pe" not in result.unshown for result in gate.results)


def test_until_ends_each_case_that_has_the_point(judge: Judge, small: Path) -> None:
    gate = judge("host", small, modes=["round"], until="round1")

    assert {"y": 3, "ar": 3, "drafted": 2, "from-root": 1} == {
        result.case: result.points for result in gate.results
    }
    assert {0} == {result.blocked for result in gate.results}


def test_sessions_and_model_are_closed_and_progress_is_told(small: Path) -> None:
    closed: list[str] = []
    told: list[str] = []

    def close(name: str) -> Callable[..., Any]:
        return lambda original: (closed.append(name), original())

    run_gate(
        Hostile({"close": close("session"), "model_close": close("model")}),
        [small],
        engine_name="x",
        selection=Selection(frozenset({"y", "ar"})),
        progress=told.append,
    )

    assert ["session"] * 9 + ["model"] == closed
    modes = ("stepwise", "round", "shipped", "decode", "forward")
    assert [f"ar / {mode}" for mode in modes] == told[:5]  # plain decoding first: it is smoke
    assert [f"y / {mode}" for mode in modes if mode != "decode"] == told[5:]


def test_a_whole_run_ends_with_the_scripts(small: Path) -> None:
    """Of each bundle what a session refuses, and of the first small one its files."""
    told: list[str] = []

    gate = run_gate(load_engine("host"), [small, small], engine_name="x", progress=told.append)

    assert gate.passed
    assert ["state / script"] == told[-1:]
    assert 2 == told.count("state / script")
    assert 1 == told.count("files / script")
    assert ("state", "script") == (gate.results[-1].case, gate.results[-1].mode)


# As it ships


def test_an_engine_that_is_wrong_only_when_not_traced(judge: Judge, small: Path) -> None:
    """A fused kernel that the traced path replaces: only `shipped` runs it."""

    def round_(original: Any, tree: Any, **rest: Any) -> Any:
        done = original(tree, **rest)
        return done if "trace" in rest else replace(done, emitted=(*done.emitted[:-1], 0))

    gate = judge(Hostile({"round": round_}), small, "y")

    by_mode = {result.mode: result.verdict for result in gate.results}
    assert Verdict.FAIL is by_mode.pop("shipped")
    assert {Verdict.PASS} == set(by_mode.values())
    (finding,) = gate.findings
    assert ("emitted", "ACC-3") == (finding.stage, finding.rules[0])


def test_a_forward_that_is_wrong_only_when_not_traced(judge: Judge, small: Path) -> None:
    """Its rows land in the cache, and its decisions on the path."""

    def prefill(original: Any, tokens: Any, **rest: Any) -> Any:
        return original(tokens if "trace" in rest else tokens[::-1], **rest)

    gate = judge(Hostile({"prefill": prefill}), small, "y")

    assert {"shipped"} == {f.place.mode for f in gate.findings}
    assert not gate.passed


def test_an_engine_without_stages_always_runs_as_it_ships(judge: Judge, small: Path) -> None:
    gate = judge(offering(*ALL_VERBS, stages=frozenset()), small, modes=["shipped"])

    assert [] == gate.results
    assert not gate.passed


def test_every_comparison_is_there_as_data(small: Path) -> None:
    """What a report or a table is made of, beside the counts of the terminal."""
    gate = run_gate(
        load_engine("host"), [small], engine_name="host", selection=Selection(frozenset({"y"}))
    )

    for result in gate.results:
        compared = result.compared
        assert result.comparisons == len(compared)
        assert result.rows == sum(one.rows for one in compared)
        assert result.headroom == max(
            (one.headroom for one in compared if one.headroom is not None), default=None
        )
        assert all(one.same for one in compared)
    stepwise = next(result for result in gate.results if result.mode == "stepwise")
    assert {"mask", "logits", "cache_c_kv"} <= {one.stage for one in stepwise.compared}
    assert {0, None} <= {one.layer for one in stepwise.compared}
