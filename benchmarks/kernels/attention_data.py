"""Data for verify_attn.py, beside this file: bfloat16 as its bits, random trees, caches to time."""

from __future__ import annotations

from typing import Any

import numpy as np
from attention_device import Captured, Device
from attention_shapes import ROW, Shape

from kdtr.engine.cuda_attention import DeviceVisibility, LayerCache
from kdtr.engine.cuda_cuts import Cut
from kdtr.engine.cuda_launcher import slot_bucket

PAGE = 64


def to_bf16(x: Any) -> Any:
    """float32 -> uint16; NumPy's or CuPy's."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def random_ancestors(rng: np.random.Generator, n: int, n_counted: int) -> np.ndarray:
    """[n, n] bool, self included; rows and columns of padding see and are seen by themselves."""
    seen = np.eye(n, dtype=bool)
    for i in range(1, n_counted):
        parent = int(rng.integers(max(0, i - 6), i))
        seen[i] |= seen[parent]
    return seen


def pack_bits(seen: np.ndarray) -> np.ndarray:
    """[n, width] bool -> [n, ceil(width / 32)] uint32."""
    n, width = seen.shape
    padded = np.zeros((n, -(-max(width, 1) // 32) * 32), bool)
    padded[:, :width] = seen
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def visibility_of(count: int, open_len: int, n_slots: int, seen: np.ndarray) -> DeviceVisibility:
    """seen [n, width] bool: of the slots from open_len on."""
    import cupy as cp

    def number(x: int) -> Any:
        return cp.asarray([x], cp.int64)

    bits = cp.asarray(pack_bits(seen))
    return DeviceVisibility(number(count), number(open_len), number(n_slots), bits)


class Inputs:
    """Random data for a shape: `copies` caches, one query, a random tree.

    copies  as many as the shape needs for a cold L2, if None
    """

    def __init__(self, shape: Shape, copies: int | None = None) -> None:
        import cupy as cp

        self.shape = shape
        self.copies = shape.copies() if copies is None else copies
        rng = np.random.default_rng(1)
        pages = -(-shape.slots() // PAGE)
        self.table = cp.asarray(rng.permutation(pages).astype(np.int64))
        generator = cp.random.default_rng(1)

        def normal(*size: int) -> Any:
            return to_bf16(generator.standard_normal(size, dtype=cp.float32))

        self.rows = cp.empty((self.copies, pages * PAGE, ROW), cp.uint16)
        for i in range(self.copies):
            self.rows[i] = normal(pages * PAGE, ROW)  # any values are swizzled values of others
        self.query = normal(shape.nodes, shape.heads, ROW)
        tree = random_ancestors(rng, shape.nodes, shape.nodes)
        self.visibility = visibility_of(shape.nodes, shape.committed, shape.slots(), tree)

    def attend_all(self, device: Device, cut: Cut | None = None) -> Any:
        """Over every copy; the result of the first."""
        max_slots = slot_bucket(self.shape.slots())
        first = None
        for i in range(self.copies):
            layer = LayerCache(self.rows[i], self.table, PAGE, True)
            out = device.attend(layer, self.query, self.visibility, max_slots, cut=cut)
            first = out if i == 0 else first
        return first

    def time_us(self, device: Device, cut: Cut | None = None) -> float:
        """Of a call."""
        return Captured(lambda: self.attend_all(device, cut)).median_us(self.copies)
