"""Every kernel that may serve a projection: its bits.

All of them give the same bits, and a row alone as among others; so a row's bits do not depend on
the number of rows, which decides which kernel runs. That wgmma gives the bits of mma.sync is an
observation, made by these tests on an H200: the instruction set promises it nowhere. Where the two
differ, Hopper's half fails, and linear.cu alone may serve projections.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_pair import FLOAT32, ROUNDOFF, Pair

from kdtr.engine import cuda_linear

# o, i. Weights of 4,096 rows and more have 8 slices of i, smaller ones 16; a step is 32 elements of
# i, a stage of wgmma 64; a block has 16, 32, 64 or 128 rows of weights.
SHAPES = (
    (64, 64),  # two steps for 16 slices: most are empty; fewer rows than a block may have
    (576, 1056),  # 33 steps: slices that begin in the middle of a stage
    (576, 1048),  # the same, and a last step that lacks one chunk of 16 bytes
    (1100, 2080),  # rows left over that are no whole eights
    (1100, 2088),  # the same, and a last step of one chunk
    (4100, 520),  # 8 slices: four rows left over, and a last step of one chunk
    (4160, 2336),  # 8 slices: 64 rows left over, all that a block of wgmma has
)
NAN, UNTOUCHED = 0x7FC0, 0x1234  # bits of bfloat16


@pytest.fixture(scope="session")
def bfloat16(cuda_sets: dict[str, Any]) -> Any:
    return cuda_sets["bfloat16"]


@pytest.fixture(params=["linear", cuda_linear.WGMMA])
def file(bfloat16: Any, request: pytest.FixtureRequest) -> str:
    """Whose kernels a test is of."""
    if not bfloat16._modules.has(request.param):
        found = bfloat16._cupy.cuda.Device().compute_capability
        pytest.skip(f"{request.param}.cu is Hopper's (90); this device has {found}")
    return str(request.param)


def fitting(o: int, file: str) -> list[str]:
    names = [n for n in cuda_linear.fitting(o, hopper=True) if cuda_linear.file_of(n) == file]
    assert names, f"no kernel of {file}.cu fits {o} rows of weights: nothing would be tested"
    return names


def kernel_of(kernels: Any, file: str) -> Callable[[str], Any]:
    return partial(kernels._modules.kernel, file)


def spread(kernels: Any, x: Any) -> Any:
    """The same rows in a wider array, with NaN on both sides of them."""
    n, i = x.shape
    wide = kernels._empty((n, 8 + i + 16), x.dtype)
    wide.fill(NAN)
    view = wide[:, 8 : 8 + i]
    view[...] = x
    return view


@pytest.mark.parametrize(("o", "i"), SHAPES)
@pytest.mark.parametrize("n", [25, 40, 65, 130])
def test_all_kernels_give_the_same_bits(bfloat16: Any, file: str, o: int, i: int, n: int) -> None:
    """Those of the first one of linear.cu, whose distance from the exact product is bounded."""
    pair = Pair(bfloat16, "bfloat16", seed=o + n)
    x, on_device = pair.numbers(n, i)
    weight, its = pair.numbers(o, i)
    counted = n - n // 4

    def run(name: str, rows: Any) -> np.ndarray:
        assert cuda_linear.fast(rows, its)
        out = bfloat16._empty((n, o), np.uint16)
        out.fill(UNTOUCHED)
        get = kernel_of(bfloat16, cuda_linear.file_of(name))
        cuda_linear.run(get, name, rows, its, out, count)
        bits: np.ndarray = out.get()
        return bits

    with bfloat16.turn:
        count = bfloat16._uploaded(np.array([counted], np.int64))
        on_device[counted:] = NAN  # where rows are padding
        layouts = {"contiguous rows": on_device, "rows further apart": spread(bfloat16, on_device)}
        first = run(fitting(o, "linear")[0], on_device)
        found = {
            f"{name}, {layout}": run(name, rows)
            for name in fitting(o, file)
            for layout, rows in layouts.items()
        }
        alone = [
            cuda_linear.linear(kernel_of(bfloat16, "linear"), on_device[row : row + 1], its).get()
            for row in (0, counted - 1)
        ]

    exact = x[:counted].astype(np.float64) @ weight.astype(np.float64).T
    size = abs(x[:counted]).astype(np.float64) @ abs(weight).astype(np.float64).T
    values = (first[:counted].astype(np.uint32) << 16).view(np.float32)
    assert (abs(values - exact) <= i * FLOAT32 * size + ROUNDOFF["bfloat16"] * abs(exact)).all()
    assert np.array_equal(first[[0, counted - 1]], np.concatenate(alone))
    for which, bits in found.items():
        assert (bits[counted:] == UNTOUCHED).all(), f"{which}: padding is written"
        assert np.array_equal(first[:counted], bits[:counted]), which
