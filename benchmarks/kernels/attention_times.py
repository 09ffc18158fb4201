"""The times of verify_attn.py, beside this file: as launched, by every cut, of a launch alone."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

from attention_data import PAGE, Inputs
from attention_device import Device
from attention_shapes import Shape

from kdtr.engine import cuda_attention as attention
from kdtr.engine.cuda_cuts import MOST_SPLITS, Cut, choose_cut, splits_in_use
from kdtr.engine.cuda_launch import launch
from kdtr.engine.cuda_launcher import row_bucket, slot_bucket

# Name, kernels by a regular expression, and whether one may begin before the one ahead of it ends.
_PARTS = (
    ("both", "", True),
    ("without overlap", "", False),
    ("split", "mma_[0-9]|wgmma", True),
    ("merge", "merge", True),
)


def time_shapes(device: Device, shapes: list[Shape]) -> dict[str, float]:
    """As the engine launches them: for the buckets of rows and slots that it would take."""
    times = {}
    print("| shape | rows a block, splits | us |\n|---|---|---|")
    for shape in shapes:
        assert row_bucket(shape.nodes) == shape.nodes, "a shape of the table is a bucket of rows"
        us = times[str(shape)] = Inputs(shape).time_us(device)
        print(f"| {shape} | {cut_of(device, shape)} | {us:.1f} |", flush=True)
    return times


def cut_of(device: Device, shape: Shape) -> str:
    """The engine's choice; of the splits in the grid, those in use."""
    slots, size = slot_bucket(shape.slots()), attention.device_size(0)
    cut = choose_cut(shape.rows(), slots, PAGE, size, hopper=device.hopper)
    in_use = splits_in_use(-(-shape.slots() // cut.tile), cut.splits)
    return f"{cut.rows}, {in_use} of {cut.splits}"


def sweep(device: Device, shapes: list[Shape]) -> None:
    """Every sensible cut."""
    n_sms = attention.device_size(0).n_sms
    for shape in shapes:
        inputs = Inputs(shape)
        for rows in device.block_rows(PAGE):
            tiles = -(-shape.slots() // Cut(rows, 1).tile)
            row_blocks = Cut(rows, 1).row_blocks(shape.rows())
            most = max(1, min(tiles, MOST_SPLITS, 3 * n_sms // row_blocks))
            wanted = {n_sms * fourths // (4 * row_blocks) for fourths in range(1, 13)}
            wanted |= {-(-tiles // each) for each in (1, 2, 3, 4, 5, 6, 8, 9)}
            in_use = {splits_in_use(tiles, s) for s in wanted if 1 <= s <= most}
            line = [f"{s}: {inputs.time_us(device, Cut(rows, s)):.1f}" for s in sorted(in_use)]
            what = f"{shape}, {rows} rows a block ({row_blocks} row blocks, {tiles} tiles)"
            print(what, *line, sep="  ", flush=True)


def parts(device: Device, shapes: list[Shape]) -> None:
    """Both launches, the same without overlap, and each alone."""
    for shape in shapes:
        inputs = Inputs(shape)
        line = []
        for name, kernels, overlap in _PARTS:
            # In the place of the engine's own, which always asks for overlap.
            with mock.patch.object(attention, "launch", _only(kernels, overlap)):
                line.append(f"{name} {inputs.time_us(device):.1f}")
        print(f"{shape}  " + "  ".join(line), flush=True)


def _only(kernels: str, overlap: bool) -> Any:
    """A `launch` of kernels whose names match, and of no others, with `overlap` or without."""

    def chosen(kernel: Any, grid: Any, block: int, shared: int, arguments: Any, **_: bool) -> None:
        if re.search(kernels, kernel.name):
            launch(kernel, grid, block, shared, arguments, overlap)

    return chosen


def one(device: Device, shape: Shape) -> None:
    """A few plain launches, for a profiler."""
    Inputs(shape, copies=4).attend_all(device)
    device.cp.cuda.Device().synchronize()
