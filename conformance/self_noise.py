"""How far an engine's answers lie apart when nothing is wrong: its own noise (NUM-3).

The same row is asked for in ways that every engine must take for one: the prompt prefilled whole,
in halves, in thirds and token by token. Each changes the shapes of the products, and so their
order of summation. The largest distance, as a fraction of the row's scale, over several prompts
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
    """relative  the largest honest distance seen, as a fraction of the row's largest logit
    worst     between which ways, and after which prompt
    samples   pairs of rows compared
    """

    relative: float
    worst: str
    samples: int

    def bound(self, row: np.ndarray, unit_roundoff: float) -> float:
        """The largest honest distance of a row [w] from another answer for it."""
        return float((SAFETY * self.relative + 4 * unit_roundoff) * np.abs(row).max())

    def is_more_than_rounding(self, unit_roundoff: float) -> bool:
        """Whether the answers lie further apart than sums in another order may bring them.

        Beyond MANY roundings of the coarsest dtype, or where a bound would be vacuous; NaN too.
        """
        return not self.relative <= min(VACUOUS / SAFETY, MANY * unit_roundoff)


def measure(model: SelfModel, prompts: Sequence[Sequence[int]]) -> SelfNoise:
    """Over prompts of at least two tokens each."""
    relative, worst, samples = 0.0, "", 0
    for tokens in prompts:
        whole = model.plain_row(tokens)
        scale = float(np.abs(whole).max())
        for name, row in _other_ways(model, tokens):
            samples += 1
            distance = float(np.abs(row - whole).max()) / scale if scale else 0.0
            if not np.isfinite(row).all() or not np.isfinite(whole).all():
                distance = float("inf")
            if distance > relative:
                relative = distance
                worst = f"{name} against a prefill of {len(tokens) - 1} tokens at once"
    return SelfNoise(relative, worst, samples)


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
