"""Launches of projections on a CUDA device: linear.cu. Arrays are CuPy's, bfloat16 as 2-byte bits.

Which kernel runs depends on shape, alignment and the number of rows launched; which order sums
have depends on the first two alone, so a row's bits do not depend on the other rows.

Letters: n rows launched, h heads, i elements of a row, o of a result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_launch import launch

Array = Any
Kernel = Any  # cupy.RawKernel
GetKernel = Callable[[str], Kernel]

BLOCK = 256
WGMMA = "linear_wgmma"  # the file of those that Hopper alone has
_MANY = 4096  # rows of weights from which sums have 8 slices instead of 16


@dataclass(frozen=True, slots=True)
class _Fast:
    """A kernel of projections whose rows are `fast`, and what a block of it has.

    file          of kernels/, without its ending
    weights       rows of weights
    rows          of x
    slices        into which i is cut
    parts         blocks that share the slices: a cluster
    shared_bytes  dynamic
    """

    name: str
    file: str
    weights: int
    rows: int
    slices: int
    parts: int
    threads: int
    shared_bytes: int


def _stream(weights: int, rows: int, stages: int) -> _Fast:
    """Each of 8 warps has stages of its own."""
    n_bytes = 8 * stages * (2 * weights // 16 + rows // 8) * 512
    name = f"linear_stream_{weights}_{rows}"
    return _Fast(name, "linear", weights, rows, 256 // weights, 1, BLOCK, n_bytes)


def _wide(rows: int, slices: int, stages: int) -> _Fast:
    """A block has 128 rows of weights and two slices."""
    n_bytes = stages * 2 * 64 * (128 + rows)
    name = f"linear_wide_{rows}_{slices}"
    return _Fast(name, "linear", 128, rows, slices, slices // 2, 128, n_bytes)


def _wgmma(rows: int, bands: int, slices: int, parts: int, stages: int) -> _Fast:
    """A warpgroup has 64 rows of weights and four slices; a warp beside them copies for them."""
    sources = slices // 4
    sides = sources // parts
    given = sides * -(-rows // 8 // sources) * (sources - 1) * 4 * bands * 512
    rings = sides * stages * (128 * (64 * bands + rows) + 16)
    n_bytes = -(-given // 1_024) * 1_024 + rings + 8
    name = f"{WGMMA}_{rows}_{bands}_{slices}_{parts}"
    threads = sides * (128 * bands + 32)
    return _Fast(name, WGMMA, 64 * bands, rows, slices, parts, threads, n_bytes)


_FAST = {
    kernel.name: kernel
    for kernel in (
        _stream(16, 8, stages=8),
        _stream(16, 24, stages=4),
        _stream(32, 8, stages=4),
        _stream(32, 24, stages=3),
        *(_wide(rows, slices, stages=4) for rows in (40, 65) for slices in (8, 16)),
        *(
            _wgmma(rows, bands, slices, parts, stages)
            for rows in (40, 72)
            for bands, slices, parts, stages in (
                (1, 16, 4, 8),
                (2, 16, 4, 7),
                (1, 8, 2, 8),
                (1, 8, 1, 5),
            )
        ),
    )
}
MOST_ROWS = max(kernel.rows for kernel in _FAST.values())  # of x, a block of a projection
# linear_heads_<rows of x>, and the stages of each.
_HEADS = {8: 4, 24: 4, 65: 3}


def _heads_bytes(rows: int, i: int = 1 << 20) -> int:
    steps = -(-i // 32)
    stages = min(_HEADS[rows], -(-steps // 4)) * (8_192 + 256 * rows)
    return max(stages, 4 * 1_024 * -(-rows // 8))  # the warps' sums


# Dynamic shared memory, at most, by kernel.
SHARED_BYTES = {
    **{name: kernel.shared_bytes for name, kernel in _FAST.items()},
    **{
        f"{kind}_{rows}": _heads_bytes(rows)
        for kind in ("linear_heads", "latent_query")
        for rows in _HEADS
    },
}


def linear(
    kernel: GetKernel,
    x: Array,
    weight: Array,
    count: Array | None = None,
    *,
    wgmma: GetKernel | None = None,
    overlap: bool = False,
) -> Array:
    """x [n, i], a view with any row stride, weight [o, i] contiguous -> [n, o].

    count    [1] int64 on the device: rows that count, all if None; the others are not written
    wgmma    entry points of linear_wgmma.cu, where the device is a Hopper
    overlap  the launch may begin before the one ahead of it ends (`cuda_launch.launch`)
    """
    import cupy

    out = cupy.empty((len(x), len(weight)), x.dtype)
    x = _contiguous_rows(x)
    name = plan(x, weight, hopper=wgmma is not None)
    if wgmma is not None and file_of(name) == WGMMA:
        kernel = wgmma
    run(kernel, name, x, weight, out, count, overlap=overlap)
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
        rows = _rows_of_heads(n)
        name, block, shared = f"linear_heads_{rows}", 128, _heads_bytes(rows, i)
        grid = (-(-o // 32), h, -(-n // rows))
    else:
        name, block, shared, grid = "linear_any", BLOCK, 0, (-(-o // 16), -(-n // 8), h)
    launch(
        kernel(name),
        grid,
        block,
        shared,
        (x, weight, out, count, n, o, i, *(ctypes.c_longlong(s // size) for s in strides)),
        overlap,
    )


def latent_query(
    kernel: GetKernel,
    q: Array,
    w_kc: Array,
    cos: Array,
    sin: Array,
    query: Array,
    count: Array | None = None,
    *,
    overlap: bool = False,
) -> None:
    """q [n, h, d + r], w_kc [h, c, d], cos and sin [n, r / 2] float32 -> query [n, h, c + r].

    All contiguous, and q and w_kc such that `fast_query` holds.
    """
    n, h, width = q.shape
    _, c, d = w_kc.shape
    rows = _rows_of_heads(n)
    launch(
        kernel(f"latent_query_{rows}"),
        (-(-c // 32) + 1, h, -(-n // rows)),
        128,
        _heads_bytes(rows, d),
        (q, w_kc, cos, sin, query, count, n, c, d, width - d),
        overlap,
    )


def fast_query(q: Array, w_kc: Array) -> bool:
    """Whether `latent_query` can."""
    return bool(q.flags.c_contiguous) and fast(q, w_kc)


def _rows_of_heads(n: int) -> int:
    return 8 if n <= 8 else 24 if n <= 24 else 65


def plan(x: Array, weight: Array, *, hopper: bool = False) -> str:
    """The name of the kernel that `linear` runs; on Hopper it has one more to choose from."""
    n, o = len(x), len(weight)
    if not fast(x, weight):
        return "linear_any"
    slices = slices_of(o)
    if n <= 24:
        return f"linear_stream_{256 // slices}_{8 if n <= 8 else 24}"
    if hopper:
        bands, parts = _wgmma_shape(o)
        return f"linear_wgmma_{40 if n <= 40 else 72}_{bands}_{slices}_{parts}"
    return f"linear_wide_{40 if n <= 40 else 65}_{slices}"


def fitting(o: int, *, hopper: bool) -> list[str]:
    """All that `plan` might choose for o rows of weights that are `fast`, and `run` may run.

    Those with as many slices: they have one order of sums.
    """
    slices = slices_of(o)
    return [
        name
        for name, kernel in _FAST.items()
        if kernel.slices == slices and (hopper or kernel.file != WGMMA)
    ]


def file_of(name: str) -> str:
    """The file of kernels/ that has a kernel of projections, without its ending."""
    if name in _FAST:
        return _FAST[name].file
    assert name in SHARED_BYTES or name == "linear_any", name
    return "linear"


def slices_of(o: int) -> int:
    """Into which i is cut, by the rows of weights alone."""
    return 8 if o >= _MANY else 16


def _wgmma_shape(o: int) -> tuple[int, int]:
    """Bands of 64 rows in a block, and blocks that share i: the fastest of those tried on an H200.

    They choose a grid; the order of sums does not depend on them.
    """
    if slices_of(o) == 8:
        return 1, 2 if o <= 66 * 64 else 1  # 66 clusters of two have an SM for each block
    return (1 if o <= 30 * 64 else 2), 4  # and 30 of four


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
    """The kernel of that name, whatever the number of rows.

    `linear_any`, or one of those `fitting`, if x and weight are `fast`.
    """
    n, (o, i) = len(x), weight.shape
    x_stride = ctypes.c_longlong(x.strides[0] // x.itemsize)
    out_stride = ctypes.c_longlong(out.strides[0] // out.itemsize)
    if name == "linear_any":
        zero = ctypes.c_longlong(0)
        grid = (-(-o // 16), -(-n // 8), 1)
        arguments: tuple[Any, ...] = (x, weight, out, count, n, o, i, x_stride, zero, out_stride)
        launch(kernel(name), grid, BLOCK, 0, (*arguments, zero), overlap)
        return
    its = _FAST[name]
    grid = (-(-o // its.weights), its.parts, -(-n // its.rows))
    if its.file == WGMMA:
        maps = cuda_hopper.matrix_map(weight, its.weights), cuda_hopper.matrix_map(x, its.rows)
        arguments = (*maps, out, count, n, o, i, out_stride)
    else:
        arguments = (x, weight, out, count, n, o, i, x_stride, out_stride)
    launch(kernel(name), grid, its.threads, its.shared_bytes, arguments, overlap)


def fast(x: Array, weight: Array, reach: int = MOST_ROWS) -> bool:
    """Whether rows are bfloat16 in whole, aligned chunks of 16 bytes.

    reach  rows of x that a block finds by an offset of 32 bits
    """
    return (
        x.itemsize == 2
        and weight.shape[-1] % 8 == 0
        and all(stride % 16 == 0 for stride in x.strides[:-1])
        and x.data.ptr % 16 == 0
        and weight.data.ptr % 16 == 0
        and reach * abs(x.strides[0]) < 1 << 32
    )


def multiprocessors() -> int:
    import cupy

    return _multiprocessors(cupy.cuda.Device().id)


@cache
def _multiprocessors(device: int) -> int:
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


def _contiguous_rows(x: Array) -> Array:
    """x, or a copy whose rows' elements lie side by side."""
    import cupy

    return x if x.shape[-1] == 1 or x.strides[-1] == x.itemsize else cupy.ascontiguousarray(x)
