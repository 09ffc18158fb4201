"""How far an engine's answers lie apart when nothing is wrong: its own noise (NUM-3).

The same row is asked for in ways that every engine must take for one: the prompt prefilled whole,
in halves, in thirds and token by token. Each changes the shapes of the products, and so their
order of summation. The largest distance, as a fraction of the row's spread, over several prompts
is the noise; a bound is SAFETY times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.self_model import SelfModel
from kdtr.conformance.tolerance import UNIT_ROUNDOFF

SAFETY = 8.0  # few samples, and a tree's shapes are not among them
# Roundings that may add up on the way from embedding to logits: a thousand layers of 15 sums, with
# random signs, are 122; eight times that.
MANY = 1024
# Beyond it a bound says nothing: a wrong index moves a row by about this much.
VACUOUS = 1 / 8


@dataclass(frozen=True, slots=True)
class SelfNoise:
    """relative  the largest honest distance seen, as a fraction of the row's spread
    worst     between which ways, and after which prompt
    samples   pairs of rows compared
    unit      unit roundoff of the dtype in which the engine declares its logits
    """

    relative: float
    worst: str
    samples: int
    unit: float

    def bound(self, row: np.ndarray) -> np.ndarray:
        """The largest honest distance of each logit of a row [w] from another answer for it."""
        own = np.where(np.isfinite(row), np.abs(row), 0.0)
        return SAFETY * self.relative * spread(row) + 4 * self.unit * own

    def is_more_than_rounding(self, coarsest: float) -> bool:
        """Whether the answers lie further apart than sums in another order may bring them.

        Beyond MANY roundings of the coarsest dtype, or where a bound would be vacuous; NaN too.
        """
        return not self.relative <= min(VACUOUS / SAFETY, MANY * coarsest)


def spread(row: np.ndarray) -> float:
    """How far the bulk of a row's logits lies from their median.

    The largest logit is no scale: padding of the vocabulary is masked with -1e9, or -inf.
    """
    finite = row[np.isfinite(row)]
    if not len(finite):
        return 0.0
    return float(np.quantile(np.abs(finite - np.median(finite)), 0.9))


def apart(expected: np.ndarray, actual: np.ndarray, bound: np.ndarray) -> float:
    """The largest distance of two rows [w], in bounds; inf where inf or NaN stand elsewhere."""
    same = expected == actual  # infinities too
    finite = np.isfinite(expected) & np.isfinite(actual)
    if not (same | finite).all():
        return float("inf")
    distance = np.zeros(len(expected))
    np.subtract(expected, actual, out=distance, where=finite)
    distance = np.abs(distance)
    ratio = np.where(distance > 0, np.inf, 0.0)
    np.divide(distance, bound, out=ratio, where=bound > 0)
    return float(ratio.max(initial=0.0))


def measure(model: SelfModel, prompts: Sequence[Sequence[int]]) -> SelfNoise:
    """Over prompts of at least two tokens each."""
    relative, worst, samples = 0.0, "", 0
    unit = unit_roundoff(model)
    for tokens in prompts:
        whole = model.plain_row(tokens)
        stored = SelfNoise(0.0, "", 0, unit).bound(whole)
        for name, row in _other_ways(model, tokens):
            samples += 1
            # In units of the spread, beyond what storing a logit twice explains.
            distance = apart(whole, row, np.maximum(stored, spread(whole)))
            if apart(whole, row, stored) <= 1:
                distance = 0.0
            if distance > relative:
                relative = distance
                worst = f"{name} against a prefill of {len(tokens) - 1} tokens at once"
    return SelfNoise(relative, worst, samples, unit)


def _other_ways(model: SelfModel, tokens: Sequence[int]) -> list[tuple[str, np.ndarray]]:
    n = len(tokens) - 1
    chunks = [k for k in sorted({2, 3, n}) if 1 < k <= n]
    return [(f"prefill in {k} chunks", model.plain_row(tokens, k)) for k in chunks]


def unit_roundoff(model: SelfModel) -> float:
    """Of the dtype in which the engine declares its logits."""
    return UNIT_ROUNDOFF[model.info.profile.logits]


def coarsest_roundoff(model: SelfModel) -> float:
    """Of the coarsest dtype that the engine declares."""
    profile = model.info.profile
    fields = ("weights", "activations", "latents", "scores", "logits", "accumulation")
    return max(UNIT_ROUNDOFF[getattr(profile, field)] for field in fields)
