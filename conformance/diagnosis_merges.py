"""Attention in splits that are merged otherwise: ways to get the softmax over all slots wrong.

A split has the largest score of its slots, the sum of exp(score - largest), and the mean of the
values under it. A right merge weighs each mean by exp(LSE), LSE = largest + log(sum).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import e, log, log2

import numpy as np

from kdtr.conformance.diagnosis_forward import Array
from kdtr.conformance.diagnosis_past import Past
from kdtr.conformance.diagnosis_twist import Twist, twisted

# Slots per split: what engines have, and where there are few slots every small one.
_SIZES = (16, 32, 64, 128, 256, 512)
_SMALL = (2, 3, 4, 5, 6, 7, 8)
_FEW = 32

# Largest scores and sums [n, h, splits] to what the splits are weighed with, before the division.
_Weigh = Callable[[Array, Array], Array]


def merge_twists(past: Past) -> Iterator[Twist]:
    """All of this file, for the scene's forward."""
    yield _merged(past, "softmax is not divided by the sum of its weights", _without_sum)
    slots = past.scene.committed_len + past.scene.n
    for size in (*(_SMALL if slots <= _FEW else ()), *_SIZES):
        if size >= slots:
            break
        for says, weigh in _WRONG:
            yield _merged(past, f"splits of {size} slots are merged {says}", _by(size, weigh))


def _merged(past: Past, says: str, attention: Callable[[Array], Array]) -> Twist:
    how = replace(past.right, attention=attention)
    return twisted(past, says, "MLA-3", "out_latent", how, 3)


def _without_sum(scores: Array) -> Array:
    return np.exp(scores - scores.max(axis=-1, keepdims=True))


def _by(size: int, weigh: _Weigh) -> Callable[[Array], Array]:
    """Attention weights [n, h, s] of scores, -inf where invisible, merged over splits so."""

    def attention(scores: Array) -> Array:
        firsts = np.arange(0, scores.shape[-1], size)
        largest = np.maximum.reduceat(scores, firsts, axis=-1)  # [n, h, splits]
        seen = np.isfinite(largest)
        top = np.where(seen, largest, 0.0)
        sizes = np.diff(np.append(firsts, scores.shape[-1]))
        weights = np.exp(scores - np.repeat(top, sizes, axis=-1))
        sums = np.add.reduceat(weights, firsts, axis=-1)
        share = np.where(seen, weigh(largest, np.where(seen, sums, 1.0)), 0.0)
        total = share.sum(axis=-1, keepdims=True)
        factor = share / np.where(total > 0, total, 1.0) / np.where(seen, sums, 1.0)
        merged: Array = weights * np.repeat(factor, sizes, axis=-1)
        return merged

    return attention


def _powered(power: float) -> _Weigh:
    def weigh(largest: Array, sums: Array) -> Array:
        lse = power * (largest + np.log(sums))
        return np.exp(lse - lse.max(axis=-1, keepdims=True))

    return weigh


def _alike(largest: Array, sums: Array) -> Array:
    return np.isfinite(largest).astype(float)


def _by_sums(largest: Array, sums: Array) -> Array:
    return sums


def _by_largest(largest: Array, sums: Array) -> Array:
    return np.exp(largest - largest.max(axis=-1, keepdims=True))


def _last_alone(largest: Array, sums: Array) -> Array:
    """Of each row, the last split that it sees anything of."""
    seen = np.isfinite(largest)
    last = seen.shape[-1] - 1 - np.argmax(seen[..., ::-1], axis=-1)
    return (np.arange(seen.shape[-1]) == last[..., None]).astype(float)


def _first_alone(largest: Array, sums: Array) -> Array:
    return (np.arange(largest.shape[-1]) == 0) * np.isfinite(largest).astype(float)


def _without_last(largest: Array, sums: Array) -> Array:
    whole = _powered(1.0)(largest, sums)
    whole[..., -1] = 0.0
    return whole


_WRONG: tuple[tuple[str, _Weigh], ...] = (
    (f"in the wrong base: their LSE is multiplied by log2(e) = {log2(e):.4f}", _powered(log2(e))),
    (f"in the wrong base: their LSE is multiplied by ln(2) = {log(2):.4f}", _powered(log(2))),
    ("with the same weight each, without their LSE", _alike),
    ("by their sums alone: the largest scores are not made equal before", _by_sums),
    ("by their largest scores alone, without their sums", _by_largest),
    ("so that the last one alone counts", _last_alone),
    ("so that the first one alone counts", _first_alone),
    ("without the last one", _without_last),
)
