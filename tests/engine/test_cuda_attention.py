"""How attention's launches cut their work: arithmetic of the host, and of the device beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.engine.cuda_attention import (
    MOST_SPLITS,
    DeviceSize,
    choose_splits,
    choose_wgmma_splits,
    light_splits,
    merge_parts,
    plain_rows_at_once,
    row_blocks_of,
    splits_in_use,
    wgmma_fits,
)

DEVICES = {  # SMs, blocks of the fast kernel on one, shared memory
    "H200": DeviceSize(132, 2, 233_472),
    "RTX PRO 6000": DeviceSize(188, 1, 102_400),
    "a slice of a card": DeviceSize(14, 1, 102_400),
}
TILES, SPLITS = st.integers(1, 100_000), st.integers(1, MOST_SPLITS)


@given(tiles=TILES, most=SPLITS)
def test_splits_in_use_are_few_and_as_quick(tiles: int, most: int) -> None:
    """No block has more tiles than with all of the grid's splits, and none has nothing to do."""
    splits = splits_in_use(tiles, most)

    assert 1 <= splits <= min(most, tiles)
    each = [-(-(tiles - split) // splits) for split in (0, splits - 1)]
    assert each[0] == -(-tiles // most)
    assert each[1] >= 1


@given(tiles=TILES, most=SPLITS)
def test_a_light_row_block_takes_no_more_splits(tiles: int, most: int) -> None:
    splits = splits_in_use(tiles, most)

    light = light_splits(tiles, splits)

    assert 1 <= light <= splits
    assert -(-tiles // light) <= 2 * -(-tiles // splits)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@given(n_rows=st.integers(1, 600_000), max_slots=st.integers(1, 1 << 22))
def test_chosen_splits_fit(n_rows: int, max_slots: int, device: DeviceSize) -> None:
    for choose, tile in ((choose_splits, 32), (choose_wgmma_splits, 64)):
        splits = choose(n_rows, max_slots, device)
        assert 1 <= splits <= min(MOST_SPLITS, -(-max_slots // tile))
        assert merge_parts(n_rows, splits, device) <= max(1, splits // 2)


@given(n_rows=st.integers(1, 600_000))
def test_row_blocks_hold_every_row(n_rows: int) -> None:
    rows, blocks, light = row_blocks_of(n_rows)

    assert (blocks - 1) * rows < n_rows <= blocks * rows
    assert light <= 16
    assert light in (0, n_rows - (blocks - 1) * rows)


@given(
    n=st.integers(1, 10_000_000),
    splits=st.integers(1, 100_000),
    h=st.integers(1, 256),
    c=st.integers(1, 1024),
)
def test_the_plain_kernel_is_cut_to_a_grid_and_to_its_memory(
    n: int, splits: int, h: int, c: int
) -> None:
    rows = plain_rows_at_once(n, splits, h, c)

    assert 1 <= rows <= min(n, 65_535)
    assert rows == 1 or 4 * rows * splits * h * c <= 1 << 28


def test_where_hoppers_kernel_fits() -> None:
    assert wgmma_fits(17, 64)
    assert wgmma_fits(520, 128)
    assert not wgmma_fits(16, 64), "a small block serves 16 rows"
    assert not wgmma_fits(17, 32), "half a tile a page"


@pytest.mark.parametrize(("max_slots", "each"), [(2_048, 1), (16_384, 3), (131_072, 17)])
def test_splits_share_the_tiles_evenly_where_that_is_as_quick(max_slots: int, each: int) -> None:
    """One row of eight heads on an H200, in the middle of the bucket: no block has a tile less."""
    tiles = max_slots * 3 // 4 // 32

    splits = choose_splits(8, max_slots, DEVICES["H200"])

    assert -(-tiles // each) == splits
    assert splits == splits_in_use(tiles, splits)
