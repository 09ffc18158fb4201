"""Engines of lower precision, emulated: what storage in bfloat16 or float16 does to an honest one.

Every operand and every result of a product is rounded to the storage type, and products are
summed in float32 by BLAS; norms, softmax and the router's scores stay in float64, as an engine
keeps them in higher precision. Its distance from the truth is the noise floor of a declared
precision, by which golden cases are chosen (NUM-3).
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

STORAGE = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


class EmulatedArithmetic:
    """Products of `storage` operands, summed in float32."""

    def __init__(self, storage: str) -> None:
        self.name = storage
        self._dtype = STORAGE[storage]

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        operands = (self._stored(x).astype(np.float32), self._stored(y).astype(np.float32))
        product = np.einsum(spec, *operands, optimize=True)
        return self._stored(product).astype(np.float64)

    def sum(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.sum(axis=-1))

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(x))

    def log(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(x))

    def _stored(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self._dtype)
