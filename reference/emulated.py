"""Engines of lower precision, emulated: what storage in bfloat16 or float16 does to an honest one.

Every operand and every result of a product is rounded to the storage type, and products are
summed in float32; norms, softmax and the router's scores stay in float64, as an engine keeps
them in higher precision. Its distance from the truth is the noise floor of a declared precision,
by which golden cases are chosen (NUM-3), so it too has the same bits on every machine.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from kdtr.reference.arithmetic import contract_sum, exp_fixed, log_fixed, sum_fixed

STORAGE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class EmulatedArithmetic:
    """Products of `storage` operands, summed in float32, in the order of the reference."""

    def __init__(self, storage: str) -> None:
        self.name = storage
        self._dtype = STORAGE[storage]

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        product = contract_sum(spec, self._operand(x), self._operand(y))  # float32
        return product.astype(self._dtype).astype(np.float64)

    def sum(self, x: np.ndarray) -> np.ndarray:
        return sum_fixed(x)

    def exp(self, x: np.ndarray) -> np.ndarray:
        return exp_fixed(x)

    def log(self, x: np.ndarray) -> np.ndarray:
        return log_fixed(x)

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        return x

    def _operand(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self._dtype).astype(np.float32)
