"""Logits or top-k log-probabilities of an x-ray model, read as attention weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kdtr.conformance.xray_models import (
    ANCHOR_PER_WEIGHT,
    MIRROR,
    N_TOKENS,
    RESERVED,
    START,
)
from kdtr.contract import InputError

_NOISE = 2.0**-22  # of the largest log-probability: four roundings of float32


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One row: the attention weight that each lens gave to each token, [lenses, N_TOKENS].

    unreadable  why there are no weights: the logits have no anchor, or are no numbers
    noise       how far a weight may be off by the way it was read
    """

    weights: np.ndarray
    unreadable: str = ""
    noise: float = 0.0


def read_logits(logits: np.ndarray) -> Reading:
    """The row's logits [w]: relative to START's, which is that of a known weight."""
    row = np.asarray(logits, dtype=np.float64)
    if not np.isfinite(row).all():
        return _unreadable(row, f"{np.count_nonzero(~np.isfinite(row))} logits are inf or NaN")
    anchor = row[START]
    if anchor <= 0:
        return _unreadable(row, f"logit {START}, a constant of the model, is {anchor:g}")
    weights = (row * (ANCHOR_PER_WEIGHT / anchor)).reshape(-1, N_TOKENS)
    weights[0, START], weights[0, MIRROR] = weights[0, MIRROR], 0
    return Reading(weights)


def read_top_k(pairs: Iterable[tuple[int, float]], vocab_size: int) -> Reading:
    """(token, log-probability) pairs: what is not listed is below all that is listed.

    A reserved token must be listed: its logit is 0, and so the others' are their log-probabilities
    less its own. InputError if none is: ask for more, `visible + 2` per lens are enough.
    """
    listed = {int(token): float(value) for token, value in pairs}
    zeros = [value for token, value in listed.items() if token % N_TOKENS == RESERVED]
    if not zeros:
        raise InputError(
            f"{len(listed)} log-probabilities without one of token {RESERVED} (or any that is "
            f"{RESERVED} modulo {N_TOKENS}), whose logit is 0; expected a larger k"
        )
    logits = np.zeros(vocab_size)
    largest = max(abs(value) for value in listed.values())
    for token, value in listed.items():
        logit = value - zeros[0]
        # A float32 log-probability is off by half its last place, and so is the zero's.
        logits[token] = logit if abs(logit) > _NOISE * largest else 0.0
    reading = read_logits(logits)
    if reading.unreadable:
        return reading
    return replace(reading, noise=_NOISE * largest * ANCHOR_PER_WEIGHT / logits[START])


def _unreadable(row: np.ndarray, why: str) -> Reading:
    return Reading(np.zeros((row.size // N_TOKENS, N_TOKENS)), why)
