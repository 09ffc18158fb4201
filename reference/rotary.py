"""Rotary position embedding with YaRN (MLA-4 to MLA-7), reproducible for any theta and position.

An angle is kept as a fraction of a turn in 96-bit integers, so its reduction is exact: a
position of a million loses nothing. Everything that needs a logarithm or a power runs in
60-digit decimal arithmetic, which is specified to the digit.
"""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import cache
from math import ceil, floor

import numpy as np

from kdtr.contract import ModelConfig
from kdtr.reference.arithmetic import sin_cos_fixed

_DIGITS = 60
# A literal: a product here would be rounded to the caller's decimal context.
_TWO_PI = Decimal("6.28318530717958647692528676655900576839433879875021164194988918")
_RADIANS = float(_TWO_PI) / 2.0**64  # per unit of a 64-bit turn


def softmax_scale(config: ModelConfig) -> float:
    """MLA-4: from the head's width, never the latent's; YaRN's factor only when its key is set."""
    with localcontext(Context(prec=_DIGITS)):
        scale = 1 / Decimal(config.qk_head_dim).sqrt()
        if config.yarn is not None and config.yarn.mscale_all_dim:
            scale *= _mscale(config.yarn.factor, config.yarn.mscale_all_dim) ** 2
        return float(scale)


def amplitude(config: ModelConfig) -> float:
    """MLA-5: what cos and sin are multiplied by; 1 without YaRN."""
    yarn = config.yarn
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    with localcontext(Context(prec=_DIGITS)):
        if yarn.mscale and yarn.mscale_all_dim:
            top, bottom = (_mscale(yarn.factor, m) for m in (yarn.mscale, yarn.mscale_all_dim))
            return float(top / bottom)
        return float(_mscale(yarn.factor, 1.0))


@cache
def inverse_frequencies(config: ModelConfig) -> tuple[Decimal, ...]:
    """Radians per position of each of the r/2 pairs, to 60 digits (MLA-6 under YaRN)."""
    r = config.qk_rope_head_dim
    with localcontext(Context(prec=_DIGITS)):
        log_theta = Decimal(config.rope_theta).ln()
        plain = [(-log_theta * 2 * i / r).exp() for i in range(r // 2)]
        if config.yarn is None:
            return tuple(plain)
        ramp = _ramp(config)
        factor = Decimal(config.yarn.factor)
        return tuple(f / factor * t + f * (1 - t) for f, t in zip(plain, ramp, strict=True))


def rotary_tables(config: ModelConfig, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [n, r/2] of the positions [n], amplitude included. Exact below 2**32."""
    high, low = _turns_per_position(config)
    p = positions.astype(np.uint64)[:, None]
    turns = p * high + ((p * low) >> np.uint64(32))  # [n, r/2] mod 2**64: whole turns drop out
    quadrant = (turns + np.uint64(1 << 61)) >> np.uint64(62)  # nearest quarter turn, 0..3
    rest = (turns - (quadrant << np.uint64(62))).view(np.int64)  # within an eighth of a turn
    sine, cosine = sin_cos_fixed(rest.astype(np.float64) * _RADIANS)
    cos = np.choose(quadrant.view(np.int64), [cosine, -sine, -cosine, sine])
    sin = np.choose(quadrant.view(np.int64), [sine, cosine, -sine, -cosine])
    return amplitude(config) * cos, amplitude(config) * sin


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, *, interleave: bool) -> np.ndarray:
    """Turn the pairs of x [..., r] by cos, sin [..., r/2]; the result is half-split (MLA-7)."""
    if interleave:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@cache
def _turns_per_position(config: ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """Each frequency as a fraction of a turn: bits 1..64 and 65..96, two uint64 [r/2]."""
    with localcontext(Context(prec=_DIGITS)):
        turns = [int(f / _TWO_PI * (1 << 96)) for f in inverse_frequencies(config)]
    high = np.array([t >> 32 for t in turns], dtype=np.uint64)
    low = np.array([t & 0xFFFFFFFF for t in turns], dtype=np.uint64)
    return high, low


def _ramp(config: ModelConfig) -> list[Decimal]:
    """MLA-6: 1 where a pair turns too slowly to have been trained over its full circle."""
    yarn, r = config.yarn, config.qk_rope_head_dim
    assert yarn is not None

    def correction_dim(turns: float) -> Decimal:
        """The pair, as a real number, that makes `turns` turns over the original context."""
        ratio = yarn.original_max_position_embeddings / (Decimal(turns) * _TWO_PI)
        return r * ratio.ln() / (2 * Decimal(config.rope_theta).ln())

    low = Decimal(max(floor(correction_dim(yarn.beta_fast)), 0))
    high = Decimal(min(ceil(correction_dim(yarn.beta_slow)), r - 1))
    if low == high:
        high += Decimal("0.001")
    return [min(max((i - low) / (high - low), Decimal(0)), Decimal(1)) for i in range(r // 2)]


def _mscale(factor: float, m: float) -> Decimal:
    if factor <= 1:
        return Decimal(1)
    return Decimal("0.1") * Decimal(m) * Decimal(factor).ln() + 1
