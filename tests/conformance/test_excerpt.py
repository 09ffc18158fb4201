"""The numbers around a divergence: which, with which bound, and how every row fared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kdtr.conformance import GateResult
from kdtr.conformance.compare import compare_exact, compare_numeric
from kdtr.conformance.excerpt import Excerpt, RowFare, excerpt
from kdtr.contract import STAGE

Judge = Callable[..., GateResult]


def numeric(
    stage: str, expected: np.ndarray, actual: np.ndarray, bound: np.ndarray
) -> Excerpt | None:
    difference = compare_numeric(expected, actual, bound, STAGE[stage].row_axes).difference
    assert difference is not None
    return excerpt(STAGE[stage], expected, actual, difference, bound)


def exact(stage: str, expected: np.ndarray, actual: np.ndarray) -> Excerpt | None:
    difference = compare_exact(expected, actual).difference
    assert difference is not None
    return excerpt(STAGE[stage], expected, actual, difference, None)


def test_the_row_of_the_divergence_and_how_all_rows_fared() -> None:
    expected = np.arange(2 * 3 * 20, dtype=np.float64).reshape(2, 3, 20)  # scores [n, h, s]
    actual = expected.copy()
    actual[1, 2, 15] += 6.0
    actual[1, 2, 3] += 5.0
    bound = np.full((2, 1, 1), 2.0)

    found = numeric("scores", expected, actual, bound)

    assert found is not None
    assert ("row 1, head 2", "slot", 15, 20, 2.0) == (
        found.where,
        found.axis,
        found.at,
        found.length,
        found.bound,
    )
    assert (12, 13, 14, 15, 16, 17, 18) == found.columns
    assert (112.0, 115.0, 121.0) == (found.expected[0], found.expected[3], found.actual[3])
    assert [15] == [at for i, at in enumerate(found.columns) if found.wrong(i)]
    assert (RowFare("row 0", 0, 0.0), RowFare("row 1", 2, 3.0)) == found.rows


def test_integers_have_no_bound() -> None:
    found = exact("positions", np.array([5, 6, 6, 7]), np.array([5, 6, 7, 8]))

    assert found is not None
    assert ("", "row", (0, 1, 2, 3), 2, None, ()) == (
        found.where,
        found.axis,
        found.columns,
        found.at,
        found.bound,
        found.rows,
    )
    assert ((5, 6, 6, 7), (5, 6, 7, 8)) == (found.expected, found.actual)
    assert [False, False, True, True] == [found.wrong(i) for i in range(4)]


def test_rows_of_a_cache_are_layers_and_slots() -> None:
    expected, bound = np.ones((2, 2, 3)), np.full((2, 2, 1), 0.1)
    actual = expected.copy()
    actual[1, 0, 2] = np.nan

    found = numeric("cache_c_kv", expected, actual, bound)

    assert found is not None
    assert "layer 1, slot 0" == found.where
    assert ["layer 0, slot 0", "layer 0, slot 1", "layer 1, slot 0", "layer 1, slot 1"] == [
        row.name for row in found.rows
    ]
    assert [0.0, 0.0, np.inf, 0.0] == [row.worst for row in found.rows]
    assert found.wrong(2)


def test_of_many_rows_those_that_differ_are_told() -> None:
    expected, bound = np.zeros((300, 4)), np.full((300, 1), 1.0)
    actual = expected.copy()
    actual[200:210] = 7.0

    found = numeric("embedding", expected, actual, bound)

    assert found is not None
    assert (48, 252) == (len(found.rows), found.left_out)
    assert {f"row {i}" for i in range(200, 210)} == {row.name for row in found.rows if row.wrong}


def test_a_row_of_zeros_allows_nothing() -> None:
    expected, bound = np.zeros((1, 4)), np.zeros((1, 1))

    found = numeric("embedding", expected, np.array([[0.0, 1e-30, 0.0, 0.0]]), bound)

    assert found is not None
    assert (1, [False, True, False, False]) == (
        found.rows[0].wrong,
        [found.wrong(i) for i in range(4)],
    )


@pytest.mark.parametrize("shape", [(3,), (4, 1)])
def test_a_difference_of_form_has_none(shape: tuple[int, ...]) -> None:
    from kdtr.conformance.compare import compare_form

    expected, actual = np.zeros(4, dtype=int), np.zeros(shape, dtype=int)
    difference = compare_form(expected, actual)
    assert difference is not None

    assert excerpt(STAGE["positions"], expected, actual, difference, None) is None


def test_findings_of_the_gate_carry_it(judge: Judge, tiny: Path) -> None:
    engine = "kdtr.conformance.mutants:make_engine"

    gate = judge(engine, tiny, "y-tree", modes=["stepwise"], mutant="position_by_index")

    (finding,) = gate.findings
    assert finding.excerpt is not None
    assert ((13, 14, 14, 15), (13, 14, 15, 16)) == (
        finding.excerpt.expected,
        finding.excerpt.actual,
    )
    assert finding.drawing is not None
    assert (13, 14, 15, 16) == finding.drawing.slots == finding.drawing.shown_slots
