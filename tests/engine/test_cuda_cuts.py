"""How launches of the tensor cores' attention are cut, by the host and by the device."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.engine.cuda_cuts import (
    MMA_ROWS,
    MOST_SPLITS,
    Cut,
    DeviceSize,
    choose_cut,
    light_splits,
    merge_parts,
    mma_have_sms,
    mma_shared_bytes,
    mma_stages,
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
@given(
    n_rows=st.integers(1, 600_000),
    max_slots=st.integers(1, 1 << 22),
    page_size=st.sampled_from([32, 64, 96]),
    hopper=st.booleans(),
)
def test_a_chosen_cut_fits(
    n_rows: int, max_slots: int, page_size: int, hopper: bool, device: DeviceSize
) -> None:
    cut = choose_cut(n_rows, max_slots, page_size, device, hopper=hopper)

    assert 1 <= cut.splits <= min(MOST_SPLITS, -(-max_slots // cut.tile))
    assert cut.rows in ((16,) if n_rows <= 16 else (16, 32, 64) if hopper else (16, 32))
    assert page_size % cut.tile == 0
    assert merge_parts(n_rows, cut.splits, device) <= max(1, cut.splits // 2)


@given(n_rows=st.integers(1, 600_000), rows=st.sampled_from([16, 32, 64]))
def test_row_blocks_hold_every_row(n_rows: int, rows: int) -> None:
    cut = Cut(rows, 1)

    blocks, light = cut.row_blocks(n_rows), cut.light_rows(n_rows)

    assert (blocks - 1) * rows < n_rows <= blocks * rows
    assert light <= rows // 2
    assert light in (0, n_rows - (blocks - 1) * rows)
    assert light == 0 or rows == 32, "the .cu has one for blocks of 32 rows alone"


def test_where_hoppers_kernel_fits() -> None:
    assert wgmma_fits(17, 64)
    assert wgmma_fits(520, 128)
    assert not wgmma_fits(16, 64), "a small block serves 16 rows"
    assert not wgmma_fits(17, 32), "half a tile a page"


@pytest.mark.parametrize(("max_slots", "each"), [(2_048, 1), (16_384, 3), (131_072, 24)])
def test_splits_share_the_tiles_evenly_where_that_is_as_quick(max_slots: int, each: int) -> None:
    """One row of eight heads on an H200, in the middle of the bucket: no block has a tile less."""
    tiles = max_slots * 3 // 4 // 32

    cut = choose_cut(8, max_slots, 64, DEVICES["H200"], hopper=True)

    assert cut.rows == 16
    assert splits_in_use(tiles, cut.splits) == -(-tiles // each) == tiles // each


def test_of_cuts_that_take_as_long_the_one_that_is_faster_where_the_bucket_begins() -> None:
    """128 and 132 splits share 384 tiles alike, by three; 257 by three and by two."""
    cut = choose_cut(8, 16_384, 64, DEVICES["H200"], hopper=True)

    assert cut == (16, 132)
    assert 129 == splits_in_use(257, cut.splits)
    assert 86 == splits_in_use(257, 128)


@pytest.mark.parametrize(
    ("device", "rows", "splits", "max_slots", "stages"),
    [
        ("H200", 16, 132, 131_072, 3),
        ("H200", 16, 132, 132 * 8 * 32, 3),
        ("H200", 16, 132, 132 * 8 * 32 - 1, 2),  # fewer than eight tiles a block
        ("H200", 16, 133, 131_072, 2),  # two blocks on an SM
        ("H200", 32, 66, 131_072, 2),
        ("RTX PRO 6000", 16, 132, 131_072, 2),  # no room for three
    ],
)
def test_a_block_with_an_sm_to_itself_and_many_tiles_has_three_stages(
    device: str, rows: int, splits: int, max_slots: int, stages: int
) -> None:
    assert stages == mma_stages(Cut(rows, splits), 8, max_slots, DEVICES[device])


def test_what_a_block_takes_is_there() -> None:
    assert {16: 81_152, 32: 96_512} == {rows: mma_shared_bytes(rows) for rows in MMA_ROWS}
    for device in DEVICES.values():
        for splits in (1, 14, 132, 188, 300):
            cut = Cut(16, splits)
            alone = mma_have_sms(cut, 8, 1 << 22, device)
            n_bytes = mma_shared_bytes(16, mma_stages(cut, 8, 1 << 22, device))
            assert alone == (splits <= device.n_sms)
            assert n_bytes + 1_024 <= device.shared_bytes // (1 if alone else device.blocks_per_sm)


@pytest.mark.parametrize(
    ("heads", "nodes", "max_slots", "hopper", "rows"),
    [
        (8, 17, 2_048, True, 16),
        (8, 17, 16_384, True, 64),
        (8, 17, 131_072, False, 32),
        (8, 65, 16_384, False, 32),
        (64, 1, 2_048, True, 16),
        (64, 17, 16_384, False, 32),
    ],
)
def test_the_rows_of_a_block_are_those_that_were_fastest(
    heads: int, nodes: int, max_slots: int, hopper: bool, rows: int
) -> None:
    """On an H200, by every sensible cut (benchmarks/kernels/verify_attn.py --sweep)."""
    cut = choose_cut(heads * nodes, max_slots, 64, DEVICES["H200"], hopper=hopper)

    assert rows == cut.rows
