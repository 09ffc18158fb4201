"""Every kernel that may serve a projection gives the same bits, and a row alone as among others.

So a row's bits do not depend on the number of rows, which decides which kernel runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_pair import FLOAT32, ROUNDOFF, Pair

from kdtr.engine import cuda_linear

# o, i: many slices and few, slices that begin in the middle of 64 elements, empty ones, tails of
# tiles and of steps.
SHAPES = ((64, 64), (576, 1056), (1100, 2080), (4100, 520), (4160, 2336))
ROWS = (25, 40, 65, 130)


@pytest.mark.parametrize(("o", "i"), SHAPES)
@pytest.mark.parametrize("n", ROWS)
def test_all_kernels_give_the_same_bits(cuda_sets: dict[str, Any], o: int, i: int, n: int) -> None:
    kernels = cuda_sets["bfloat16"]
    pair = Pair(kernels, "bfloat16", seed=o + n)
    hopper = kernels._modules.has("linear_wgmma")
    x, on_device = pair.numbers(n, i)
    weight, its = pair.numbers(o, i)
    counted = n - n // 4
    with kernels.turn:
        count = kernels._uploaded(np.array([counted], np.int64))
        on_device[counted:] = 0x7FC0  # NaN where rows are padding

        def run(name: str) -> np.ndarray:
            file = cuda_linear.file_of(name)
            out = kernels._empty((n, o), np.uint16)
            out.fill(0x1234)
            get = lambda entry: kernels._modules.kernel(file, entry)  # noqa: E731
            cuda_linear.run(get, name, on_device, its, out, count)
            return out.get()

        names = cuda_linear.fitting(o, hopper=hopper)
        found = {name: run(name) for name in names}
        alone = [
            cuda_linear.linear(
                lambda entry: kernels._modules.kernel("linear", entry),
                on_device[row : row + 1],
                its,
            ).get()
            for row in (0, counted - 1)
        ]

    first = found[names[0]]
    for name in names:
        assert (found[name][counted:] == 0x1234).all(), f"{name} writes padding"
        assert np.array_equal(first[:counted], found[name][:counted]), name
    assert np.array_equal(first[[0, counted - 1]], np.concatenate(alone))
    exact = x[:counted].astype(np.float64) @ weight.astype(np.float64).T
    size = abs(x[:counted]).astype(np.float64) @ abs(weight).astype(np.float64).T
    values = (first[:counted].astype(np.uint32) << 16).view(np.float32)
    assert (abs(values - exact) <= i * FLOAT32 * size + ROUNDOFF["bfloat16"] * abs(exact)).all()
