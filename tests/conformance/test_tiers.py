"""Tiers of the kill matrix, and what is said of one mutant at a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kdtr.conformance.mutants import MUTANTS, make_engine
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.families.hunt import honest_engine
from kdtr.conformance.mutants.kill_matrix import matrix_text
from kdtr.conformance.mutants.kill_run import KillRow
from kdtr.conformance.mutants.one_mutant import mutant_lines
from kdtr.conformance.mutants.tiers import Tiers, tiers
from kdtr.conformance.mutants.trial import Trial

QUICK = (Entry("base", "trees"), Entry("base", "ar"), Entry("base", "state"))


@pytest.fixture(scope="module")
def docket(corpus: Path) -> Iterator[Docket]:
    with Docket([corpus / "base.kdtr"]) as docket:
        yield docket


def test_the_gate_s_order_is_plain_decoding_chains_trees_and_the_scripts(docket: Docket) -> None:
    names = [one.case for one in docket.in_gate_order]

    assert ["stages", "ar", "chain"] == names[:3]
    assert ["state", "files"] == names[-2:]
    assert [True, True, True, False] == [docket.is_smoke(one) for one in docket.in_gate_order[:4]]


def test_small_cases_come_first(docket: Docket) -> None:
    assert {Entry("base", "one-token"), Entry("base", "stages")} == {*docket.entries[:2]}
    assert Entry("base", "long") == docket.entries[-1]


def test_a_mutant_of_every_tree_is_killed_by_smoke(docket: Docket) -> None:
    found = tiers(docket, QUICK, EngineRun(docket, make_engine("M044")))

    assert Tiers("base/stages", "", "base/stages", ("base/trees", "base/ar"), 3) == found


def test_a_mutant_of_branches_passes_smoke(docket: Docket) -> None:
    found = tiers(docket, QUICK, EngineRun(docket, make_engine("M031")))

    assert ("", ("base/trees",)) == (found.smoke, found.quick)
    assert found.corpus not in ("", "base/stages", "base/ar", "base/chain")


def test_an_honest_engine_passes_every_tier(docket: Docket) -> None:
    small = [one for one in docket.entries if one.case in ("ar", "one-token", "state")]

    run = EngineRun(docket, honest_engine())
    assert Tiers("", "", "", (), 3) == tiers(_Small(docket, small), small, run)


class _Small:
    """A docket of some entries."""

    def __init__(self, docket: Docket, entries: list[Entry]) -> None:
        self.in_gate_order = entries
        self.is_smoke = docket.is_smoke


def test_the_matrix_has_the_tiers_that_were_asked() -> None:
    row = KillRow(
        MUTANTS["M084"],
        Trial(1, "b: ar / round / round1", "c_kv", ("MLA-2",), "c_kv: differ", named=True),
        Trial(1),
        Tiers("b/ar", "", "b/ar", ("b/ar", "b/y"), 7),
    )

    text = matrix_text([row], [])

    assert "| mutant | smoke | tiny | corpus | of 7 quick cases |" in text
    assert "| M084 | b/ar | lives | b/ar | 2 |" in text
    assert "## By tier" not in matrix_text([replace(row, tiers=None)], [])


# One mutant in words


def test_a_mutant_in_words() -> None:
    row = KillRow(
        MUTANTS["M042"],
        Trial(
            3,
            "base: chain / stepwise / round0",
            "committed_len",
            ("COMMIT-2",),
            "differs",
            named=True,
        ),
        Trial(40),
    )

    assert [
        "M042  length_grows_by_tree  (compaction; CMP-8 in the list of faults)",
        "  fault     L += M.",
        "  COMMIT-2  Commit grows L by accept_len, and the bonus, not cached, is the next",
        "            root at the new L.",
        "  wanted    seen first at committed_len, COMMIT-2 cited",
        "  all stages shown: killed and named",
        "  at        base: chain / stepwise / round0",
        "  says      differs",
        "  cites     COMMIT-2",
        "  logits alone: it lives, after 40 cases",
    ] == [*mutant_lines(row, "compaction", 80)]


def test_what_is_killed_for_another_thing_is_said_so() -> None:
    row = KillRow(MUTANTS["M042"], Trial(3, "b: c / m / p", "logits", (), "differ"), Trial(1))

    assert "  all stages shown: killed, and not named: the finding says another thing" in [
        *mutant_lines(row, "compaction", 100)
    ]
