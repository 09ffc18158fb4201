"""Comparing one stage: form, exact values, patterns of inf and NaN, bounds, coordinates."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.compare import (
    compare_exact,
    compare_form,
    compare_numeric,
    coordinates,
)
from kdtr.contract import STAGE

INF, NAN = np.inf, np.nan


# Form


def test_a_form_that_fits_is_no_difference() -> None:
    assert compare_form(np.array([0, 2]), np.array([0, 3], np.uint8)) is None
    assert compare_form(np.ones((1, 2), bool), np.ones((1, 2), np.int8)) is None
    assert compare_form(np.ones((1, 2)), np.ones((1, 2), ml_dtypes.bfloat16)) is None


def test_short_lists_of_another_length_are_shown_whole() -> None:
    difference = compare_form(np.array([0, 2, 3]), np.array([0]))

    assert difference is not None
    assert ("wrong length", "[0, 2, 3]", "[0]") == (
        difference.summary,
        difference.expected,
        difference.actual,
    )


@pytest.mark.parametrize(
    ("expected", "actual", "shapes"),
    [
        (np.zeros(3, int), np.zeros(33, int), ("[3]", "[33]")),
        (np.zeros(33, int), np.zeros(3, int), ("[33]", "[3]")),
        (np.zeros((2, 3), int), np.zeros((3, 2), int), ("[2, 3]", "[3, 2]")),
        (np.zeros((2, 3), int), np.zeros(6, int), ("[2, 3]", "[6]")),
        (np.array(0), np.zeros(1, int), ("[]", "[1]")),
    ],
    ids=["longer", "shorter", "transposed", "flat", "one element"],
)
def test_shapes_are_named(expected: np.ndarray, actual: np.ndarray, shapes: object) -> None:
    difference = compare_form(expected, actual)

    assert difference is not None
    assert "wrong shape" == difference.summary
    assert shapes == (difference.expected, difference.actual)


# Exact


def test_the_first_element_that_differs_is_named_in_row_order() -> None:
    expected = np.array([[1, 2], [3, 4]])

    comparison = compare_exact(expected, np.array([[1, 2], [9, 8]]))

    assert comparison.difference is not None
    assert ("2 of 4 differ", (1, 0), "3", "9") == (
        comparison.difference.summary,
        comparison.difference.index,
        comparison.difference.expected,
        comparison.difference.actual,
    )
    assert comparison.headroom is None


def test_a_single_number_has_no_count() -> None:
    difference = compare_exact(np.array(5), np.array(6)).difference

    assert difference is not None
    assert ("differs", ()) == (difference.summary, difference.index)


def test_integers_of_any_width_are_compared_by_value() -> None:
    assert compare_exact(np.array([5, 0]), np.array([5, 0], np.uint8)).difference is None
    assert compare_exact(np.array([True, False]), np.array([1, 0])).difference is None
    assert compare_exact(np.array([True]), np.array([2])).difference is not None
    # 2**63 as int64 would be -2**63
    assert compare_exact(np.array([-(2**63)]), np.array([2**63], np.uint64)).difference is not None
    assert compare_exact(np.array([-1]), np.array([2**64 - 1], np.uint64)).difference is not None


def test_nothing_equals_nothing() -> None:
    assert compare_exact(np.empty(0, bool), np.empty(0, bool)).difference is None


# Numeric


def bound(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def test_within_the_bound_is_equal_and_the_headroom_is_the_largest_ratio() -> None:
    comparison = compare_numeric(
        np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.5, 2.0], [3.0, 3.0]]), bound(1, 4), 1
    )

    assert comparison.difference is None
    assert 0.5 == comparison.headroom


def test_exactly_at_the_bound_is_equal() -> None:
    assert compare_numeric(np.array([[1.0]]), np.array([[1.5]]), bound(0.5), 1).difference is None
    assert compare_numeric(
        np.array([[1.0]]), np.array([[np.nextafter(1.5, 2)]]), bound(0.5), 1
    ).difference


def test_of_the_first_row_out_of_bounds_the_worst_element_is_named() -> None:
    expected = np.zeros((3, 3))
    actual = np.array([[0.9, 0, 0], [0, 2.0, 5.0], [100.0, 0, 0]])

    difference = compare_numeric(expected, actual, bound(1, 1, 1), 1).difference

    assert difference is not None
    assert (1, 2) == difference.index
    assert (
        "3 of 9 out of bounds, the first row by 5 times, the worst (row 2) by 100 times"
    ) == difference.summary
    assert "0 within 1" == difference.expected
    assert "5, off by 5" == difference.actual
    assert 5 == difference.ratio


def test_a_row_may_have_two_axes() -> None:
    expected = np.zeros((2, 2, 2))
    actual = expected.copy()
    actual[0, 1] = (2, 3)
    actual[1, 0] = (9, 9)

    difference = compare_numeric(expected, actual, np.ones((2, 2, 1)), 2).difference

    assert difference is not None
    assert (0, 1, 1) == difference.index
    assert difference.summary.endswith("by 3 times, the worst (layer 1, slot 0) by 9 times")


@pytest.mark.parametrize(
    ("expected", "actual"),
    [(1.0, NAN), (1.0, INF), (-INF, INF), (-INF, -1e30), (NAN, 0.0), (INF, NAN), (-INF, NAN)],
)
def test_patterns_of_inf_and_nan_come_first(expected: float, actual: float) -> None:
    """Even before an earlier row that is out of bounds."""
    comparison = compare_numeric(
        np.array([[0.0], [expected]]), np.array([[99.0], [actual]]), bound(1, INF), 1
    )

    assert comparison.difference is not None
    assert "1 of 2 differ in being finite" == comparison.difference.summary
    assert (1, 0) == comparison.difference.index
    assert f"{expected:.9g}" == comparison.difference.expected
    assert f"{actual:.9g}" == comparison.difference.actual
    assert comparison.headroom is None


def test_equal_patterns_are_no_difference() -> None:
    row = np.array([[-INF, 1.0, NAN, INF]])

    comparison = compare_numeric(row, row.astype(np.float32), bound(0.0), 1)

    assert comparison.difference is None
    assert 0 == comparison.headroom


def test_a_bound_of_0_allows_no_error() -> None:
    zeros = np.zeros((2, 2))
    tiny = np.array([[0, 0], [0, 5e-324]])

    assert compare_numeric(zeros, zeros, bound(0, 0), 1).difference is None
    difference = compare_numeric(zeros, tiny, bound(0, 0), 1).difference
    assert difference is not None
    assert (1, 1) == difference.index
    assert INF == difference.ratio


def test_minus_zero_is_zero() -> None:
    assert compare_numeric(np.zeros((1, 1)), -np.zeros((1, 1)), bound(0), 1).difference is None


def test_bfloat16_is_compared_by_value() -> None:
    expected = np.array([[1.0, 3.0]])
    actual = expected.astype(ml_dtypes.bfloat16)

    assert compare_numeric(expected, actual, bound(0), 1).difference is None
    difference = compare_numeric(expected, actual * 2, bound(0.5), 1).difference
    assert difference is not None
    assert "6, off by 3" == difference.actual


def test_huge_numbers_are_out_of_bounds_without_a_warning() -> None:
    difference = compare_numeric(
        np.array([[-1e308, 1.0]]), np.array([[1.5e308, 1e300]]), bound(1e-20), 1
    ).difference

    assert difference is not None
    assert "2 of 2 out of bounds, the first row by inf times" == difference.summary


# Coordinates

PARENTS = (-1, 0, 0, 2)


@pytest.mark.parametrize(
    ("stage", "layer", "index", "text"),
    [
        ("positions", None, (3,), "row 3 (path 0-2-3)"),
        ("positions", None, (0,), "row 0 (path 0)"),
        ("mask", None, (2, 14), "row 2 (path 0-2), slot 14"),
        ("scores", 2, (3, 1, 14), "layer 2, row 3 (path 0-2-3), head 1, slot 14"),
        ("q_nope", 0, (1, 2, 3), "layer 0, row 1 (path 0-1), head 2, nope channel 3"),
        ("q_pe", 0, (1, 2, 3), "layer 0, row 1 (path 0-1), head 2, rope channel 3"),
        ("c_kv", 1, (1, 9), "layer 1, row 1 (path 0-1), latent channel 9"),
        ("embedding", None, (1, 9), "row 1 (path 0-1), hidden channel 9"),
        ("router_scores", 1, (1, 7), "layer 1, row 1 (path 0-1), expert 7"),
        ("expert_ids", 1, (1, 2), "layer 1, row 1 (path 0-1), choice 2"),
        ("logits", None, (1, 36), "row 1 (path 0-1), token 36"),
        ("moves", None, (1, 0), "path node 1, source"),
        ("moves", None, (1, 1), "path node 1, destination"),
        ("emitted", None, (2,), "path node 2"),
        ("untouched", None, (5,), "slot 5"),
        ("cache_tokens", None, (5,), "slot 5"),
        ("cache_c_kv", None, (3, 14, 61), "layer 3, slot 14, latent channel 61"),
        ("cache_k_pe", None, (3, 14, 5), "layer 3, slot 14, rope channel 5"),
        ("bonus", None, (), ""),
    ],
)
def test_an_element_by_name(
    stage: str, layer: int | None, index: tuple[int, ...], text: str
) -> None:
    assert text == coordinates(STAGE[stage], layer, index, PARENTS)


def test_a_row_of_a_prompt_has_no_path() -> None:
    assert "row 3" == coordinates(STAGE["positions"], None, (3,), None)
