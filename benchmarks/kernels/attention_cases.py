"""Forwards for the checks of verify_attn.py, beside this file, and what they attend over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from attention_data import PAGE, from_bf16, random_ancestors, to_bf16, visibility_of
from attention_device import Device
from attention_shapes import C, R

from kdtr.engine.cuda_attention import LayerCache, swizzle
from kdtr.engine.cuda_cuts import Cut

_SPLITS = (1, 3, 40)


@dataclass(frozen=True, slots=True)
class Case:
    """One forward with everything hostile around it: NaN wherever nothing may be read.

    n, counted     rows launched, of which so many count
    swizzled       for the fast kernels; else in plain order
    arbitrary      a mask over all slots, open_len 0
    poisoned_node  its row of the cache is NaN; -1: none is
    spare          pages more than needed, and so max_slots above n_slots
    """

    n: int
    counted: int
    h: int
    committed: int
    page_size: int = PAGE
    c: int = C
    r: int = R
    bf16: bool = True
    swizzled: bool = True
    arbitrary: bool = False
    poisoned_node: int = -1
    spare: int = 3

    def cuts(self, device: Device) -> list[Cut | None]:
        """None, which is the engine's choice, and those of every kernel that takes the case."""
        fast = device.block_rows(self.page_size) if self.swizzled else ()
        return [None, *(Cut(rows, splits) for rows in fast for splits in _SPLITS)]


CASES = (
    Case(1, 1, 8, 0),
    Case(1, 1, 8, 1),
    Case(1, 1, 8, 31),
    Case(1, 1, 8, 1024),
    Case(2, 2, 8, 63),
    Case(5, 3, 8, 65, page_size=32),
    Case(5, 5, 3, 200, page_size=128),
    Case(17, 17, 8, 0),
    Case(17, 12, 8, 1000, poisoned_node=4),
    Case(17, 17, 8, 1024, page_size=32, poisoned_node=0),
    Case(33, 30, 8, 2047, poisoned_node=20),
    Case(65, 65, 8, 1024, poisoned_node=33),
    Case(65, 50, 8, 8192, spare=400),
    Case(17, 17, 64, 1024),
    Case(1, 1, 64, 4097),
    Case(129, 129, 8, 333, poisoned_node=70),
    Case(17, 17, 8, 700, arbitrary=True),
    Case(3, 3, 8, 5000, arbitrary=True, page_size=256),
    Case(17, 12, 8, 300, swizzled=False, poisoned_node=4),
    Case(5, 4, 3, 70, swizzled=False, page_size=3, c=40, r=12, bf16=False, poisoned_node=1),
    Case(7, 7, 5, 129, swizzled=False, page_size=7, c=33, r=2, bf16=False),
    Case(9, 9, 4, 200, swizzled=False, page_size=16, c=64, r=16, arbitrary=True),
    Case(65, 65, 8, 500, swizzled=False, page_size=64, bf16=False, poisoned_node=9),
)


class Operands:
    """Of a case, random but the same every time.

    rows [n_slots, c + r], query [n, h, c + r]   float32 that storage holds exactly, without NaN
    seen [n, n_slots]                            bool
    """

    def __init__(self, case: Case) -> None:
        import cupy as cp

        rng = np.random.default_rng(0)
        self.case = case
        self.n_slots = case.committed + case.counted
        block = random_ancestors(rng, case.n, case.counted)
        self.seen = np.ones((case.n, self.n_slots), bool)
        self.seen[:, case.committed :] = block[:, : case.counted]
        open_len = case.committed
        if case.arbitrary:
            self.seen[:, : case.committed] = rng.random((case.n, case.committed)) < 0.4
            open_len, block = 0, self.seen
        n_pages = -(-self.n_slots // case.page_size)
        total = n_pages + case.spare
        self.max_slots = total * case.page_size
        table = np.full(total, -1, np.int64)
        table[:n_pages] = rng.permutation(total)[:n_pages]
        row_len = case.c + case.r
        self.rows = self._stored(rng, self.n_slots, row_len)
        self.query = self._stored(rng, case.n, case.h, row_len)
        slots = np.arange(self.n_slots)
        where = table[slots // case.page_size] * case.page_size + slots % case.page_size
        physical = np.full((self.max_slots, row_len), np.nan, np.float32)
        physical[where] = self.rows
        if case.poisoned_node >= 0:
            physical[where[case.committed + case.poisoned_node]] = np.nan
        query = self.query.copy()
        query[case.counted :] = np.nan
        if case.bf16:
            physical, query = to_bf16(physical), to_bf16(query)
        if case.swizzled:
            physical = swizzle(physical)
        self.layer = LayerCache(
            cp.asarray(physical), cp.asarray(table), case.page_size, case.swizzled
        )
        self.device_query = cp.asarray(query)
        self.visibility = visibility_of(case.counted, open_len, self.n_slots, block)

    def _stored(self, rng: np.random.Generator, *size: int) -> np.ndarray:
        x = rng.standard_normal(size).astype(np.float32)
        return from_bf16(to_bf16(x)) if self.case.bf16 else x

    def attend(self, device: Device, scores: Any = None, cut: Cut | None = None) -> Any:
        """[n, h, c], on the device."""
        return device.attend(
            *(self.layer, self.device_query, self.visibility, self.max_slots),
            c=self.case.c,
            scores=scores,
            cut=cut,
        )

    def to_host(self, out: Any) -> np.ndarray:
        """What `attend` gives, in float32."""
        host: np.ndarray = out.get()
        return from_bf16(host) if self.case.bf16 else host
