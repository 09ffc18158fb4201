"""The device for linear.py, beside this file: its kernels, memory shared with torch, graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from device_kernels import Kernels

from kdtr.engine import cuda_linear


class Device(Kernels):
    """Kernels, one stream for CuPy and torch, and graphs."""

    def __init__(self) -> None:
        super().__init__()
        import torch

        self.torch = torch
        self.torch_stream = torch.cuda.Stream()
        self.stream = self.cp.cuda.ExternalStream(self.torch_stream.cuda_stream)
        self.stream.use()
        torch.cuda.set_stream(self.torch_stream)

    def linear(self, dtype: str) -> Callable[[str], Any]:
        """Kernels of projections, whatever their file."""
        return lambda name: self.getter(cuda_linear.file_of(name), dtype)(name)

    def wgmma(self, dtype: str) -> Callable[[str], Any] | None:
        """Those that Hopper alone has, where an engine would have them."""
        return self.getter(cuda_linear.WGMMA, dtype) if self.hopper and dtype == "bf16" else None

    def of(self, tensor: Any) -> Any:
        """A torch tensor, bfloat16 as its bits, as a CuPy array of the same memory."""
        if tensor.dtype == self.torch.bfloat16:
            tensor = tensor.view(self.torch.int16)
        return self.cp.asarray(tensor)

    def back(self, array: Any, dtype: str) -> Any:
        """A CuPy array as a torch tensor of the same memory."""
        tensor = self.torch.as_tensor(array, device="cuda")
        return tensor.view(self.torch.bfloat16) if dtype == "bf16" else tensor

    def graph(self, calls: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs once, captures; the graph, and what the captured calls returned."""
        calls()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        kept = calls()
        graph.capture_end()
        return graph, kept

    def time_us(self, calls: Callable[[], Any], n_calls: int, budget_s: float = 0.4) -> float:
        """Median time of a call."""
        graph, kept = self.graph(calls)
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[float] = []
        began = time.monotonic()
        for replay in range(60):
            start.record(self.torch_stream)
            graph.replay()
            end.record(self.torch_stream)
            end.synchronize()
            if replay > 1:
                times.append(start.elapsed_time(end) * 1e3 / n_calls)
            if time.monotonic() - began > budget_s and len(times) >= 5:
                break
        del kept
        return statistics.median(times)
