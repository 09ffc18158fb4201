"""What the checks of linear.py, beside this file, share: operands, comparisons, and what failed."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from linear_device import Device


class Checks:
    def __init__(self, device: Device) -> None:
        self.d = device
        self.torch = device.torch
        self.torch.manual_seed(1)
        self.failed = 0
        self.passed = 0

    def expect(self, name: str, good: bool, detail: str = "") -> None:
        self.passed += bool(good)
        self.failed += not good
        if not good:
            print(f"FAILED {name} {detail}", flush=True)

    def random(self, *shape: int, dtype: str, scale: float = 1.0) -> Any:
        x = self.torch.randn(*shape, device="cuda") * scale
        return x.to(self.torch.bfloat16) if dtype == "bf16" else x

    def close(self, name: str, y: Any, exact: Any, magnitude: Any, dtype: str) -> None:
        """|y - exact| within half a unit of storage and float32 sums of `magnitude` in all."""
        bound = 4e-6 * magnitude + 1e-30
        if dtype == "bf16":
            bound = bound + exact.abs() * 2.0**-8 * 1.01
        error = (y.double() - exact).abs()
        ratio = (error / bound).max().item()
        self.expect(name, ratio <= 1, f"error / bound = {ratio:.3g}")

    def run(self, *parts: Callable[[Checks], None]) -> bool:
        for part in parts:
            began = time.monotonic()
            try:
                part(self)
            except Exception as error:  # the other parts still say something
                traceback.print_exc()
                self.expect(part.__name__, False, repr(error))
            self.torch.cuda.synchronize()
            print(f"checked {part.__name__} in {time.monotonic() - began:.1f} s", flush=True)
        print(f"{self.passed} checks passed, {self.failed} failed", flush=True)
        return not self.failed
