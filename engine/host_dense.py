"""Host kernels of the dense part: embedding, norm, linear, gate. Shapes: `kernel_set.py`."""

# NumPy types the operators of a plain ndarray as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import numpy as np


def embed(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """table [w, m], tokens [n] -> [n, m]."""
    return table[tokens]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [n, i], weight [i] -> [n, i], each row by its own root mean square."""
    mean_square = np.mean(x * x, axis=-1, keepdims=True)  # [n, 1]
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x [n, i], weight [o, i] -> [n, o]."""
    return x @ weight.T


def add(residual: np.ndarray, delta: np.ndarray) -> np.ndarray:
    """[n, m] + [n, m] -> [n, m]."""
    return residual + delta


def silu_mul(gate_up: np.ndarray) -> np.ndarray:
    """gate_up [n, 2i], gate before up -> silu(gate) * up [n, i], the inside of SwiGLU (MOE-4)."""
    gate, up = np.split(gate_up, 2, axis=-1)  # [n, i] each
    return gate * sigmoid(gate) * up


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), elementwise, without overflow: the exponent is never positive."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def argmax(logits: np.ndarray) -> np.ndarray:
    """logits [n, w] -> targets [n]; NumPy's argmax is the first, so ties go to the lowest id."""
    return np.argmax(logits, axis=-1)
