"""Launches of tree attention on a CUDA device (MLA-2, MLA-3, MASK-3, NUM-4).

Two kernels, one per layout of the latent cache: verify_attn.cu for rows in plain order, any sizes
and both storage types; verify_attn_mma.cu for swizzled rows of bfloat16. Arrays are CuPy's. What
changes from round to round is read on the device, so the launches can be captured in a graph;
grids depend on n and max_slots alone.

Letters: n rows launched, h heads, c latent, r rope.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kdtr.engine.cuda_launch import launch

Array = Any
Kernel = Any  # cupy.RawKernel
GetKernel = Callable[[str], Kernel]

SWIZZLED_LATENT, SWIZZLED_ROPE = 512, 64
TILE = 32  # page sizes are multiples of it


class Variant(NamedTuple):
    """A compiled shape of the fast kernel.

    rows, threads  of a block
    keys           slots at a time
    alone_us       that it takes for them with one block on an SM; together_us: with two
    """

    name: str
    rows: int
    threads: int
    keys: int
    blocks_per_sm: int
    alone_us: float
    together_us: float


VARIANTS = {
    "four": (Variant("32", 32, 128, 32, 2, 1.35, 2.0), Variant("16", 16, 128, 32, 2, 0.9, 1.1)),
    "eight": (
        Variant("p48", 48, 256, 16, 1, 0.55, 0.55),
        Variant("p32", 32, 256, 16, 1, 0.45, 0.45),
        Variant("p16", 16, 256, 16, 2, 0.35, 0.45),
    ),
}
USE = "eight"

# Dynamic shared memory of the fast kernel, by variant; the .cu asserts the same numbers.
MMA_SHARED_BYTES = {"32": 96_432, "16": 81_072, "p48": 98_848, "p32": 90_528, "p16": 82_208}
_HEADS_PER_BLOCK, _CHUNK = 4, 32  # of the plain kernel


class LayerCache(NamedTuple):
    """One layer's latent rows and where slots lie in them.

    rows        [physical rows, c + r]
    page_table  [n_pages] int64, logical page -> physical page
    swizzled    16-byte chunk q of every 128 bytes is stored at q ^ (physical row & 7)
    """

    rows: Array
    page_table: Array
    page_size: int
    swizzled: bool


class DeviceVisibility(NamedTuple):
    """Visibility, read on the device: row i sees slots below open_len and those of its bits.

    count     [1] int64   rows that count; the others are padding
    open_len  [1] int64
    n_slots   [1] int64   nothing at or beyond is read
    bits      [n, words] uint32   bit j & 31 of word j >> 5 for slot open_len + j
    """

    count: Array
    open_len: Array
    n_slots: Array
    bits: Array


def swizzle(rows: Array) -> Array:
    """rows [..., physical rows, 576], 2-byte elements -> the same, swizzled; its own inverse."""
    *lead, n_rows, row_len = rows.shape
    chunks = rows.reshape(*lead, n_rows, row_len // 64, 8, 8)  # 128 bytes of 8 chunks of 8 elements
    swizzled = chunks.copy()
    for low in range(8):
        for q in range(8):
            swizzled[..., low::8, :, q ^ low, :] = chunks[..., low::8, :, q, :]
    return swizzled.reshape(rows.shape)


def verify_attn(
    plain: GetKernel,
    mma: GetKernel,
    layer: LayerCache,
    query: Array,
    visibility: DeviceVisibility,
    latent_len: int,
    scale: float,
    split_size: int,
    max_slots: int,
    scores: Array | None = None,
    splits: int | None = None,
) -> Array:
    """query [n, h, c + r] -> out_latent [n, h, c].

    plain, mma  entry points of verify_attn.cu and verify_attn_mma.cu, by name
    split_size  slots a split, of the plain kernel; the fast one has its own choice, or `splits`
    max_slots   at least n_slots: the grid is made for it
    scores      [n, h, at least n_slots] float32 filled with -inf, or None
    """
    if layer.swizzled:
        return _verify_attn_mma(
            mma, layer, query, visibility, latent_len, scale, max_slots, scores, splits
        )
    return _verify_attn_plain(
        plain, layer, query, visibility, latent_len, scale, split_size, max_slots, scores
    )


def _verify_attn_plain(
    kernel: GetKernel,
    layer: LayerCache,
    query: Array,
    visibility: DeviceVisibility,
    c: int,
    scale: float,
    split_size: int,
    max_slots: int,
    scores: Array | None,
) -> Array:
    import cupy as cp

    n, h, row_len = query.shape
    _check_operands(layer, query, visibility, scores)
    splits = max(1, -(-max_slots // split_size))
    top = cp.empty((splits, n, h), cp.float32)
    norm = cp.empty((splits, n, h), cp.float32)
    acc = cp.empty((splits, n, h, c), cp.float32)
    out = cp.empty((n, h, c), query.dtype)
    shared = 4 * (_HEADS_PER_BLOCK * (row_len + c) + _HEADS_PER_BLOCK * (_CHUNK + 4)) + 8 * _CHUNK
    launch(
        kernel("verify_attn_split"),
        (-(-h // _HEADS_PER_BLOCK), n, splits),
        256,
        shared,
        [
            *(query, layer.rows, layer.page_table, visibility.bits),
            *(visibility.count, visibility.open_len, visibility.n_slots, top, norm, acc, scores),
            ctypes.c_longlong(0 if scores is None else scores.shape[-1]),
            *(ctypes.c_float(scale), layer.page_size, visibility.bits.shape[1], split_size),
            *(n, h, c, row_len - c),
        ],
    )
    launch(
        kernel("verify_attn_merge"),
        (h, n, 1),
        128,
        0,
        [top, norm, acc, visibility.count, visibility.n_slots, out, split_size, n, h, c],
    )
    return out


def _verify_attn_mma(
    kernel: GetKernel,
    layer: LayerCache,
    query: Array,
    visibility: DeviceVisibility,
    c: int,
    scale: float,
    max_slots: int,
    scores: Array | None,
    splits: int | None,
) -> Array:
    import cupy as cp

    n, h, row_len = query.shape
    _check_operands(layer, query, visibility, scores)
    assert (c, row_len) == (SWIZZLED_LATENT, SWIZZLED_LATENT + SWIZZLED_ROPE), (c, row_len)
    assert scale > 0, scale
    assert query.dtype.itemsize == 2, query.dtype
    assert layer.page_size % TILE == 0, layer.page_size
    variant = choose_variant(n * h)
    if splits is None:
        splits = choose_splits(n * h, max_slots, *_device_size(cp.cuda.Device().id))
    acc = cp.empty((splits, n * h, c), cp.float32)
    stats = cp.empty((n * h, splits, 2), cp.float32)
    out = cp.empty((n, h, c), query.dtype)
    split = kernel(f"verify_attn_mma_{variant.name}{'' if scores is None else '_scores'}")
    shared = MMA_SHARED_BYTES[variant.name]
    if split.max_dynamic_shared_size_bytes < shared:
        split.preferred_shared_memory_carveout = 100  # per cent: room for two blocks on an SM
    launch(
        split,
        (-(-n * h // variant.rows), splits, 1),
        variant.threads,
        shared,
        [
            *(query, layer.rows, layer.page_table, visibility.bits),
            *(visibility.count, visibility.open_len, visibility.n_slots, acc, stats, scores),
            ctypes.c_longlong(0 if scores is None else scores.shape[-1]),
            *(ctypes.c_float(scale), layer.page_table.size, layer.page_size // variant.keys),
            *(visibility.bits.shape[1], n, h),
        ],
        overlap=True,
    )
    parts = merge_parts(splits)
    launch(
        kernel(f"verify_attn_mma_merge_{parts}"),
        (n * h, 128 * parts // 256, 1),
        256,
        0,
        [acc, stats, visibility.count, visibility.n_slots, out, splits, n, h, variant.keys],
        overlap=True,
    )
    return out


def merge_parts(splits: int) -> int:
    """How many threads share the splits of a row's four columns."""
    return 2 if splits <= 16 else 8 if splits <= 64 else 32


