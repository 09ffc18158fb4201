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
TILE = 32  # slots that the fast kernel takes at a time

# Dynamic shared memory of the fast kernel, by rows of a block; the .cu asserts the same numbers.
MMA_SHARED_BYTES = {32: 96_432, 16: 81_072}
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
    block_rows = 16 if n * h <= 16 else 32
    if splits is None:
        splits = choose_splits(n * h, max_slots, *_device_size(cp.cuda.Device().id))
    acc = cp.empty((splits, n * h, c), cp.float32)
    stats = cp.empty((n * h, splits, 2), cp.float32)
    out = cp.empty((n, h, c), query.dtype)
    split = kernel(f"verify_attn_mma_{block_rows}{'' if scores is None else '_scores'}")
    if split.max_dynamic_shared_size_bytes < MMA_SHARED_BYTES[block_rows]:
        split.preferred_shared_memory_carveout = 100  # per cent: room for two blocks on an SM
    launch(
        split,
        (-(-n * h // block_rows), splits, 1),
        128,
        MMA_SHARED_BYTES[block_rows],
        [
            *(query, layer.rows, layer.page_table, visibility.bits),
            *(visibility.count, visibility.open_len, visibility.n_slots, acc, stats, scores),
            ctypes.c_longlong(0 if scores is None else scores.shape[-1]),
            *(ctypes.c_float(scale), layer.page_table.size, layer.page_size // TILE),
            *(visibility.bits.shape[1], n, h),
        ],
        overlap=True,
    )
    launch(
        kernel("verify_attn_mma_merge"),
        (n * h, 4, 1),
        256,
        0,
        [acc, stats, visibility.count, visibility.n_slots, out, splits, n, h],
        overlap=True,
    )
    return out


# Microseconds, from measurements on an H200 (benchmarks/verify_attn.py --sweep): a tile with one
# and with two blocks on an SM, what a wave of blocks costs besides, and a megabyte of partial
# results, written and read. They choose a grid, nothing else.
_TILE_US = {16: (0.90, 1.10), 32: (0.70, 1.30)}
_CACHE_TILE_US = 0.0088  # a tile from memory, all SMs together
_WAVE_US = 1.5
_PARTIAL_US_PER_MB = 0.55


def choose_splits(n_rows: int, max_slots: int, n_sms: int, blocks_per_sm: int) -> int:
    """How many blocks share the slots: enough to fill the device, few enough to merge."""
    tiles = max(1, -(-max_slots // TILE))
    block_rows = 16 if n_rows <= 16 else 32
    row_blocks = -(-n_rows // block_rows)
    alone, together = _TILE_US[block_rows]

    def cost(splits: int) -> float:
        blocks = row_blocks * splits
        waves = -(-blocks // (blocks_per_sm * n_sms))
        tile_us = alone if blocks <= n_sms else together
        compute = waves * (-(-tiles // splits) * tile_us + _WAVE_US)
        return max(compute, tiles * _CACHE_TILE_US) + (
            splits * n_rows * 2048e-6 * _PARTIAL_US_PER_MB
        )

    most = max(1, blocks_per_sm * n_sms // row_blocks)
    return min(range(1, min(tiles, most) + 1), key=cost)


@cache
def _device_size(device: int) -> tuple[int, int]:
    """SMs, and blocks of the fast kernel that one holds at a time."""
    import cupy as cp

    attributes = cp.cuda.Device(device).attributes
    shared = attributes["MaxSharedMemoryPerMultiprocessor"]
    return attributes["MultiProcessorCount"], max(
        1, min(2, shared // (MMA_SHARED_BYTES[32] + 1024))
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
