from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from kdtr.engine.rounding import STORAGE_DTYPES, rounded


@pytest.mark.parametrize(
    ("dtype", "unit"), [("float32", 2.0**-24), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)]
)
def test_ties_go_to_even_and_everything_else_to_the_nearest(dtype: str, unit: float) -> None:
    """unit is half the distance from 1 to the next number."""
    values = np.array([1 + unit, 1 + 3 * unit, 1 + 1.5 * unit, 1 - 0.25 * unit])

    expected = [1.0, 1 + 4 * unit, 1 + 2 * unit, 1.0]
    assert expected == rounded(values, dtype).tolist()


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_the_result_is_a_contiguous_float32_copy(dtype: str) -> None:
    values = np.ones((3, 2), np.float32).T

    result = rounded(values, dtype)

    assert np.float32 == result.dtype
    assert result.flags.c_contiguous
    assert not np.shares_memory(values, result)


def test_numbers_of_the_dtype_stay_as_they_are() -> None:
    """Every bfloat16 and every float16, subnormal, infinite and NaN ones too."""
    codes = np.arange(2**16).astype(np.uint16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # signalling NaN
        for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
            values = codes.view(dtype).astype(np.float32)

            assert np.array_equal(values, rounded(values, name), equal_nan=True)


def test_float16_ends_at_65504() -> None:
    assert [65504.0, -65504.0] == rounded(np.array([65504, -65519]), "float16").tolist()
    with pytest.warns(RuntimeWarning, match="overflow"):
        assert [np.inf, -np.inf] == rounded(np.array([65520, -1e9]), "float16").tolist()
