"""The device for verify_attn.py, beside this file: its kernels, and graphs of their launches."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from attention_shapes import SCALE, C
from device_kernels import Kernels

from kdtr.engine import cuda_attention as attention
from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_cuts import MMA_ROWS, Cut

_PLAIN_SPLIT = 100  # slots a split, of the plain kernel


class Device(Kernels):
    """Kernels, and attention by those that the engine takes."""

    def attend(
        self,
        layer: attention.LayerCache,
        query: Any,
        visibility: attention.DeviceVisibility,
        max_slots: int,
        *,
        c: int = C,
        scores: Any = None,
        cut: Cut | None = None,
    ) -> Any:
        """As `cuda_attention.verify_attn`."""
        return attention.verify_attn(
            self.getter("verify_attn", "bf16" if query.dtype.itemsize == 2 else "f32"),
            self.getter("verify_attn_mma", "bf16"),
            *(layer, query, visibility, c, SCALE, _PLAIN_SPLIT, max_slots, scores),
            wgmma=self.getter("verify_attn_wgmma", "bf16") if self.hopper else None,
            cut=cut,
        )

    def block_rows(self, page_size: int) -> tuple[int, ...]:
        """Rows a block of each fast kernel that takes such pages."""
        takes = self.hopper and page_size % cuda_hopper.TILE == 0
        return (*MMA_ROWS, *([cuda_hopper.ROWS] if takes else []))


class Captured:
    """A graph of calls, with the memory they allocated.

    results  what the captured calls returned
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        import cupy as cp

        cp.cuda.Device().synchronize()  # the operands are there
        self.cp = cp
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.pool = cp.cuda.MemoryPool()
        with self.stream, cp.cuda.using_allocator(self.pool.malloc):
            self.results = work()  # compiles, and fills the pool
            self.stream.synchronize()
            self.results = None
            self.stream.begin_capture()
            self.results = work()
            self.graph = self.stream.end_capture()
        self.graph.upload(self.stream)

    def replay(self) -> None:
        """And waits: for what others wrote before, and for the end."""
        self.cp.cuda.Device().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()

    def median_us(self, n_calls: int, replays: int = 11) -> float:
        """Of a call."""
        times: list[float] = []
        for i in range(replays + 2):
            start, end = self.cp.cuda.Event(), self.cp.cuda.Event()
            start.record(self.stream)
            self.graph.launch(self.stream)
            end.record(self.stream)
            end.synchronize()
            if i >= 2:
                times.append(self.cp.cuda.get_elapsed_time(start, end) * 1e3 / n_calls)
        return statistics.median(times)