def choose_variant(n_rows: int) -> Variant:
    variants = VARIANTS[USE]
    return min((v for v in variants if v.rows >= n_rows), key=lambda v: v.rows, default=variants[0])


# Microseconds, from measurements on an H200 (benchmarks/verify_attn.py --sweep). They choose a
# grid, nothing else.
_CACHE_BYTES_PER_US = 4.3e6
_BLOCK_BYTES_PER_US = 0.025e6
_WAVE_US = 2.0  # what a wave of blocks costs besides its slots
_PARTIAL_US_PER_MB = 0.35  # of partial results, written and read


def choose_splits(n_rows: int, max_slots: int, n_sms: int, blocks_per_sm: int) -> int:
    """How many blocks share the slots: enough to fill the device, few enough to merge."""
    variant = choose_variant(n_rows)
    units = max(1, -(-max_slots // variant.keys))
    row_blocks = -(-n_rows // variant.rows)
    at_once = n_sms * min(blocks_per_sm, variant.blocks_per_sm)

    def cost(splits: int) -> float:
        blocks = row_blocks * splits
        unit_us = variant.alone_us if blocks <= n_sms else variant.together_us
        compute = -(-blocks // at_once) * (-(-units // splits) * unit_us + _WAVE_US)
        cache = max_slots * 1152 / min(_CACHE_BYTES_PER_US, blocks * _BLOCK_BYTES_PER_US)
        return max(compute, cache) + (splits * n_rows * 2048e-6 * _PARTIAL_US_PER_MB)

    return min(range(1, min(units, max(1, at_once // row_blocks)) + 1), key=cost)


@cache
def _device_size(device: int) -> tuple[int, int]:
    """SMs, and blocks of the fast kernel that one holds at a time."""
    import cupy as cp

    attributes = cp.cuda.Device(device).attributes
    shared = attributes["MaxSharedMemoryPerMultiprocessor"]
    return attributes["MultiProcessorCount"], max(
        1, min(2, shared // (MMA_SHARED_BYTES["32"] + 1024))
    )


def _check_operands(
    layer: LayerCache, query: Array, visibility: DeviceVisibility, scores: Array | None
) -> None:
    """What the kernels take for granted: a wrong operand here is a bug of the kernel set."""
    for array in (query, layer.rows, visibility.bits):
        assert array.flags.c_contiguous
    assert visibility.bits.shape[0] == query.shape[0], visibility.bits.shape
    assert (layer.rows.dtype, layer.rows.shape[-1]) == (query.dtype, query.shape[-1])
    for number in (visibility.count, visibility.open_len, visibility.n_slots, layer.page_table):
        assert number.dtype.itemsize == 8, number.dtype
    assert scores is None or (scores.flags.c_contiguous and scores.dtype.itemsize == 4)
