"""How a launch of the tensor cores' attention is cut into blocks, by the host (cuda_attention.py).

A block takes some rows of the query, and shares the tiles of slots with other blocks on the same
rows, the splits. A cut chooses a grid and the order of the splits' sums. How many of a grid's
splits share the tiles is decided on the device, from n_slots; `splits_in_use` and `light_splits`
say the same here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kdtr.engine import cuda_hopper

TILE = 32  # slots, of verify_attn_mma; cuda_hopper.TILE of verify_attn_wgmma
MOST_SPLITS = 512  # that the merge has room for; the .cu has the same number
RESERVED_BYTES = 1_024  # of the shared memory of each block, by the system

_FEW, _MANY = 16, 32  # rows a block of verify_attn_mma; the first, a last block with no more
MMA_ROWS = (_FEW, _MANY)
# Shared memory of verify_attn_mma ahead of its stages, by rows (the .cu asserts it); of a stage.
_AHEAD_OF_STAGES, _STAGE_BYTES = {_FEW: 7_424, _MANY: 22_784}, TILE * 1_152
_MERGE_BLOCKS_PER_SM = 9

# Microseconds on an H200 (benchmarks/kernels/verify_attn.py --sweep). They choose a cut, nothing
# else.
_TILE_US = {_MANY: (1.5, 2.0), _FEW: (1.0, 1.28)}  # one block on an SM, two
_WGMMA_TILE_US = 1.7
_MOST_WAVES = 4
_WAVE_US = 3.0  # what a wave of blocks costs besides its tiles
_CACHE_BYTES_PER_US = {2: 4.2e6, 3: 4.3e6}  # by stages
_BLOCK_BYTES_PER_US = {2: 0.025e6, 3: 0.034e6}
_TILES_FOR_THREE = 8  # tiles a block, from which on a third stage gains what its memory costs
_MERGE_US = 1.5
_PARTIAL_US_PER_MB = 0.45  # of partial results, written and read


class DeviceSize(NamedTuple):
    """SMs, blocks of verify_attn_mma that one holds at a time, and its shared memory."""

    n_sms: int
    blocks_per_sm: int
    shared_bytes: int


class Cut(NamedTuple):
    """Rows a block, and how many blocks share the tiles of the same rows at most.

    rows  16 or 32: verify_attn_mma; cuda_hopper.ROWS: verify_attn_wgmma
    """

    rows: int
    splits: int

    @property
    def is_hoppers(self) -> bool:
        return self.rows == cuda_hopper.ROWS

    @property
    def tile(self) -> int:
        """Slots."""
        return cuda_hopper.TILE if self.is_hoppers else TILE

    def row_blocks(self, n_rows: int) -> int:
        return -(-n_rows // self.rows)

    def light_rows(self, n_rows: int) -> int:
        """Rows of a last block that is half empty and works half as long; 0: there is none."""
        left = n_rows % _MANY if self.rows == _MANY else 0
        return left if left <= _FEW else 0


@lru_cache(maxsize=1024)  # asked for every launch; a session asks of few sizes
def choose_cut(
    n_rows: int, max_slots: int, page_size: int, device: DeviceSize, *, hopper: bool
) -> Cut:
    """The fastest, by the figures above, where a sequence is in the middle of its bucket of slots.

    hopper  whether verify_attn_wgmma may be taken
    """
    pays = hopper and wgmma_fits(n_rows, page_size) and _wgmma_pays(n_rows, max_slots, device)
    return _wgmma_cut(n_rows, max_slots, device) if pays else _mma_cut(n_rows, max_slots, device)


def wgmma_fits(n_rows: int, page_size: int) -> bool:
    """Whether Hopper's own kernel takes it: more than a small block's rows, whole tiles a page."""
    return n_rows > _FEW and page_size % cuda_hopper.TILE == 0


def _wgmma_pays(n_rows: int, max_slots: int, device: DeviceSize) -> bool:
    """Whether it is the faster: where its larger blocks keep every SM at work."""
    row_blocks = Cut(cuda_hopper.ROWS, 1).row_blocks(n_rows)
    tiles = row_blocks * (_typical(max_slots) // cuda_hopper.TILE)
    return tiles >= 2 * device.n_sms


def _typical(max_slots: int) -> int:
    """Slots in the middle of a bucket of slots, where the choices are judged."""
    return max(1, max_slots * 3 // 4)


def _mma_cut(n_rows: int, max_slots: int, device: DeviceSize) -> Cut:
    """One block on each SM, or two; small blocks, or large ones that read the cache half as often.

    Small blocks make more of a short sequence: two rounds of one take less than one of a large one.
    """

    def cost(cut: Cut, slots: int) -> float:
        tiles = -(-slots // TILE)
        splits, light_rows = splits_in_use(tiles, cut.splits), cut.light_rows(n_rows)
        light = light_splits(tiles, splits) if light_rows else 0
        blocks = (cut.row_blocks(n_rows) - (light > 0)) * splits + light
        tile_us = _TILE_US[cut.rows][blocks > device.n_sms]
        waves = -(-blocks // (device.n_sms * device.blocks_per_sm))
        compute = waves * (-(-tiles // splits) * tile_us + _WAVE_US)
        stages = mma_stages(cut, n_rows, max_slots, device)
        rate = min(_CACHE_BYTES_PER_US[stages], blocks * _BLOCK_BYTES_PER_US[stages])
        cache = slots * 1152 / rate
        return max(compute, cache) + _merge_us(
            splits, (n_rows - light_rows) * splits + light_rows * light
        )

    choices: list[Cut] = []
    slots = _typical(max_slots)
    tiles = -(-slots // TILE)
    most = min(max(1, -(-max_slots // TILE)), MOST_SPLITS)
    # Fewer than fill the device, whose partial results the merge has sooner: those that share the
    # tiles evenly.
    even = {-(-tiles // each) for each in range(1, tiles + 1)}
    for rows in (_FEW,) if n_rows <= _FEW else (_MANY, _FEW):
        whole = Cut(rows, 1)
        light = whole.light_rows(n_rows) > 0  # takes three fifths of the blocks
        fifths = 5 * (whole.row_blocks(n_rows) - light) + 3 * light
        fills = {max(1, 5 * (i + 1) * device.n_sms // fifths) for i in range(device.blocks_per_sm)}
        wanted = fills | {splits for splits in even if splits <= max(fills)}
        choices += (Cut(rows, splits) for splits in sorted({min(s, most) for s in wanted}))
    # Of those that take as long, the one that is the fastest where the bucket begins.
    return min(choices, key=lambda cut: (cost(cut, slots), cost(cut, max_slots // 2 + 1)))


def mma_have_sms(cut: Cut, n_rows: int, max_slots: int, device: DeviceSize) -> bool:
    """Whether each block of verify_attn_mma that finds work can have an SM to itself."""
    light_rows = cut.light_rows(n_rows)
    light = light_splits(-(-max_slots // TILE), cut.splits) if light_rows else 0
    blocks = (cut.row_blocks(n_rows) - (light_rows > 0)) * cut.splits + light
    return blocks <= device.n_sms


def mma_stages(cut: Cut, n_rows: int, max_slots: int, device: DeviceSize) -> int:
    """Tiles that such a block has room for, one to multiply and the others under way: 2 or 3."""
    many_tiles = max_slots >= _TILES_FOR_THREE * cut.splits * TILE
    fits = device.shared_bytes >= mma_shared_bytes(_FEW, 3) + RESERVED_BYTES
    takes_three = cut.rows == _FEW and many_tiles and fits
    return 3 if takes_three and mma_have_sms(cut, n_rows, max_slots, device) else 2


def mma_shared_bytes(rows: int, stages: int = 2) -> int:
    """Dynamic, of verify_attn_mma_<rows>."""
    return _AHEAD_OF_STAGES[rows] + stages * _STAGE_BYTES


def _wgmma_cut(n_rows: int, max_slots: int, device: DeviceSize) -> Cut:
    """The same for blocks of 64 rows and tiles of 64 slots: one on each SM, or so several times."""
    row_blocks = Cut(cuda_hopper.ROWS, 1).row_blocks(n_rows)
    tiles = -(-_typical(max_slots) // cuda_hopper.TILE)

    def cost(most: int) -> float:
        splits = splits_in_use(tiles, most)
        waves = -(-row_blocks * splits // device.n_sms)
        compute = waves * (-(-tiles // splits) * _WGMMA_TILE_US + _WAVE_US)
        return compute + _merge_us(splits, n_rows * splits)

    fills = {max(1, (wave + 1) * device.n_sms // row_blocks) for wave in range(_MOST_WAVES)}
    most = max(1, -(-max_slots // cuda_hopper.TILE))
    return Cut(cuda_hopper.ROWS, min(min(sorted(fills), key=cost), most, MOST_SPLITS))


def _merge_us(splits: int, partial_rows: int) -> float:
    """partial_rows: rows of float32 that the splits leave in all."""
    return 0 if splits == 1 else _MERGE_US + partial_rows * 2048e-6 * _PARTIAL_US_PER_MB


def splits_in_use(tiles: int, most: int) -> int:
    """Of a grid's splits, how many share the tiles (attention.cuh decides the same)."""
    return 1 if tiles <= 1 else -(-tiles // -(-tiles // most))


def light_splits(tiles: int, splits: int) -> int:
    """Of these, how many share those of a last row block that works half as long (likewise)."""
    each = max(1, -(-tiles // splits) * 19 // 11)
    return min(splits, -(-tiles // each))


def merge_parts(n_rows: int, splits: int, device: DeviceSize) -> int:
    """How many threads share the splits of four columns: as many as can be at work at once."""
    most = min(splits // 2, _MERGE_BLOCKS_PER_SM * device.n_sms // n_rows)
    return max(parts for parts in (1, 2, 4, 8, 16, 32) if parts <= max(1, most))
