"""The same operands on the host and on a device, and how far two right answers may differ.

Two right answers differ by rounding alone: a sum of k products errs by at most k u of the sum of
their magnitudes, and what is stored errs by u of the storage dtype besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.rounding import rounded

FLOAT32 = 2.0**-24
ROUNDOFF = {"float32": FLOAT32, "bfloat16": 2.0**-8}
DTYPES = ("float32", "bfloat16")

TREES: dict[str, Callable[[int], list[int]]] = {
    "chain": lambda n: list(range(-1, n - 1)),
    "star": lambda n: [-1] + [0] * (n - 1),
    "mixed": lambda n: [-1, *(int(i * 0.6) for i in range(n - 1))],
}


class Pair:
    """The same operands on both sides: numbers of the dtype, as float32 on the host."""

    def __init__(self, cuda: Any, dtype: str, seed: int = 7) -> None:
        self.dtype = dtype
        self.cuda = cuda
        self.host = HostKernels() if dtype == "float32" else RoundedKernels(HostKernels(), dtype)
        self.rng = np.random.default_rng(seed)

    def numbers(self, *shape: int, scale: float = 1.0) -> tuple[np.ndarray, Any]:
        host = rounded((self.rng.standard_normal(shape) * scale).astype(np.float32), self.dtype)
        return host, self.cuda.upload_weight(host)

    def close(self, expected: np.ndarray, found: Any, magnitude: float, terms: int) -> None:
        """Within rounding of `terms` products that sum, in magnitude, to `magnitude`."""
        found = self.cuda.to_host(found)
        assert expected.shape == found.shape
        bound = 4 * (terms * FLOAT32 * magnitude + 2 * ROUNDOFF[self.dtype] * abs(expected)) + 1e-30
        worst = np.unravel_index(np.argmax(abs(found - expected) - bound), expected.shape)
        assert (abs(found - expected) <= bound).all(), (worst, found[worst], expected[worst])
