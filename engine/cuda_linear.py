"""Launches of projections on a CUDA device: linear.cu. Arrays are CuPy's, bfloat16 as 2-byte bits.

Which kernel runs depends on shape, alignment and the number of rows launched; which order sums
have depends on the first two alone, so a row's bits do not depend on the other rows.

Letters: n rows launched, h heads, i elements of a row, o of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from kdtr.engine.cuda_launch import launch

Array = Any
Kernel = Any  # cupy.RawKernel
GetKernel = Callable[[str], Kernel]

BLOCK = 256
_WIDE = 128  # rows of the weights of a block of linear_wide
_MANY = 4096  # rows of weights from which blocks take 32, and sums 8 slices instead of 16
_ROWS_OF_STREAM, _ROWS_OF_WIDE = (8, 24), (24, 40, 65)
_STAGES_OF_WIDE = {24: 5, 40: 4, 65: 4}
_MAX_TILES = 1 << 18  # that linear_wide counts

# Dynamic shared memory, at most, by kernel.
SHARED_BYTES = {
    **{
        f"linear_stream_{o}_{rows}_{stages}": 8 * stages * (o // 16) * 1024
        for o, deep in ((16, (4, 10)), (32, (3, 6)))
        for rows in _ROWS_OF_STREAM
        for stages in deep
    },
    **{
        f"linear_wide_{rows}_{slices}": stages * (16_384 + 128 * rows)
        for rows, stages in _STAGES_OF_WIDE.items()
        for slices in (8, 16)
    },
}


def linear(
    kernel: GetKernel, x: Array, weight: Array, count: Array | None = None, *, overlap: bool = False
) -> Array:
    """x [n, i], a view with any row stride, weight [o, i] contiguous -> [n, o].

    count    [1] int64 on the device: rows that count, all if None; the others are not written
    overlap  the launch may begin before the one ahead of it ends (`cuda_launch.launch`)
    """
    import cupy

    out = cupy.empty((len(x), len(weight)), x.dtype)
    x = _contiguous_rows(x)
    run(kernel, plan(x, weight, out), x, weight, out, count, overlap=overlap)
    return out


def batched_linear(
    kernel: GetKernel,
    x: Array,
    weight: Array,
    out: Array,
    count: Array | None = None,
    *,
    overlap: bool = False,
) -> None:
    """Per head: x [n, h, i], weight [h, o, i] contiguous -> out [n, h, o].

    x and out may be strided, out not along o.
    """
    n, h, i = x.shape
    o = weight.shape[1]
    x = _contiguous_rows(x)
    size = x.itemsize
    strides = (x.strides[0], x.strides[1], out.strides[0], out.strides[1])
    if fast(x, weight):
        rows = 8 if n <= 8 else 24
        name = f"linear_stream_16_{rows}_4"
        grid, shared = (-(-o // 16), -(-n // rows), h), SHARED_BYTES[name]
    else:
        name, grid, shared = "linear_any", (-(-o // 16), -(-n // 8), h), 0
    launch(
        kernel(name),
        grid,
        BLOCK,
        shared,
        (x, weight, out, count, n, o, i, *(ctypes.c_longlong(s // size) for s in strides)),
        overlap,
    )


def plan(x: Array, weight: Array, out: Array) -> str:
    """The name of the kernel that `linear` runs."""
    n, o = len(x), len(weight)
    if not fast(x, weight):
        return "linear_any"
    many = o >= _MANY
    rows = 40 if n <= 40 else 65
    if n > 24 and -(-o // _WIDE) * -(-n // rows) <= _MAX_TILES:
        return f"linear_wide_{rows}_{8 if many else 16}"
    blocks = -(-o // (32 if many else 16))
    deep = blocks <= 2 * multiprocessors()  # all at once, with as much in flight as fits
    stages = (6 if deep else 3) if many else (10 if deep else 4)
    return f"linear_stream_{32 if many else 16}_{8 if n <= 8 else 24}_{stages}"


def run(
    kernel: GetKernel,
    name: str,
    x: Array,
    weight: Array,
    out: Array,
    count: Array | None,
    *,
    overlap: bool = False,
) -> None:
    """The kernel of that name, whatever the shape; `linear_stream` and `linear_wide`: if `fast`."""
    import cupy

    n, (o, i) = len(x), weight.shape
    x_stride = ctypes.c_longlong(x.strides[0] // x.itemsize)
    out_stride = ctypes.c_longlong(out.strides[0] // out.itemsize)
    zero = ctypes.c_longlong(0)
    kind, *numbers = name.split("_")[1:]
    if kind == "wide":
        rows, slices = map(int, numbers)
        grid = (-(-o // _WIDE), slices // 2, -(-n // rows))
        parts = cupy.empty((grid[1], grid[2], rows, grid[0] * _WIDE), cupy.float32)
        shared = _STAGES_OF_WIDE[rows] * (16_384 + 128 * min(n, rows))
        arguments: tuple[Any, ...] = (x, weight, out, parts, arrived(), count, n, o, i)
        launch(kernel(name), grid, BLOCK, shared, (*arguments, x_stride, out_stride), overlap)
        return
    if kind == "any":
        o_rows, rows, shared = 16, 8, 0
    else:
        o_rows, rows, shared = int(numbers[0]), int(numbers[1]), SHARED_BYTES[name]
    grid = (-(-o // o_rows), -(-n // rows), 1)
    arguments = (x, weight, out, count, n, o, i, x_stride, zero, out_stride, zero)
    launch(kernel(name), grid, BLOCK, shared, arguments, overlap)


def fast(x: Array, weight: Array) -> bool:
    """Whether rows are bfloat16 in whole, aligned chunks of 16 bytes."""
    return (
        x.itemsize == 2
        and weight.shape[-1] % 8 == 0
        and all(stride % 16 == 0 for stride in x.strides[:-1])
        and x.data.ptr % 16 == 0
        and weight.data.ptr % 16 == 0
        and max(len(x), 24) * abs(x.strides[0]) < 1 << 32  # offsets are 32 bits
    )


def multiprocessors() -> int:
    import cupy

    return _multiprocessors(cupy.cuda.Device().id)


def arrived() -> Array:
    """Zeros that the current stream's kernels count with, and leave zero."""
    import cupy

    return _arrived(cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr)


@cache
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def _arrived(device: int, stream: int) -> Array:
    import cupy

    return cupy.zeros(_MAX_TILES, cupy.int32)


def _contiguous_rows(x: Array) -> Array:
    """x, or a copy whose rows' elements lie side by side."""
    import cupy

    return x if x.shape[-1] == 1 or x.strides[-1] == x.itemsize else cupy.ascontiguousarray(x)
