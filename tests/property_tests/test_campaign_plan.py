"""What a campaign plans: deterministic, complete, and more where cases lack."""

from __future__ import annotations

import doctest
import importlib
import re
import shlex

import pytest

from kdtr.conformance.golden_check import blas_kernel
from kdtr.property_tests.campaign_plan import (
    COMPLETE,
    EXHAUSTED,
    CampaignError,
    Setup,
    Unit,
    _sources,
    first_units,
    more_units,
    unit_of,
    unit_size,
    versions,
)


def test_units_are_dealt_to_the_laws_in_turn_and_make_up_the_cases() -> None:
    units = first_units(["a", "b", "c"], 1000, 200, seed=3)

    assert ["a", "b", "c", "a", "b"] == [unit.law for unit in units]
    assert [0, 0, 0, 1, 1] == [unit.index for unit in units]
    assert 1000 == sum(unit.examples for unit in units)


def test_every_law_gets_a_unit_of_a_small_campaign() -> None:
    laws = [f"law{i}" for i in range(25)]

    units = first_units(laws, 30, unit_size(len(laws), 30, most=200), seed=0)

    assert set(laws) == {unit.law for unit in units}
    assert {2} == {unit.examples for unit in units}


def test_a_unit_draws_by_its_law_its_index_and_the_campaigns_seed() -> None:
    units = [Unit("a", 0, 0, 200), Unit("a", 1, 0, 200), Unit("b", 0, 0, 200), Unit("a", 0, 1, 200)]

    assert 4 == len({unit.draws for unit in units})
    assert Unit("a", 0, 0, 200).draws == Unit("a", 0, 0, 100).draws


def test_cases_that_lack_are_made_up_by_laws_that_have_more() -> None:
    first = first_units(["a", "b"], 8, 2, seed=0)
    ended = {unit: EXHAUSTED if unit.law == "a" else COMPLETE for unit in first}

    more = more_units(ended, ["a", "b"], 3, 2, seed=0)

    assert ["b-00002", "b-00003"] == [unit.id for unit in more]


@pytest.mark.parametrize(("verdict", "lacking"), [(EXHAUSTED, 3), (COMPLETE, 0), (COMPLETE, -1)])
def test_nothing_is_added_where_nothing_lacks_or_nothing_is_left(
    verdict: str, lacking: int
) -> None:
    ended = dict.fromkeys(first_units(["a"], 4, 2, seed=0), verdict)

    assert [] == more_units(ended, ["a"], lacking, 2, seed=0)


def test_the_line_that_runs_a_unit_again_names_the_unit() -> None:
    setup = Setup("my:make", (("on", "a b"),), (("page_size", 3),), 40, "/somewhere")
    unit = unit_of("verify_twice_is_verify_once-00012", 5, 40)

    words = shlex.split(setup.again(unit))

    assert ["kdtr", "campaign", "--engine", "my:make", "--engine-option", "on='a b'"] == words[:6]
    assert ["--twin-option", "page_size=3", "--seed", "5", "--unit", "40"] == words[6:12]
    assert ["--unit-id", unit.id] == words[12:]


@pytest.mark.parametrize("unit_id", ["", "law", "law-1", "law-0000x", "a law-00001"])
def test_an_id_of_another_form_is_refused(unit_id: str) -> None:
    with pytest.raises(
        CampaignError, match=re.escape(f"--unit-id {unit_id!r}; expected LAW-INDEX")
    ):
        unit_of(unit_id, 0, 200)


def test_versions_name_all_that_the_draws_follow_from() -> None:
    found = versions()

    names = ["kdtr", "rules", "sources", "hypothesis", "numpy", "ml_dtypes", "blas"]
    assert names == list(found)
    assert re.fullmatch("[0-9a-f]{16}", found["sources"])
    assert blas_kernel() == found["blas"]


def test_the_digest_covers_who_draws_who_judges_and_the_truth() -> None:
    covered = {name for name, _ in _sources()}

    assert {
        "property_tests/judge.py",
        "property_tests/campaign_unit.py",
        "conformance/noise_floor.py",
        "reference/forward.py",
        "contract/RULES.md",
    } <= covered
    shown = {"property_tests/campaign_cli.py", "property_tests/campaign_progress.py"}
    assert set() == shown & covered


@pytest.mark.parametrize("module", ["campaign_plan", "campaign_directory", "campaign_ray", "trees"])
def test_examples_in_docstrings(module: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"kdtr.property_tests.{module}"))

    assert tried
    assert 0 == failed
