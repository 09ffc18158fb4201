"""RMSNorm (arXiv 1910.07467)."""

import numpy as np

from kdtr.reference.arithmetic import Arithmetic


def rms_norm(arithmetic: Arithmetic, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x**2) + eps) * weight over the last axis: x [n, m], weight [m] (NORM-1)."""
    mean_square = arithmetic.sum(x * x) / x.shape[-1]  # [n]
    return x / np.sqrt(mean_square + eps)[:, None] * weight
