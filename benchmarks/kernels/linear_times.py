"""What the times of linear.py, beside this file, share: a row each, beside a kernel that reads."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
from linear_device import Device

from kdtr.engine import cuda_linear

COLD_BYTES, SPARE_BYTES = 170e6, 1.2e9
READ = """
extern "C" __global__ void __launch_bounds__(512) read_only(
    const uint4* from, long long n, int* to) {
    long long stride = (long long)gridDim.x * blockDim.x;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int x = 0;
    for (; at + 7 * stride < n; at += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(from + at + j * stride));
#pragma unroll
        for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; at < n; at += stride) {
        uint4 v = from[at];
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345678) *to = x;
}
"""
ROWS = (1, 17, 65)


class Times:
    def __init__(self, device: Device, variants: bool) -> None:
        self.d, self.torch, self.variants = device, device.torch, variants
        self.rows: list[dict[str, Any]] = []
        self.read = device.cp.RawKernel(READ, "read_only", options=("-std=c++17",))
        self.bandwidth = 0.0
        self.spare = self.torch.empty(int(SPARE_BYTES), dtype=self.torch.int8, device="cuda")
        self.spare.random_()
        self._reading: dict[int, float] = {}

    def note(self, what: str, n: int, n_bytes: float, time_us: float) -> None:
        gb = n_bytes / time_us / 1e3
        reading_us = self.reading_us(n_bytes)
        its = {"what": what, "n": n, "mb": n_bytes / 1e6, "us": time_us, "gb_per_s": gb}
        self.rows.append({**its, "reading_us": reading_us})
        print(
            f"{what:44} n={n:3} {n_bytes / 1e6:8.1f} MB {time_us:9.2f} us {gb:7.0f} GB/s "
            f"{100 * gb / self.bandwidth:5.1f} % {100 * reading_us / time_us:5.1f} %",
            flush=True,
        )

    def reading_us(self, n_bytes: float) -> float:
        """What a kernel that only reads takes for so many bytes, in this run."""
        pointer, total = self.spare.data_ptr(), self.spare.numel()
        if n_bytes > total:
            return self.reading_us(1e9) * n_bytes / 1e9
        size = int(n_bytes) // 4096 * 4096
        if size not in self._reading:
            cp, sms = self.d.cp, cuda_linear.multiprocessors()
            copies = min(total // size, max(2, -(-int(COLD_BYTES) // size)))
            to = cp.zeros(1, cp.int32)

            def time_us(blocks: int) -> float:
                def calls() -> None:
                    for c in range(copies):
                        at = np.uint64(pointer + c * size)
                        self.read((blocks * sms,), (512,), (at, np.int64(size // 16), to))

                return self.d.time_us(calls, copies, 0.2)

            self._reading[size] = min(time_us(2), time_us(4)) * n_bytes / size
        return self._reading[size]

    def bandwidths(self) -> None:
        """The highest is what the first percentage refers to."""
        sizes = [mb * 1e6 for mb in (4.7, 14.7, 30.3, 117.4, 1000)]
        self.bandwidth = max(size / self.reading_us(size) / 1e3 for size in sizes)
        print(f"read bandwidth {self.bandwidth:.0f} GB/s")
        for size in sizes:
            self.note("read only", 0, size, self.reading_us(size))

    def run(self, *parts: Callable[[Times], None]) -> None:
        self.bandwidths()
        for part in parts:
            try:
                part(self)
            except Exception:  # the other parts still have times
                traceback.print_exc()
