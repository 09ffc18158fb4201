"""The truth under other choices of experts: the record's, where none is made."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from kdtr.conformance.alternatives_truth import AlternativeTruth
from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.drive import MODE
from kdtr.conformance.noise_floor import NoiseFloor
from kdtr.contract import NumericProfile, stage_order

LAYERS = 2


@pytest.fixture(scope="module")
def bundle(small: Path) -> Iterator[GoldenBundle]:
    opened = GoldenBundle.open(small)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def case(bundle: GoldenBundle) -> GoldenCase:
    return next(case for case in bundle.cases if case.inputs.alias == "y")


@pytest.fixture
def truth(bundle: GoldenBundle, case: GoldenCase) -> AlternativeTruth:
    noise = NoiseFloor.of_bundle(bundle, NumericProfile()).case(case)
    return noise.alternatives(traced=True)


@pytest.mark.parametrize("mode", ["stepwise", "round"])
def test_without_another_choice_it_is_the_record(
    truth: AlternativeTruth, case: GoldenCase, mode: str
) -> None:
    for point in case.inputs.points():
        golden, mine = case.expectation(point), truth.expectation(point, {}, MODE[mode])
        for stage, layer in stage_order(LAYERS):
            expected, actual = (one.get(stage.name, layer) for one in (golden, mine))
            assert (expected is None) == (actual is None)
            if expected is not None and actual is not None:
                assert np.allclose(expected, actual, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(golden.expert_gap(1), mine.expert_gap(1), rtol=1e-9)


def test_a_given_choice_moves_its_row_and_what_sees_it(
    truth: AlternativeTruth, case: GoldenCase
) -> None:
    """In the last layer: nothing else, and no cache."""
    golden = case.expectation("round0")
    ids = golden.get("expert_ids", 1)
    assert ids is not None
    other = next(e for e in range(8) if e not in ids[2])
    chosen = tuple(sorted([*ids[2][:-1].tolist(), other]))

    mine = truth.expectation("round0", {("round0", 1, 2): chosen}, MODE["stepwise"])

    now = mine.get("expert_ids", 1)
    assert now is not None
    assert list(chosen) == now[2].tolist()
    moved = {
        name: np.flatnonzero(~np.isclose(one, two, rtol=1e-9).all(axis=1)).tolist()
        for name in ("hidden", "logits")
        for one, two in [[e.get(name, 1 if name == "hidden" else None) for e in (golden, mine)]]
    }
    assert {"hidden": [2], "logits": [2]} == moved
    np.testing.assert_allclose(golden.get("cache_c_kv"), mine.get("cache_c_kv"), rtol=1e-12)


def test_a_choice_late_in_a_case_reruns_its_end_alone(
    truth: AlternativeTruth, case: GoldenCase
) -> None:
    mode = MODE["stepwise"]
    for point in case.inputs.points():
        truth.expectation(point, {}, mode)
    before = truth.n_rows

    truth.expectation("round1", {("round1", 1, 0): (0, 1, 2)}, mode)
    truth.expectation("round0", {("round1", 1, 0): (0, 1, 2)}, mode)

    assert 4 == truth.n_rows - before  # the rows of round1's tree


def test_in_pinned_modes_the_path_of_the_record_is_committed(
    bundle: GoldenBundle, case: GoldenCase
) -> None:
    """Where other choices make another token, the walk is their own."""
    truth = NoiseFloor.of_bundle(bundle, NumericProfile()).case(case).alternatives(traced=False)
    golden = case.expectation("round0")
    pinned = own = None
    for ids in combinations(range(8), 3):
        choices = {("round0", 1, row): ids for row in range(4)}
        pinned = truth.expectation("round0", choices, MODE["stepwise"])
        own = truth.expectation("round0", choices, MODE["round"])
        if not np.array_equal(golden.get("path"), pinned.get("path")):
            break

    assert pinned is not None
    assert own is not None
    assert np.array_equal(pinned.get("path"), own.get("path"))
    assert not np.array_equal(golden.get("path"), own.get("path"))
    assert np.array_equal(golden.get("root"), pinned.get("root"))
    assert np.array_equal(golden.get("cache_tokens"), pinned.get("cache_tokens"))
    assert np.array_equal(own.get("bonus"), own.get("root"))
    length = golden.get("slots")
    path, grown = own.get("path"), own.get("committed_len")
    assert length is not None
    assert path is not None
    assert int(length[0]) + len(path) == grown
    assert own.get("cache_c_kv") is None  # its bounds are those of the record's rows
