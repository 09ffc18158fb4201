"""Plain decoding and chains come first; what fails there is blamed, and blocks the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hostile_engines import Hostile, raising

from kdtr.conformance import GateResult, GoldenBundle, Verdict
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.smoke import CHAIN, ROOTS, is_chain, is_roots, smoke_first
from kdtr.contract import DraftTree

Judge = Callable[..., GateResult]

ENGINE = "planted_faults:make_engine"


def case(*parents: tuple[int, ...]) -> SimpleNamespace:
    trees = [DraftTree(tuple(range(len(one))), one) for one in parents]
    inputs = SimpleNamespace(rounds=[SimpleNamespace(tree=tree) for tree in trees])
    return SimpleNamespace(inputs=inputs)


@pytest.fixture(scope="module")
def plain_last(record: Callable[..., Path]) -> Path:
    """A tree, a chain and plain decoding, in this order."""
    prompt = ((3, 0, 7),)
    return record(
        [
            CasePlan("tree", "a Y", ("MASK-2",), (Planted((-1, 0, 0, 2), (0, 2, 3)),), prompt),
            CasePlan("line", "a chain", ("FWD-5",), (Planted((-1, 0, 1), (0, 1)),), prompt),
            CasePlan("plain", "decoding", ("FWD-2",), (Planted((-1,)),) * 2, prompt),
        ]
    )


def test_lone_roots_then_chains_then_the_rest_in_its_order() -> None:
    root, chain, y = (-1,), (-1, 0, 1), (-1, 0, 0)
    first, mixed, chains, roots, last = cases = (
        *(case(y), case(chain, y), case(chain, root), case(root, root), case((-1, 0, 1, 1))),
    )

    assert [roots, chains, first, mixed, last] == smoke_first(cases)
    assert [False, False, True, True, False] == [is_chain(one.inputs) for one in cases]
    assert [False, False, False, True, False] == [is_roots(one.inputs) for one in cases]


def test_a_gate_drives_them_in_this_order(judge: Judge, plain_last: Path) -> None:
    gate = judge("host", plain_last, modes=["stepwise"])

    assert ["plain", "line", "tree"] == [result.case for result in gate.results]
    assert gate.passed


def test_a_fault_of_plain_decoding_blames_the_adapter_and_blocks_the_rest(
    judge: Judge, plain_last: Path
) -> None:
    gate = judge(ENGINE, plain_last, modes=["stepwise", "round"], fault="root_low")

    assert not gate.passed
    assert {("plain", "stepwise"): ROOTS, ("plain", "round"): ROOTS} == {
        (finding.place.case, finding.place.mode): finding.blame for finding in gate.findings
    }
    blocked = [result for result in gate.results if result.verdict is Verdict.BLOCKED]
    assert [
        ("line", "stepwise", "plain / stepwise", 2, False),
        ("line", "round", "plain / round", 2, False),
        ("tree", "stepwise", "plain / stepwise", 2, True),
        ("tree", "round", "plain / round", 2, True),
    ] == [(r.case, r.mode, r.blocked_by, r.blocked, r.branched) for r in blocked]


def test_a_fault_of_chains_says_that_plain_decoding_was_right(
    judge: Judge, plain_last: Path
) -> None:
    gate = judge(ENGINE, plain_last, modes=["stepwise"], fault="drafts_high")

    (finding,) = gate.findings
    assert ("line", CHAIN) == (finding.place.case, finding.blame)
    assert {"plain": Verdict.PASS, "line": Verdict.FAIL, "tree": Verdict.BLOCKED} == {
        result.case: result.verdict for result in gate.results
    }


def test_a_fault_of_trees_blames_nobody(judge: Judge, plain_last: Path) -> None:
    (finding,) = judge(ENGINE, plain_last, modes=["stepwise"], fault="sibling_visible").findings

    assert ("tree", "") == (finding.place.case, finding.blame)


def test_a_mode_that_is_right_goes_on(judge: Judge, plain_last: Path) -> None:
    """forward is given the positions that stepwise gets wrong."""
    gate = judge(ENGINE, plain_last, modes=["stepwise", "forward"], fault="root_low")

    assert {Verdict.PASS} == {r.verdict for r in gate.results if r.mode == "forward"}


def test_a_case_that_is_asked_for_alone_is_not_blocked(judge: Judge, plain_last: Path) -> None:
    """The line that reproduces a finding shows it."""
    gate = judge(ENGINE, plain_last, "tree", modes=["stepwise"], fault="root_low")

    assert [Verdict.FAIL] == [result.verdict for result in gate.results]


def test_an_unsupported_smoke_case_blocks_nothing(judge: Judge, small: Path) -> None:
    engine = Hostile(info=lambda honest: replace(honest, verbs=honest.verbs - {"decode"}))

    gate = judge(engine, small, "ar", "y")

    assert gate.passed
    assert not any(result.blocked_by for result in gate.results)


def test_what_raises_in_plain_decoding_blocks_the_script_too(judge: Judge, small: Path) -> None:
    gate = judge(Hostile({"verify": raising(ValueError("no stream"))}), small)

    script, files = gate.results[-2:]
    assert ("files", Verdict.BLOCKED) == (files.case, files.verdict)
    assert ("state", Verdict.BLOCKED, "ar / stepwise") == (
        script.case,
        script.verdict,
        script.blocked_by,
    )
    assert {"ar"} == {f.place.case for f in gate.findings if f.place.mode == "stepwise"}


def test_wrong_numbers_do_not_block_the_script(judge: Judge, small: Path) -> None:
    """It looks at refusals, and compares the engine with itself."""
    gate = judge(ENGINE, small, fault="scaled_twice")

    script, files = gate.results[-2:]
    assert ("state", "script", Verdict.PASS) == (script.case, script.mode, script.verdict)
    assert ("files", "script", Verdict.BLOCKED) == (files.case, files.mode, files.verdict)


def test_every_bundle_has_smoke_of_its_own(judge: Judge, corpus: Path) -> None:
    """What one model fails says nothing about another: all have plain decoding."""
    for path in corpus.glob("*.kdtr"):
        bundle = GoldenBundle.open(path)
        assert is_roots(smoke_first(bundle.cases)[0].inputs), path.name
        bundle.close()
