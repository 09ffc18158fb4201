"""Launches of experts on a CUDA device: experts.cu (MOE-4).

Arrays are CuPy's, bfloat16 as 2-byte bits. No grid depends on the routing, and nothing is read
back. A row's bits do not depend on the other rows.

Letters: n rows launched, m hidden, e experts, k chosen experts, i inner width of an expert, s of
the shared one.
"""

from __future__ import annotations

import ctypes
from typing import Any

from kdtr.engine import cuda_linear
from kdtr.engine.cuda_launch import launch
from kdtr.engine.cuda_linear import BLOCK, GetKernel, multiprocessors

Array = Any

# Dynamic shared memory by kernel.
SHARED_BYTES = {
    "gate_up_stream": 8 * 9216,
    "down_stream": 8 * 5 * 4 * 512,
}


def moe(
    kernel: GetKernel,
    x: Array,
    ids: Array,
    weights: Array,
    gate_up: Array,
    down: Array,
    shared: tuple[Array, Array] | None,
    groups: Array,
    count: Array | None = None,
    *,
    overlap: bool = False,
) -> Array:
    """Routed experts in the order of ids, plus the shared one -> [n, m].

    x [n, m], ids [n, k] ascending, weights [n, k], gate_up [e, 2i, m], down [e, m, i]
    shared  gate_up [2s, m] and down [m, s], or None
    groups  of `cuda_router`, of these ids
    """
    import cupy

    (n, k), (e, m, i) = ids.shape, down.shape
    shared_gate_up, shared_down = shared or (None, None)
    s = shared[1].shape[1] if shared else 0
    every = (gate_up, down, *(shared or ()))
    fast = all(cuda_linear.fast(x, weight, reach=n) for weight in every)
    inner, y = cupy.empty((n * k, i), x.dtype), cupy.empty((n * k, m), x.dtype)
    shared_inner = cupy.empty((n, s), x.dtype) if shared else None
    shared_y = cupy.empty((n, m), x.dtype) if shared else None
    out = cupy.empty((n, m), x.dtype)
    _gate_up(
        kernel, fast, x, gate_up, shared_gate_up, inner, shared_inner, groups, count,
        (n, e, k, m, i, s), overlap,
    )  # fmt: skip
    tiles = -(-m // 16)
    row_tiles = -(-tiles // (2 * multiprocessors()))
    name = "down_stream" if fast else "down_any"
    launch(
        kernel(name),
        (-(-tiles // row_tiles) if fast else -(-m // 8), 1, 1),
        BLOCK,
        SHARED_BYTES.get(name, 0),
        (
            *(inner, shared_inner, down, shared_down, y, shared_y, out, weights, groups, count),
            *(n, e, k, m, i, s, row_tiles),
        ),
        overlap,
    )
    return out


def swiglu(
    kernel: GetKernel,
    linear_kernel: GetKernel,
    x: Array,
    gate_up: Array,
    down: Array,
    count: Array | None = None,
    *,
    wgmma: GetKernel | None = None,
    overlap: bool = False,
) -> Array:
    """x [n, m], gate_up [2s, m], down [m, s] -> down(silu(gate x) * up x) [n, m]."""
    import cupy

    n, (m, s) = len(x), down.shape
    inner = cupy.empty((n, s), x.dtype)
    _gate_up(
        kernel, cuda_linear.fast(x, gate_up, n), x, None, gate_up, None, inner, None, count,
        (n, 0, 0, m, 0, s), overlap,
    )  # fmt: skip
    return cuda_linear.linear(linear_kernel, inner, down, count, wgmma=wgmma, overlap=overlap)


def _gate_up(
    kernel: GetKernel,
    fast: bool,
    x: Array,
    gate_up: Array | None,
    shared_gate_up: Array | None,
    inner: Array | None,
    shared_inner: Array | None,
    groups: Array | None,
    count: Array | None,
    sizes: tuple[int, ...],
    overlap: bool,
) -> None:
    name = "gate_up_stream" if fast else "gate_up_any"
    launch(
        kernel(name),
        ((3 if fast else 8) * multiprocessors(), 1, 1),
        BLOCK,
        SHARED_BYTES.get(name, 0),
        (
            *(x, gate_up, shared_gate_up, inner, shared_inner, groups, count, *sizes),
            ctypes.c_longlong(x.strides[0] // x.itemsize),
        ),
        overlap,
    )
