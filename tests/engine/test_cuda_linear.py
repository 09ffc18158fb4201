"""Which kernel serves a projection, without a device: that it exists, and its order of sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.engine import cuda_linear

SIZES = (8, 1_024, 1_536, 1_544, 4_095, 4_096, 7_168, 129_280)  # rows of weights


def matrix(rows: int, columns: int, itemsize: int = 2) -> Any:
    """As much of an array as `plan` looks at."""

    class Matrix(SimpleNamespace):
        def __len__(self) -> int:
            return rows

    return Matrix(
        shape=(rows, columns),
        strides=(columns * itemsize, itemsize),
        itemsize=itemsize,
        data=SimpleNamespace(ptr=0),
    )


def slices(name: str) -> int:
    """As the .cu files name their kernels."""
    kind, *numbers = name.split("_")[1:]
    return {
        "stream": lambda: 256 // int(numbers[0]),
        "wide": lambda: int(numbers[1]),
        "wgmma": lambda: int(numbers[2]),
    }[kind]()


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("o", SIZES)
def test_the_number_of_rows_chooses_the_kernel_and_not_the_order(o: int, hopper: bool) -> None:
    names = {
        n: cuda_linear.plan(matrix(n, 512), matrix(o, 512), hopper=hopper)
        for n in (1, 8, 9, 24, 25, 40, 41, 65, 129, 5_000)
    }

    assert {cuda_linear.slices_of(o)} == {slices(name) for name in names.values()}
    assert set(names.values()) <= set(cuda_linear.fitting(o, hopper=hopper))
    assert hopper == any("wgmma" in name for name in names.values())


def test_every_kernel_has_a_file_and_others_none() -> None:
    for name in (*cuda_linear.SHARED_BYTES, "linear_any"):
        assert ("linear_wgmma" if "wgmma" in name else "linear") == cuda_linear.file_of(name)
    with pytest.raises(AssertionError, match="linear_wide_66"):
        cuda_linear.file_of("linear_wide_66")


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("o", SIZES)
def test_kernels_that_fit_cut_as_many_slices(o: int, hopper: bool) -> None:
    names = cuda_linear.fitting(o, hopper=hopper)

    assert {cuda_linear.slices_of(o)} == {slices(name) for name in names}
    assert set(names) <= set(cuda_linear.SHARED_BYTES)
    assert len(names) == len(set(names))
    assert hopper == any("wgmma" in name for name in names)
    for name in names:
        assert ("linear_wgmma" if "wgmma" in name else "linear") == cuda_linear.file_of(name)


def test_every_kernel_of_projections_fits_some_weights() -> None:
    heads = ("linear_heads", "latent_query")

    some = {name for o in SIZES for name in cuda_linear.fitting(o, hopper=True)}

    assert {name for name in cuda_linear.SHARED_BYTES if not name.startswith(heads)} == some


def test_rows_that_are_not_whole_chunks_take_the_general_kernel() -> None:
    for odd in (matrix(65, 33), matrix(65, 64, itemsize=4)):
        assert "linear_any" == cuda_linear.plan(odd, matrix(100, odd.shape[1]), hopper=True)


def test_a_prefill_of_any_length_keeps_the_order_of_sums() -> None:
    """64 heads of 512: 65,536 rows are 4 GiB, and a block reaches over 72 of them."""
    weight = matrix(7_168, 64 * 512)

    assert {"linear_wide_65_8"} == {
        cuda_linear.plan(matrix(n, 64 * 512), weight) for n in (66, 65_535, 65_536, 500_000)
    }
    assert "linear_any" == cuda_linear.plan(matrix(66, 1 << 25), matrix(7_168, 1 << 25))
