"""Storage dtypes on the host: float32 arrays that hold only numbers of the dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np

_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

STORAGE_DTYPES = tuple(_DTYPES)


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """A float32 copy, each value the dtype's nearest, ties to even; past its range, an infinity.

    float16 ends at 65504: from 65520 on it is inf. ml_dtypes, like torch, takes float64 to bfloat16
    by way of float32.
    """
    return np.array(values.astype(_DTYPES[dtype], copy=False), np.float32, order="C")
