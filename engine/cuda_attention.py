"""Launches of tree attention on a CUDA device (MLA-2, MLA-3, MASK-3, NUM-4).

verify_attn.cu serves rows of the latent cache in plain order, any sizes and both storage types;
verify_attn_mma.cu swizzled rows of bfloat16, on every architecture; verify_attn_wgmma.cu the same
on Hopper, where there are more than 16 rows and pages of whole tiles. Arrays are CuPy's. What
changes from round to round is read on the device, so the launches can be captured in a graph:
grids depend on n and max_slots alone (cuda_cuts.py).

Letters: n rows launched, h heads, c latent, r rope.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_cuts import (
    MMA_ROWS,
    MOST_SPLITS,
    RESERVED_BYTES,
    Cut,
    DeviceSize,
    choose_cut,
    merge_parts,
    mma_have_sms,
    mma_shared_bytes,
    mma_stages,
)
from kdtr.engine.cuda_launch import MOST_BLOCKS, launch

Array = Any
Kernel = Any  # cupy.RawKernel
GetKernel = Callable[[str], Kernel]

SWIZZLED_LATENT, SWIZZLED_ROPE = 512, 64

_MMA_THREADS, _MERGE_THREADS = 128, 128
# Of the plain kernel.
_HEADS_PER_BLOCK, _CHUNK = 4, 32
_MOST_PARTIAL_BYTES = 1 << 28


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
    *,
    wgmma: GetKernel | None = None,
    cut: Cut | None = None,
) -> Array:
    """query [n, h, c + r] -> out_latent [n, h, c].

    plain, mma  entry points of verify_attn.cu and verify_attn_mma.cu, by name
    wgmma       those of verify_attn_wgmma.cu, where the device is a Hopper
    split_size  slots a split, of the plain kernel; the fast ones have their own choice
    max_slots   at least n_slots: the grid is made for it
    scores      [n, h, at least n_slots] float32 filled with -inf, or None
    cut         of the fast kernels, instead of `choose_cut`'s
    """
    if layer.swizzled:
        return _verify_attn_fast(
            mma, wgmma, layer, query, visibility, latent_len, scale, max_slots, scores, cut
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
    split_size = plain_split_size(split_size, max_slots)
    splits = -(-max_slots // split_size)
    at_once = plain_rows_at_once(n, splits, h, c)
    top = cp.empty((splits, at_once, h), cp.float32)
    norm = cp.empty((splits, at_once, h), cp.float32)
    acc = cp.empty((splits, at_once, h, c), cp.float32)
    out = cp.empty((n, h, c), query.dtype)
    shared = 4 * (_HEADS_PER_BLOCK * (row_len + c) + _HEADS_PER_BLOCK * (_CHUNK + 4)) + 8 * _CHUNK
    for first in range(0, n, at_once):
        rows = min(at_once, n - first)
        launch(
            kernel("verify_attn_split"),
            (-(-h // _HEADS_PER_BLOCK), rows, splits),
            256,
            shared,
            [
                *(query, layer.rows, layer.page_table, visibility.bits),
                *(visibility.count, visibility.open_len, visibility.n_slots),
                *(top, norm, acc, scores),
                ctypes.c_longlong(0 if scores is None else scores.shape[-1]),
                *(ctypes.c_float(scale), layer.page_size, visibility.bits.shape[1], split_size),
                *(first, h, c, row_len - c),
            ],
        )
        launch(
            kernel("verify_attn_merge"),
            (h, rows, 1),
            128,
            0,
            [top, norm, acc, visibility.count, visibility.n_slots, out, split_size, first, h, c],
        )
    return out


def plain_split_size(split_size: int, max_slots: int) -> int:
    """Slots a split of the plain kernel: as asked for, where there are and a grid has room."""
    return max(1, -(-max_slots // MOST_BLOCKS), min(split_size, max_slots))


def plain_rows_at_once(n: int, splits: int, h: int, c: int) -> int:
    """Rows of a launch of the plain kernel: what its splits leave for each is 4 h c bytes."""
    return min(n, MOST_BLOCKS, max(1, _MOST_PARTIAL_BYTES // (4 * splits * h * c)))


def _verify_attn_fast(
    mma: GetKernel,
    wgmma: GetKernel | None,
    layer: LayerCache,
    query: Array,
    visibility: DeviceVisibility,
    c: int,
    scale: float,
    max_slots: int,
    scores: Array | None,
    cut: Cut | None,
) -> Array:
    """Splits by `wgmma` or by `mma`, as they are cut; the merge of `mma`."""
    import cupy as cp

    n, h, row_len = query.shape
    _check_operands(layer, query, visibility, scores)
    assert (c, row_len) == (SWIZZLED_LATENT, SWIZZLED_LATENT + SWIZZLED_ROPE), (c, row_len)
    assert scale > 0, scale
    assert query.dtype.itemsize == 2, query.dtype
    device = device_size(cp.cuda.Device().id)
    cut = cut or choose_cut(n * h, max_slots, layer.page_size, device, hopper=wgmma is not None)
    splits, row_blocks = cut.splits, cut.row_blocks(n * h)
    assert layer.page_size % cut.tile == 0, (layer.page_size, cut)
    assert splits <= MOST_SPLITS, splits
    alone = splits == 1  # a block has all tiles of its rows: nothing to merge
    out = cp.empty((n, h, c), query.dtype)
    acc = None if alone else cp.empty((splits, n * h, c), cp.float32)
    stats = None if alone else cp.empty((n * h, splits, 2), cp.float32)
    name = "" if scores is None else "_scores"
    arguments = [
        *(layer.page_table, visibility.bits, visibility.count, visibility.open_len),
        *(visibility.n_slots, acc, stats, scores, out if alone else None),
        ctypes.c_longlong(0 if scores is None else scores.shape[-1]),
        *(ctypes.c_float(scale), layer.page_table.size, layer.page_size // cut.tile),
        *(visibility.bits.shape[1], n, h),
    ]
    light_rows = cut.light_rows(n * h)
    if cut.is_hoppers:
        assert wgmma is not None
        split = wgmma(f"verify_attn_wgmma{name}")
        threads, shared = cuda_hopper.THREADS, cuda_hopper.SHARED_BYTES
        source = cuda_hopper.tile_map(layer.rows)
    else:
        split = mma(f"verify_attn_mma_{cut.rows}{name}")
        stages = mma_stages(cut, n * h, max_slots, device)
        threads, shared = _MMA_THREADS, mma_shared_bytes(cut.rows, stages)
        source = layer.rows
        if mma_have_sms(cut, n * h, max_slots, device):
            # They start while the kernel ahead still holds some SMs, and two would share one of
            # the others.
            shared = max(shared, device.shared_bytes // 2)
    if split.max_dynamic_shared_size_bytes < shared:
        split.preferred_shared_memory_carveout = 100  # per cent: room for two blocks on an SM
    launch(
        split,
        (row_blocks, splits, 1),
        threads,
        shared,
        [query, source, *arguments],
        overlap=True,
    )
    if alone:
        return out
    parts = merge_parts(n * h, splits, device)
    merge = mma(f"verify_attn_mma_merge_{parts}")
    if merge.preferred_shared_memory_carveout != 100:
        # The same as the splits': an SM changes it only when it is empty.
        merge.preferred_shared_memory_carveout = 100
    launch(
        merge,
        (n * h * parts, 1, 1),
        _MERGE_THREADS,
        0,
        [
            *(acc, stats, visibility.count, visibility.n_slots, out),
            *(splits, cut.tile, n * h - light_rows, n, h),
        ],
        overlap=True,
    )
    return out


@cache
def device_size(device: int) -> DeviceSize:
    import cupy as cp

    attributes = cp.cuda.Device(device).attributes
    shared_bytes = attributes["MaxSharedMemoryPerMultiprocessor"]
    blocks = shared_bytes // (mma_shared_bytes(max(MMA_ROWS)) + RESERVED_BYTES)
    return DeviceSize(attributes["MultiProcessorCount"], max(1, min(2, blocks)), shared_bytes)


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
