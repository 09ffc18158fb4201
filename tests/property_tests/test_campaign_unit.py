"""A unit gives the same cases whenever and wherever it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs units in the order of the command line, in one fresh process, and prints their rows.
RUN = """
import json, sys
from kdtr.property_tests.campaign_plan import Setup, Unit
from kdtr.property_tests.campaign_shard import rows_of
from kdtr.property_tests.campaign_worker import Worker
worker = Worker(Setup("reference", (), (("cache", "scratch"),), 8, "."))
found = {}
for name in sys.argv[1:]:
    law, _, index = name.partition(":")
    outcome = worker.run(Unit(law, int(index), 11, 8))
    found[name] = [outcome.verdict, outcome.discarded, rows_of(outcome)]
print(json.dumps(found, sort_keys=True))
"""
UNITS = (
    "a_commit_is_plain_decoding_of_the_path:0",
    "the_walk_follows_the_targets:3",
    "a_commit_then_a_verify_is_a_longer_prompt:0",
    "cache_layouts_are_indistinguishable:1",
    "the_walk_follows_the_targets:4",
    "a_commit_is_plain_decoding_of_the_path:1",
)


def run(*units: str, hash_seed: str, late: str = "") -> dict[str, list]:
    """late: what the process imports before it draws."""
    command = [sys.executable, "-c", f"{late}\n{RUN}", *units]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return json.loads(subprocess.check_output(command, env=environment, text=True))


@pytest.fixture(scope="module")
def first() -> dict[str, list]:
    return run(*UNITS, hash_seed="1")


def test_units_do_not_depend_on_their_order_the_process_or_what_it_has_imported(
    first: dict[str, list],
) -> None:
    """Another order, another hash seed, and modules with constants of their own."""
    late = "import kdtr.conformance.corpus_models, kdtr.conformance.golden_search"

    reused = run(*reversed(UNITS), hash_seed="2", late=late)
    alone = run(UNITS[2], hash_seed="3")

    assert first == reused
    assert {UNITS[2]: first[UNITS[2]]} == alone


def test_a_unit_gives_its_number_of_examples(first: dict[str, list]) -> None:
    assert {"complete"} == {verdict for verdict, _, _ in first.values()}
    for unit, (_, _, rows) in first.items():
        law, _, index = unit.partition(":")
        assert 8 == sum(row["verdict"] == "held" for row in rows)
        assert list(range(len(rows))) == [row["ordinal"] for row in rows]
        assert {(f"{law}-{int(index):05}", law)} == {(row["unit"], row["law"]) for row in rows}


def test_a_unit_sees_trees_of_every_shape(first: dict[str, list]) -> None:
    rows = [row for _, _, rows in first.values() for row in rows]

    assert {"root", "chain", "star", "branched"} == {
        shape
        for shape in ("root", "chain", "star", "branched")
        if any(row[f"trees_{shape}"] and row[f"rows_{shape}"] for row in rows)
    }
    assert any(row["scattered"] for row in rows)


def test_units_of_a_law_differ_by_their_index(first: dict[str, list]) -> None:
    """Told apart by what they try, since most rows say only that the law held."""
    shapes = [
        [(row["deepest"], row["widest"]) for row in first[unit][2]] for unit in (UNITS[0], UNITS[5])
    ]

    assert shapes[0] != shapes[1]


# Prints what Hypothesis draws from one seed, with a module of many constants or without it.
DRAW = """
import sys
from pathlib import Path
import hypothesis
from hypothesis import given, settings, strategies as st
from kdtr.property_tests.campaign_unit import freeze_draws
sys.path.insert(0, sys.argv[1])
if "frozen" in sys.argv:
    freeze_draws()
if "late" in sys.argv:
    import constants
drawn = []

@hypothesis.seed(7)
@settings(max_examples=200, database=None)
@given(st.integers())
def draw(n):
    drawn.append(n)

draw()
print(drawn)
"""


@pytest.mark.parametrize("frozen", ["frozen", "as Hypothesis comes"])
def test_draws_are_kept_from_constants_of_modules_that_happen_to_be_loaded(
    frozen: str, tmp_path: Path
) -> None:
    """And without that they would not repeat: Hypothesis draws from these constants too."""
    (tmp_path / "constants.py").write_text(f"MANY = {[7**i for i in range(4, 60)]}\n")
    command = [sys.executable, "-c", DRAW, str(tmp_path), frozen]

    alone = subprocess.check_output(command, text=True)
    beside = subprocess.check_output([*command, "late"], text=True)

    assert (frozen == "frozen") == (alone == beside)
