"""The script of refusals: each check has an engine that fails it, and honest ones pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_engines
import numpy as np
import pytest
from hostile_engines import Answer, Hostile, changing, raising

from kdtr.conformance import CaseResult, GateResult, Verdict
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.state_script import _CHECKS
from kdtr.contract import Acceptance, CacheError, KdtrError, Verified

Judge = Callable[..., GateResult]


def script(judge: Judge, engine: Any, bundle: Path, **options: Any) -> CaseResult:
    (result,) = judge(engine, bundle, "state", modes=["script"], **options).results
    return result


@pytest.mark.parametrize("name", ["host", "reference"])
def test_both_honest_engines_pass_every_check(judge: Judge, small: Path, name: str) -> None:
    result = script(judge, name, small)

    assert Verdict.PASS is result.verdict
    assert len(_CHECKS) == result.points == result.comparisons
    assert set() == result.unshown


# Faults: answers in place of a session's verbs; `original` is the session's own method.


def takes_any_root(original: Any, tree: Any, **rest: Any) -> Any:
    return original(replace(tree, tokens=(original.__self__.root, *tree.tokens[1:])), **rest)


def takes_foreign_token(original: Any, tree: Any, **rest: Any) -> Any:
    """Ids wrap around the table."""
    return original(replace(tree, tokens=tuple(t % 37 for t in tree.tokens)), **rest)


def ignores_capacity(original: Any, tree: Any, **rest: Any) -> Any:
    try:
        return original(tree, **rest)
    except CacheError:
        return Verified(None, (0,) * len(tree))


def one_slot_too_strict(original: Any, tree: Any, **rest: Any) -> Any:
    session = original.__self__
    if session.committed_len + len(tree) == session._cache.capacity:
        raise CacheError("full")
    return original(tree, **rest)


def commits_nothing_gladly(original: Any, acceptance: Any) -> None:
    if original.__self__._pending is not None:
        original(acceptance)


def commits_twice(original: Any, acceptance: Any) -> None:
    session = original.__self__
    pending = session._pending
    original(acceptance)
    session._pending = pending


def commits_any_path(original: Any, acceptance: Any) -> None:
    try:
        original(acceptance)
    except KdtrError:
        if original.__self__._pending is None:
            raise
        original(Acceptance((0,), acceptance.bonus))


def drops_the_pending_on_refusal(original: Any, acceptance: Any) -> None:
    """Refused, but L has grown by then."""
    session = original.__self__
    if session._pending is None:
        session._advance([0], [0], session.root)
    original(acceptance)


def zeroes_on_second_verify(original: Any, tree: Any, **rest: Any) -> Any:
    session = original.__self__
    second = session._pending is not None
    answer = original(tree, **rest)
    if second:
        session._cache.rows[...] = 0
    return answer


def other_targets_the_second_time(original: Any, tree: Any, **rest: Any) -> Any:
    second = original.__self__._pending is not None
    answer = original(tree, **rest)
    targets = tuple((t + 1) % 37 for t in answer.targets)
    return replace(answer, targets=targets) if second else answer


def other_bits_the_second_time(original: Any, tree: Any, **rest: Any) -> Any:
    second = original.__self__._pending is not None
    answer = original(tree, **rest)
    return replace(answer, logits=np.nextafter(answer.logits, np.float32(9))) if second else answer


def resets_nothing(original: Any) -> None:
    pass


def reset_keeps_the_root(original: Any) -> None:
    session = original.__self__
    root = session.root
    original()
    session._root = root


def keeps_pending_after_set_root(original: Any, token: int) -> None:
    session = original.__self__
    pending = session._pending
    original(token)
    session._pending = pending


def sets_no_root(original: Any, token: int) -> None:
    session = original.__self__
    root = session.root
    original(token)
    session._root = root


def other_bits_after_the_first_round() -> Answer:
    rounds: list[int] = []

    def rounds_otherwise(original: Any, tree: Any, **rest: Any) -> Any:
        answer = original(tree, **rest)
        if rounds:
            rows = original.__self__._cache.rows
            rows[...] = np.nextafter(rows, np.float32(9))
        rounds.append(1)
        return answer

    return rounds_otherwise


FAULTS: list[tuple[str, Answer, set[str]]] = [
    ("verify", takes_any_root, {"verify under another root"}),
    ("verify", takes_foreign_token, {"verify of a token outside the vocabulary"}),
    ("verify", ignores_capacity, {"verify one slot over capacity"}),
    ("verify", one_slot_too_strict, {"verify one slot over capacity"}),
    (
        "commit",
        commits_nothing_gladly,
        {"commit of nothing", "second commit", "set_root after verify"},
    ),
    ("commit", commits_twice, {"second commit"}),
    ("commit", commits_any_path, {"commit of a path that is not the tree's"}),
    (
        "commit",
        drops_the_pending_on_refusal,
        {"commit of nothing", "second commit", "set_root after verify"},
    ),
    ("verify", zeroes_on_second_verify, {"second verify", "another session at work"}),
    ("verify", other_targets_the_second_time, {"second verify", "another session at work"}),
    ("verify", other_bits_the_second_time, {"second verify"}),
    ("round", other_bits_after_the_first_round(), {"same round again"}),
    ("set_root", sets_no_root, {"set_root"}),
    ("reset", resets_nothing, {"reset"}),
    ("reset", reset_keeps_the_root, {"reset"}),
    ("set_root", keeps_pending_after_set_root, {"set_root after verify"}),
]


@pytest.mark.parametrize(
    ("verb", "answer", "stopped_by"), FAULTS, ids=lambda x: getattr(x, "__name__", "")
)
def test_a_fault_is_stopped_by_its_check(
    judge: Judge, small: Path, verb: str, answer: Answer, stopped_by: set[str]
) -> None:
    result = script(judge, Hostile({verb: answer}), small)

    assert Verdict.FAIL is result.verdict
    assert stopped_by == {finding.place.point for finding in result.findings}
    by_name = {check.name: check.rules for check in _CHECKS}
    for finding in result.findings:
        assert by_name[finding.stage] == finding.rules


def leaking() -> Hostile:
    """A prefill writes over the rows of the session that ran before."""
    sessions: list[Any] = []

    def prefill(original: Any, tokens: Any, **rest: Any) -> Any:
        session = original.__self__
        for other in sessions:
            if other is not session and other._forward is not None:
                other._cache.rows[...] = 0
        sessions.append(session)
        return original(tokens, **rest)

    return Hostile({"prefill": prefill})


def test_a_session_that_another_one_overwrites(judge: Judge, small: Path) -> None:
    result = script(judge, leaking(), small)

    assert {"another session at work"} == {finding.place.point for finding in result.findings}
    assert ("SLOT-2",) == result.findings[0].rules


def test_every_check_has_a_fault() -> None:
    covered = set().union(*(stopped_by for _, _, stopped_by in FAULTS))

    assert {check.name for check in _CHECKS} == covered | {"another session at work"}


def test_a_refusal_in_foreign_words(judge: Judge, small: Path) -> None:
    result = script(judge, Hostile({"commit": raising(ValueError("no"))}), small)

    texts = {finding.stage: finding.summary for finding in result.findings}
    assert texts["commit of nothing"] == (
        "raised ValueError: no; expected a KdtrError: an engine refuses in its own words"
    )
    assert texts["second commit"].startswith(
        "the engine raised ValueError: no (at hostile_engines.py:"
    )


@pytest.mark.parametrize(
    ("verb", "change", "text"),
    [
        ("verify", lambda _: None, "verify() returned None; expected a Verified"),
        (
            "verify",
            lambda v: Verified(v.logits, iter(v.targets)),
            "verify() targets are a tuple_iterator; expected a sequence of integers",
        ),
        ("round", lambda _: None, "round() returned None; expected a Round"),
        (
            "round",
            lambda r: replace(r, emitted=iter(r.emitted)),
            "round() emitted are a tuple_iterator; expected a sequence of integers",
        ),
        ("root", str, "root returned a str; expected an integer"),
        (
            "root",
            lambda _: None,
            "root is None after prefill(); expected the target of its last row",
        ),
    ],
)
def test_what_is_no_answer_is_an_error_and_told_once(
    judge: Judge, small: Path, verb: str, change: Callable[[Any], Any], text: str
) -> None:
    result = script(judge, Hostile({verb: changing(change)}), small)

    (told,) = (one for one in result.findings if one.verdict is Verdict.ERROR)
    assert ("answer", text, ()) == (told.stage, told.summary, told.rules)


def test_an_answer_of_the_wrong_form_breaks_no_rule_and_is_told_once(
    judge: Judge, small: Path
) -> None:
    """NUM-4 is about bits of logits; those of a dtype that nobody asked for are not judged."""

    def change(honest: Verified) -> Verified:
        return Verified(np.asarray(honest.logits).astype(np.longdouble), honest.targets)

    def info(honest: Any) -> Any:
        return replace(honest, profile=replace(honest.profile, deterministic=True))

    result = script(judge, Hostile({"verify": changing(change)}, info=info), small)

    (finding,) = result.findings
    assert Verdict.ERROR is finding.verdict is result.verdict
    assert ("answer", ()) == (finding.stage, finding.rules)
    assert finding.summary.startswith(f"verify() logits is {np.dtype(np.longdouble)}; expected ")
    assert len(_CHECKS) == result.points


# What is asked


def test_what_an_engine_does_not_offer_is_not_asked(judge: Judge, small: Path) -> None:
    def info(honest: Any) -> Any:
        return replace(honest, verbs=frozenset({"prefill", "verify", "commit"}))

    result = script(judge, Hostile(info=info), small)

    assert Verdict.PASS is result.verdict
    assert {"reset()", "round()", "set_root()"} == result.unshown
    assert len(_CHECKS) - 4 == result.points


def test_too_few_verbs_are_unsupported(judge: Judge, small: Path) -> None:
    def info(honest: Any) -> Any:
        return replace(honest, verbs=frozenset({"prefill", "round"}))

    result = script(judge, Hostile(info=info), small)

    assert (Verdict.UNSUPPORTED, 0) == (result.verdict, result.comparisons)
    assert {"verify()", "commit()"} <= result.unshown


def test_a_bundle_of_lone_roots_has_no_script(judge: Judge, record: Callable[..., Path]) -> None:
    plan = CasePlan("ar", "", ("FWD-2",), (Planted((-1,)),), ((3, 1),))

    gate = judge("host", record([plan]))

    assert {"ar", "files"} == {result.case for result in gate.results}


@pytest.mark.parametrize("until", [None, "round0"])
@pytest.mark.parametrize("selected", [("y",), ("state",), ()])
def test_when_the_script_runs(
    judge: Judge, small: Path, selected: tuple[str, ...], until: str | None
) -> None:
    if selected == ("state",) and until:
        pytest.skip("the script has no points")
    gate = judge("host", small, *selected, until=until)

    runs = any(result.case == "state" for result in gate.results)
    assert runs == (selected != ("y",) and until is None)


def test_the_line_that_reproduces_it(
    kdtr: Callable[..., SimpleNamespace], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [Hostile({"reset": resets_nothing})])

    run = kdtr("gate", small, "--engine", "hostile_engines:make_engine", "--case", "state")

    assert 1 == run.code
    assert "FAIL  state / script / reset: left committed_len 6 and root " in run.out
    assert "--case state --mode script\n" in run.out


def test_a_session_that_cannot_be_closed(judge: Judge, small: Path) -> None:
    result = script(judge, Hostile({"close": raising(ValueError("lost"))}), small)

    assert result.verdict.is_bad
