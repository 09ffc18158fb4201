"""The bound of a row: from an ensemble's noise, and what a stored value may lose once more."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.tolerance import SAFETY, UNIT_ROUNDOFF, row_bound, row_scale

UNIT = 2.0**-24


@pytest.mark.parametrize("name", UNIT_ROUNDOFF)
def test_the_unit_roundoff_is_half_the_distance_from_1_to_the_next_number(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))

    assert UNIT_ROUNDOFF[name] == float(ml_dtypes.finfo(dtype).eps) / 2


def test_the_formula_is_the_documented_one() -> None:
    expected = np.array([[1.0, -4.0], [2.0, 0.5], [8.0, 0.0]])
    noise = np.array([4e-3, 2e-3, 8e-3])  # a thousandth of each row's scale

    bound = row_bound(expected, noise, 1, UNIT)

    scale = np.array([[4.0], [2.0], [8.0]])
    assert np.allclose(SAFETY * noise[:, None] + UNIT * scale, bound, rtol=1e-12, atol=0)


def test_a_lucky_row_gets_the_stage_s_median() -> None:
    expected = np.array([[1.0], [10.0], [2.0]])
    noise = np.array([1e-3, 1e-2, 0.0])

    bound = row_bound(expected, noise, 1, 0.0)

    assert np.allclose([[6e-3], [6e-2], [12e-3]], bound, rtol=1e-12, atol=0)


def test_an_unlucky_row_keeps_its_own_noise() -> None:
    bound = row_bound(np.array([[1.0], [1.0], [1.0]]), np.array([1e-3, 1e-3, 5e-2]), 1, 0.0)

    assert np.allclose([[6e-3], [6e-3], [0.3]], bound, rtol=1e-12, atol=0)


def test_a_row_of_zeros_without_noise_may_not_move() -> None:
    bound = row_bound(np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([0.0, 1e-3]), 1, UNIT)

    assert bound[0, 0] == 0
    assert bound[1, 0] > 0


def test_masked_entries_do_not_count_for_the_scale() -> None:
    assert [[3.0], [0.0]] == row_scale(np.array([[-np.inf, -3.0], [-np.inf, -np.inf]]), 1).tolist()


def test_rows_of_a_cache_are_layer_and_slot() -> None:
    expected = np.ones((2, 3, 5))

    bound = row_bound(expected, np.full((2, 3), 1e-3), 2, 0.0)

    assert (2, 3, 1) == bound.shape


def test_the_bound_is_rarely_passed_by_one_more_honest_sample() -> None:
    """As derived: rows of two channels, six members, normal errors of one scale per row."""
    random = np.random.default_rng(7)
    rows, channels, members = 200_000, 2, 6
    errors = np.abs(random.standard_normal((members + 1, rows, channels))).max(axis=2)
    expected = np.ones((rows, channels))

    bound = row_bound(expected, errors[:members].max(axis=0), 1, 0.0)[:, 0]

    assert (errors[members] > bound).mean() < 1e-5
