"""Rotary frequencies and the softmax scale, from the configuration alone (MLA-4 to MLA-7)."""

from __future__ import annotations

from math import ceil, floor, log, pi, sqrt

import numpy as np

from kdtr.contract import ModelConfig, Yarn


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """[r/2] float64: the angle of pair i at position p is p * result[i] (MLA-6 under YaRN)."""
    r = config.qk_rope_head_dim
    pair = np.arange(r // 2)  # [r/2]
    plain = np.array([config.rope_theta ** (-2.0 * i / r) for i in pair.tolist()])  # [r/2]
    if config.yarn is None:
        return plain
    low, high = _correction_range(config.yarn, r, config.rope_theta)
    ramp = np.clip((pair - low) / (high - low), 0.0, 1.0)  # [r/2]
    blended: np.ndarray = (plain / config.yarn.factor) * ramp + plain * (1.0 - ramp)
    return blended


def attention_factor(config: ModelConfig) -> float:
    """What cos and sin are multiplied by (MLA-5)."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:  # both given and nonzero
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def softmax_scale(config: ModelConfig) -> float:
    """What a raw score is multiplied by: from the head's width d + r, not the latent's (MLA-4)."""
    scale = 1.0 / sqrt(config.qk_head_dim)
    if config.yarn is not None and config.yarn.mscale_all_dim:
        scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
    return scale


def half_split_order(config: ModelConfig) -> np.ndarray:
    """[r] indices that bring a checkpoint's rope entries into half-split order (MLA-7).

    Applied once, to the rows of the projections: the kernels know one pairing, (i, i + r/2), and
    the cache is half-split whatever the checkpoint pairs.
    """
    r = config.qk_rope_head_dim
    if config.rope_interleave:
        return np.concatenate([np.arange(0, r, 2), np.arange(1, r, 2)])  # firsts, then seconds
    return np.arange(r)


def _correction_range(yarn: Yarn, r: int, theta: float) -> tuple[float, float]:
    """Ends of the ramp, in pair indices, never equal (MLA-6)."""
    low = max(floor(_correction_dim(yarn, r, theta, yarn.beta_fast)), 0)
    high = min(ceil(_correction_dim(yarn, r, theta, yarn.beta_slow)), r - 1)
    return (low, high + 0.001) if low == high else (low, high)


def _correction_dim(yarn: Yarn, r: int, theta: float, turns: float) -> float:
    """The pair, as a real number, that makes this many turns over the original context."""
    return r * log(yarn.original_max_position_embeddings / (turns * 2 * pi)) / (2 * log(theta))


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1.0 if factor > 1 else 1.0
