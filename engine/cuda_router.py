"""Launches of the router and its choice on a CUDA device: router.cu (MOE-1 to MOE-3).

Arrays are CuPy's, bfloat16 as 2-byte bits. No grid depends on the routing, and nothing is read
back. A row's bits do not depend on the other rows.

Letters: n rows launched, m hidden, e experts, k chosen experts.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from kdtr.engine import cuda_linear
from kdtr.engine.cuda_launch import launch
from kdtr.engine.cuda_linear import BLOCK, GetKernel

if TYPE_CHECKING:
    from kdtr.contract import ModelConfig

Array = Any

MAX_EXPERTS, MAX_CHOSEN, MAX_GROUPS = 512, 16, 32
_ROUTER_PARTS = 4
_ACTIVATIONS = {"sigmoid": 1, "softmax": 2}  # contract.SIGMOID, SOFTMAX

_CHOOSE_BLOCK = 128

# Dynamic shared memory by kernel.
SHARED_BYTES = {
    "router_stream_8": 4 * 8 * 3 * 512,
    "router_stream_24": 4 * 6 * 5 * 512,
}


def route(
    kernel: GetKernel,
    x: Array,
    gate: Array,
    correction_bias: Array,
    config: ModelConfig,
    count: Array | None = None,
    groups: Array | None = None,
    arrived: Array | None = None,
    *,
    overlap: bool = False,
) -> tuple[Array, Array, Array]:
    """x [n, m], gate [e, m], correction_bias [e] float32 -> scores [n, e], ids and weights [n, k].

    groups   of `new_groups`, to be filled; None: by `grouped`, in a launch more
    arrived  [1] int32, 0 before and after, of the stream alone; with `groups`, where n > 1
    """
    parts = router_scores(kernel, x, gate, count, overlap=overlap)
    return choose_experts(
        kernel, parts, correction_bias, config, count, groups, arrived, raw=True, overlap=overlap
    )


def router_scores(
    kernel: GetKernel, x: Array, gate: Array, count: Array | None, *, overlap: bool = False
) -> Array:
    """x [n, m], gate [e, m] -> [parts, n, e] float32, to be added and taken for x gate^T."""
    import cupy

    n, (e, m) = len(x), gate.shape
    stride = ctypes.c_longlong(x.strides[0] // x.itemsize)
    if cuda_linear.fast(x, gate):
        rows = 8 if n <= 8 else 24
        name, block = f"router_stream_{rows}", 128
        grid = (-(-e // 16), _ROUTER_PARTS, -(-n // rows))
        parts = cupy.empty((_ROUTER_PARTS, n, e), cupy.float32)
    else:
        name, block, grid = "router_any", BLOCK, (-(-e // 16), -(-n // 8), 1)
        parts = cupy.empty((1, n, e), cupy.float32)
    arguments = (x, gate, parts, count, n, e, m, stride)
    launch(kernel(name), grid, block, SHARED_BYTES.get(name, 0), arguments, overlap)
    return parts


def choose_experts(
    kernel: GetKernel,
    scores: Array,
    correction_bias: Array,
    config: ModelConfig,
    count: Array | None = None,
    groups: Array | None = None,
    arrived: Array | None = None,
    *,
    raw: bool = False,
    overlap: bool = False,
) -> tuple[Array, Array, Array]:
    """scores [n, e], or with `raw` the parts of router_scores -> scores, ids, weights."""
    import cupy

    n_parts = len(scores) if raw else 1
    n, e = scores.shape[-2:]
    assert groups is None or arrived is not None or n == 1
    k = config.num_experts_per_tok
    final = cupy.empty((n, e), cupy.float32) if raw else scores
    ids, weights = cupy.empty((n, k), cupy.int64), cupy.empty((n, k), cupy.float32)
    launch(
        kernel("choose"),
        (n, 1, 1),
        _CHOOSE_BLOCK,
        0,
        (
            *(scores, final, correction_bias, ids, weights, groups, arrived, count, n, e, k),
            *(n_parts, _ACTIVATIONS[config.scoring_func] if raw else 0),
            *(config.n_group, config.topk_group, int(config.norm_topk_prob)),
            ctypes.c_float(config.routed_scaling_factor),
        ),
        overlap,
    )
    return final, ids, weights


def new_groups(n: int, e: int, k: int) -> Array:
    """Where the pairs (row, expert) are listed by expert; see pairs.cuh."""
    import cupy

    return cupy.empty(2 + 2 * e + 2 * n * k, cupy.int32)


def grouped(
    kernel: GetKernel, ids: Array, e: int, count: Array | None = None, *, overlap: bool = False
) -> Array:
    """The pairs of ids [n, k], of e experts, by expert."""
    n, k = ids.shape
    groups = new_groups(n, e, k)
    launch(kernel("group"), (1, 1, 1), _CHOOSE_BLOCK, 0, (ids, groups, count, n, e, k), overlap)
    return groups
