"""Launches of tree attention on a CUDA device (MLA-2, MLA-3, MASK-3, NUM-4).

verify_attn.cu serves rows of the latent cache in plain order, any sizes and both storage types;
verify_attn_mma.cu swizzled rows of bfloat16, on every architecture; verify_attn_wgmma.cu the same
on Hopper, where there are more than 16 rows and pages of whole tiles. Arrays are CuPy's. What
changes from round to round is read on the device, so the launches can be captured in a graph:
grids depend on n and max_slots alone, and how many of a grid's splits share the tiles is decided
on the device, from n_slots.

Letters: n rows launched, h heads, c latent, r rope.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_launch import launch

Array = Any
Kernel = Any  # cupy.RawKernel
GetKernel = Callable[[str], Kernel]

SWIZZLED_LATENT, SWIZZLED_ROPE = 512, 64
TILE = 32  # page sizes are multiples of it


_MANY, _FEW = 32, 16  # rows a block of the fast kernel, or of a last block with no more
_THREADS = 128
_MERGE_THREADS, _MERGE_BLOCKS_PER_SM = 128, 9
MOST_SPLITS = 512  # that the merge has room for; the .cu has the same number

# Dynamic shared memory of verify_attn_mma_<rows>, by rows; the .cu asserts the same numbers.
MMA_SHARED_BYTES = {"32": 96_432, "16": 81_072}
# Of the plain kernel.
_HEADS_PER_BLOCK, _CHUNK = 4, 32
_MOST_BLOCKS_Y = 65_535  # of a grid
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


class DeviceSize(NamedTuple):
    """SMs, blocks of the fast kernel that one holds at a time, and its shared memory."""

    n_sms: int
    blocks_per_sm: int
    shared_bytes: int


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
    splits: int | None = None,
) -> Array:
    """query [n, h, c + r] -> out_latent [n, h, c].

    plain, mma  entry points of verify_attn.cu and verify_attn_mma.cu, by name
    wgmma       those of verify_attn_wgmma.cu, where the device is a Hopper
    split_size  slots a split, of the plain kernel; the fast ones have their own choice
    max_slots   at least n_slots: the grid is made for it
    scores      [n, h, at least n_slots] float32 filled with -inf, or None
    splits      instead of the choices: at most so many blocks share the tiles of a row block, and
                `wgmma` wherever it fits
    """
    if layer.swizzled:
        n, h, _ = query.shape
        pays = splits is not None or wgmma_pays(n * h, max_slots)
        if not (pays and wgmma_fits(n * h, layer.page_size)):
            wgmma = None
        return _verify_attn_fast(
            mma, wgmma, layer, query, visibility, latent_len, scale, max_slots, scores, splits
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


def plain_rows_at_once(n: int, splits: int, h: int, c: int) -> int:
    """Rows of a launch of the plain kernel: what its splits leave for each is 4 h c bytes."""
    return min(n, _MOST_BLOCKS_Y, max(1, _MOST_PARTIAL_BYTES // (4 * splits * h * c)))


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
    splits: int | None,
) -> Array:
    """Splits by `wgmma` if there is one, else by `mma`; the merge of `mma`."""
    import cupy as cp

    n, h, row_len = query.shape
    _check_operands(layer, query, visibility, scores)
    assert (c, row_len) == (SWIZZLED_LATENT, SWIZZLED_LATENT + SWIZZLED_ROPE), (c, row_len)
    assert scale > 0, scale
    assert query.dtype.itemsize == 2, query.dtype
    tile = TILE if wgmma is None else cuda_hopper.TILE
    assert layer.page_size % tile == 0, layer.page_size
    device = device_size(cp.cuda.Device().id)
    choose = choose_splits if wgmma is None else choose_wgmma_splits
    splits = splits or choose(n * h, max_slots, device)
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
        *(ctypes.c_float(scale), layer.page_table.size, layer.page_size // tile),
        *(visibility.bits.shape[1], n, h),
    ]
    heavy_rows = n * h
    if wgmma is None:
        block_rows, row_blocks, light_rows = row_blocks_of(n * h)
        heavy_rows -= light_rows
        split = mma(f"verify_attn_mma_{block_rows}{name}")
        shared = MMA_SHARED_BYTES[str(block_rows)]
        light = light_splits(-(-max_slots // TILE), splits) if light_rows else 0
        if (row_blocks - (light_rows > 0)) * splits + light <= device.n_sms:
            # Where each can have an SM to itself: they start while the kernel ahead still holds
            # some SMs, and two would share one of the others.
            shared = max(shared, device.shared_bytes // 2)
        threads, source = _THREADS, layer.rows
    else:
        row_blocks = -(-n * h // cuda_hopper.ROWS)
        split = wgmma(f"verify_attn_wgmma{name}")
        threads, shared = cuda_hopper.THREADS, cuda_hopper.SHARED_BYTES
        source = cuda_hopper.tile_map(layer.rows)
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
            *(splits, tile, heavy_rows, n, h),
        ],
        overlap=True,
    )
    return out


def row_blocks_of(n_rows: int) -> tuple[int, int, int]:
    """Rows a block, blocks, and rows of a last block that is half empty and works half as long."""
    if n_rows <= _FEW:
        return _FEW, 1, 0
    left = n_rows % _MANY
    return _MANY, -(-n_rows // _MANY), left if left <= _FEW else 0


def wgmma_fits(n_rows: int, page_size: int) -> bool:
    """Whether Hopper's own kernel takes it: more than a small block's rows, whole tiles a page."""
    return n_rows > _FEW and page_size % cuda_hopper.TILE == 0


def wgmma_pays(n_rows: int, max_slots: int) -> bool:
    """Whether it is the faster: where its larger blocks keep every SM at work."""
    import cupy as cp

    tiles = -(-n_rows // cuda_hopper.ROWS) * (_typical(max_slots) // cuda_hopper.TILE)
    return tiles >= 2 * device_size(cp.cuda.Device().id).n_sms


def merge_parts(n_rows: int, splits: int, device: DeviceSize) -> int:
    """How many threads share the splits of four columns: as many as can be at work at once."""
    most = min(splits // 2, _MERGE_BLOCKS_PER_SM * device.n_sms // n_rows)
    return max(parts for parts in (1, 2, 4, 8, 16, 32) if parts <= max(1, most))


def _typical(max_slots: int) -> int:
    """Slots in the middle of a bucket of slots, where the choices are judged."""
    return max(1, max_slots * 3 // 4)


# Microseconds, measured on an H200 (benchmarks/kernels/verify_attn.py --sweep). They choose a grid,
# nothing else.
_TILE_US = {_MANY: (1.35, 1.9), _FEW: (0.9, 1.1)}  # one block on an SM, two
_WGMMA_TILE_US = 1.7
_MOST_WAVES = 4
_WAVE_US = 3.0  # what a wave of blocks costs besides its tiles
_CACHE_BYTES_PER_US = 4.3e6
_BLOCK_BYTES_PER_US = 0.025e6
_MERGE_US = 1.5
_PARTIAL_US_PER_MB = 0.7  # of partial results, written and read


@lru_cache(maxsize=1024)  # asked for every launch; a session asks of few sizes
def choose_splits(n_rows: int, max_slots: int, device: DeviceSize) -> int:
    """At most so many blocks share the tiles: one on each SM, or two, whichever is the faster."""
    block_rows, row_blocks, light_rows = row_blocks_of(n_rows)
    slots = _typical(max_slots)
    tiles = -(-slots // TILE)
    heavy = row_blocks - (light_rows > 0)

    def cost(splits: int) -> float:
        splits = splits_in_use(tiles, splits)
        light = light_splits(tiles, splits) if light_rows else 0
        blocks = heavy * splits + light
        tile_us = _TILE_US[block_rows][blocks > device.n_sms]
        waves = -(-blocks // (device.n_sms * device.blocks_per_sm))
        compute = waves * (-(-tiles // splits) * tile_us + _WAVE_US)
        cache = slots * 1152 / min(_CACHE_BYTES_PER_US, blocks * _BLOCK_BYTES_PER_US)
        partial_mb = ((n_rows - light_rows) * splits + light_rows * light) * 2048e-6
        merge = 0 if splits == 1 else _MERGE_US + partial_mb * _PARTIAL_US_PER_MB
        return max(compute, cache) + merge

    fifths = 5 * heavy + 3 * (light_rows > 0)  # a light row block takes three fifths of the blocks
    fills = {max(1, 5 * (i + 1) * device.n_sms // fifths) for i in range(device.blocks_per_sm)}
    # Fewer, whose partial results the merge has sooner: those that share the tiles evenly.
    even = {-(-tiles // each) for each in range(1, tiles + 1)}
    choices = sorted(fills | {splits for splits in even if splits <= max(fills)})
    return min(min(choices, key=cost), max(1, -(-max_slots // TILE)), MOST_SPLITS)


def choose_wgmma_splits(n_rows: int, max_slots: int, device: DeviceSize) -> int:
    """The same for blocks of 64 rows and tiles of 64 slots: one on each SM, or so several times."""
    row_blocks = -(-n_rows // cuda_hopper.ROWS)
    tiles = -(-_typical(max_slots) // cuda_hopper.TILE)

    def cost(splits: int) -> float:
        splits = splits_in_use(tiles, splits)
        waves = -(-row_blocks * splits // device.n_sms)
        compute = waves * (-(-tiles // splits) * _WGMMA_TILE_US + _WAVE_US)
        merge = 0 if splits == 1 else _MERGE_US + n_rows * splits * 2048e-6 * _PARTIAL_US_PER_MB
        return compute + merge

    fills = {max(1, (wave + 1) * device.n_sms // row_blocks) for wave in range(_MOST_WAVES)}
    most = max(1, -(-max_slots // cuda_hopper.TILE))
    return min(min(fills, key=cost), most, MOST_SPLITS)


def splits_in_use(tiles: int, most: int) -> int:
    """Of a grid's splits, how many share the tiles (attention.cuh decides the same)."""
    return 1 if tiles <= 1 else -(-tiles // -(-tiles // most))


def light_splits(tiles: int, splits: int) -> int:
    """Of these, how many share those of a last row block that works half as long (likewise)."""
    each = max(1, -(-tiles // splits) * 19 // 11)
    return min(splits, -(-tiles // each))


@cache
def device_size(device: int) -> DeviceSize:
    import cupy as cp

    attributes = cp.cuda.Device(device).attributes
    shared_bytes = attributes["MaxSharedMemoryPerMultiprocessor"]
    blocks = shared_bytes // (MMA_SHARED_BYTES["32"] + 1024)
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
