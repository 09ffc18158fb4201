"""The families: distinct names, occasions that are what they say, reasons for what lives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.mutants import CLASSES
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.families import FAMILIES, VARIANTS
from kdtr.conformance.mutants.families.families_page import (
    families_summary,
    families_text,
    unexplained,
)
from kdtr.conformance.mutants.families.families_run import hunt_all
from kdtr.conformance.mutants.families.family import Maker, result_of
from kdtr.conformance.mutants.families.hunt import Catch, Hunter, honest_engine, occasions
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    ALWAYS,
    FIRST_ROUND,
    IN_PREFILL,
    IN_ROUND,
    IN_VERIFY,
    LATER_ROUNDS,
    OF_A_ROOT,
    Occasion,
    Watch,
)
from kdtr.conformance.mutants.families.reasons import REASONS, reason
from kdtr.conformance.quick_corpus import read_quick
from kdtr.contract import CaseError, DraftTree, rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "mutant-families.md"
TREES = Entry("base", "trees")


# Declarations


def test_there_are_more_than_a_thousand_variants_each_of_a_class_of_the_list() -> None:
    assert len(VARIANTS) > 1000
    assert len(VARIANTS) == sum(len(family.variants) for family in FAMILIES)
    assert {family.kind for family in FAMILIES} <= set(CLASSES)
    assert len({family.title for family in FAMILIES}) == len(FAMILIES)


def test_a_variant_cites_rules_that_there_are() -> None:
    cited = {rule_id for one in VARIANTS.values() for rule_id in one.rules}

    assert cited <= set(rules())
    assert all(one.rules for one in VARIANTS.values())


def test_a_label_is_declared_once() -> None:
    make = Maker("t", "POS", "w")
    make.add("x", ("POS-1",), lambda engine, watch: None, ALWAYS)

    with pytest.raises(AssertionError, match="t: x, always is declared twice"):
        make.add("x", ("POS-1",), lambda engine, watch: None, ALWAYS)


def test_a_fault_comes_on_its_plainest_occasion_and_on_another_by_turns() -> None:
    make = Maker("t", "POS", "w")
    for label in ("a", "b", "c"):
        make.add_each(
            label, ("POS-1",), lambda engine, watch, when: None, (ALWAYS, IN_PREFILL, IN_VERIFY)
        )

    assert [
        *("a, always", "a, in prefill"),
        *("b, always", "b, in verify() alone"),
        *("c, always", "c, in prefill"),
    ] == [one.label for one in make.family().variants]


# Occasions


def _session(seen: list[Occasion], docket: Docket) -> Any:
    engine = honest_engine()
    Watch(engine, seen.append)
    bundle = docket.bundles["base"]
    return engine.load((bundle.config, bundle.weights)).open(max_len=40)


@pytest.fixture(scope="module")
def docket(corpus: Path) -> Iterator[Docket]:
    with Docket([corpus / "base.kdtr"]) as docket:
        yield docket


def test_an_occasion_is_the_forward_under_way(docket: Docket) -> None:
    seen: list[Occasion] = []
    session = _session(seen, docket)

    root = session.prefill([1, 2, 3])
    tree = DraftTree((root, 0, 1, 2), (-1, 0, 0, 0))
    session.verify(tree)
    session.round(tree)
    session.decode()

    prefill, verify, round_, decode = seen
    assert ("prefill", 0, 3, None) == (
        prefill.verb,
        prefill.committed_len,
        prefill.n_rows,
        prefill.parents,
    )
    assert ("verify", 3, 4, 0) == (verify.verb, verify.committed_len, verify.n_rows, verify.rounds)
    assert ("round", 0, (-1, 0, 0, 0)) == (round_.verb, round_.rounds, round_.parents)
    assert (1, 1, 4) == (decode.rounds, decode.n_rows, decode.of)
    assert session.committed_len == decode.committed_len + 1


def test_occasions_hold_where_they_say() -> None:
    first = Occasion("verify", 5, 4, 0, 0, 0, (-1, 0, 0, 2))
    second = Occasion("round", 7, 1, 1, 2, 4, (-1,))
    prompt = Occasion("prefill", 0, 5)

    assert [True, False, False] == [FIRST_ROUND.holds(one) for one in (first, second, prompt)]
    assert [False, True, False] == [LATER_ROUNDS.holds(one) for one in (first, second, prompt)]
    assert [False, True, False] == [AFTER_REJECTION.holds(one) for one in (first, second, prompt)]
    assert [False, True, False] == [OF_A_ROOT.holds(one) for one in (first, second, prompt)]
    assert [True, False, False] == [IN_VERIFY.holds(one) for one in (first, second, prompt)]
    assert [False, True, False] == [IN_ROUND.holds(one) for one in (first, second, prompt)]
    assert [False, False, True] == [IN_PREFILL.holds(one) for one in (first, second, prompt)]


def test_a_fault_is_at_work_on_its_occasion_alone(docket: Docket) -> None:
    """The same positions from verify(), and others from round()."""
    engine = honest_engine()
    change = result_of("tree_layout", lambda result, now, *_: (result[0] + 1, result[1]))
    change(engine, Watch(engine), IN_ROUND)
    bundle = docket.bundles["base"]
    session = engine.load((bundle.config, bundle.weights)).open(max_len=20)
    shown: list[list[int]] = []

    def trace(stage: str, layer: int | None, array: Any) -> None:
        if stage == "positions":
            shown.append(np.asarray(array).tolist())

    tree = DraftTree((session.prefill([1, 2]),), (-1,))
    session.verify(tree, trace=trace)
    session.round(tree, trace=trace)

    assert [[2], [3]] == shown


# The hunt


@pytest.fixture(scope="module")
def hunter(docket: Docket) -> Hunter:
    order = (TREES, Entry("base", "state"))
    return Hunter(docket, order, occasions(docket, honest_engine, order))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("positions: every draft + 1, in trees", "positions"),
        ("masks: siblings are seen, in trees", "mask"),
        ("compaction: nothing moves in every layer, always", "cache_c_kv"),
        ("sessions: a commit applies twice, always", "second commit"),
        ("sessions: set_root changes no root that is there, always", "set_root"),
        ("MoE gate: weights are too large by 1 %, always", "expert_weights"),
    ],
)
def test_a_variant_is_killed_and_named(hunter: Hunter, name: str, stage: str) -> None:
    catch = hunter.hunt(VARIANTS[name])

    assert (stage, True) == (catch.stage, catch.named)
    assert catch.by in (TREES, Entry("base", "state"))


def test_what_shows_nothing_else_is_equivalent_here(hunter: Hunter) -> None:
    catch = hunter.hunt(VARIANTS["sessions: reset leaves the pages, always"])

    assert (None, True) == (catch.by, catch.equivalent)


def test_what_lives_and_shows_other_bits_is_not_equivalent(hunter: Hunter) -> None:
    catch = hunter.hunt(
        VARIANTS["determinism: verify_attn has noise of the last bit every seventh call, always"]
    )

    assert catch.by is None or catch.by.is_script
    assert not catch.equivalent


def test_an_honest_engine_behaves_as_itself(docket: Docket) -> None:
    twice = [[*EngineRun(docket, honest_engine()).behaviour(TREES)] for _ in range(2)]

    assert twice[0] == twice[1]
    assert len(twice[0]) > 10


def test_a_case_that_is_to_be_first_and_is_not_there_is_no_silence(corpus: Path) -> None:
    with pytest.raises(
        CaseError, match=r"^all-moe/files is not asked of these bundles in this order; give the "
    ):
        hunt_all([], [str(corpus / "base.kdtr")], first=(TREES, Entry("all-moe", "files")))


# The page


def test_the_page_has_every_variant_that_lives_and_counts_all() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (count,) = re.findall(r"^(\d+) variants in \d+ families;", text, re.MULTILINE)

    (distinct,) = re.findall(r"(\d+) first findings differ", text)

    assert len(VARIANTS) == int(count)
    assert int(distinct) > 1000
    assert "no reason is known" not in text


def test_every_reason_explains_a_variant_that_lives() -> None:
    lives = read_quick().lives

    explained = {reason(name) for name in lives if name in VARIANTS}

    assert {why for _, why in REASONS} == explained


def test_a_page_names_what_lives_without_a_reason() -> None:
    name = "positions: every draft + 1, in trees"
    caught = {name: Catch(name, 3)}

    text = families_text(caught, read_quick())

    assert [name] == unexplained(caught)
    assert (
        "1 variants in 1 families; 0 killed, of which 0 named; 1 live. 0 first findings differ, so "
        "at least as many variants do."
    ) == families_summary(caught)
    assert f"| {name} | not run | no reason is known |" in text
