"""How far a correct engine may be from the truth, per row (NUM-3).

An ensemble of honest engines of the declared profile has run the same forward
(`noise_floor.py`). The largest distance of a row in any of them, over the row's channels, is a
sample of the largest rounding error e of that row. An engine that is judged is one more sample,
with its own order of sums and its own places of rounding. Of K + 1 exchangeable samples the
judged one is the largest with probability 1 / (K + 1), so the ensemble's maximum alone would
blame one honest row in seven. Let an error be normal with standard deviation s. The largest of
the n = K c errors of a row of c channels lies below 2/3 s with probability 0.495**n: 2e-4 for a
row of two channels, and never for a longer one. SAFETY = 6 keeps the bound above 4 s there, which
an honest error passes once in 16,000; at its usual place, above s sqrt(2 ln n), the bound is 13 s.

A row may be lucky in all members, above all a short one: then the stage's median, as a fraction of
the row's scale, takes its place. And storing a value once more, the last thing an engine does,
moves it by half a unit of its last place.
"""

from __future__ import annotations

import numpy as np

SAFETY = 6.0

# Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}


def row_bound(
    expected: np.ndarray, noise: np.ndarray, row_axes: int, unit_roundoff: float
) -> np.ndarray:
    """The largest honest error of each row; shape of `expected` with its last axes reduced to 1.

    expected       the truth: its first `row_axes` axes number the rows
    noise          the ensemble's largest distance from it, of the rows' shape
    unit_roundoff  of the dtype in which the stage is stored
    A row of zeros without noise is exactly zero: nothing reached it, and nothing may.
    """
    scale = row_scale(expected, row_axes)
    noise = noise.reshape(scale.shape)
    some = scale > 0
    relative = np.divide(noise, scale, out=np.zeros_like(scale), where=some)
    typical = float(np.median(relative[some])) if some.any() else 0.0
    return SAFETY * np.maximum(noise, typical * scale) + unit_roundoff * scale


def row_scale(expected: np.ndarray, row_axes: int) -> np.ndarray:
    """The largest finite magnitude of each row, its last axes kept as 1."""
    within = tuple(range(row_axes, expected.ndim))
    finite = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    return np.asarray(finite.max(axis=within, keepdims=True, initial=0.0))
