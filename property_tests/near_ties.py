"""Near ties: where the truth says that rounding alone may turn a choice (NUM-2).

Asked of the truth, and only after a difference.
"""

from __future__ import annotations

import numpy as np

from kdtr.property_tests.rounding import Rounding


def choice_is_thin(run: Rounding, one: int, other: int) -> bool:
    """Whether two tokens after the run's history lie closer than two bounds (NUM-2)."""
    truth, bound = run.truth["logits", None][-1], run.bound("logits")[-1, 0]
    return bool(abs(truth[one] - truth[other]) <= 2 * bound)


def cumulative(logits: np.ndarray, temperature: float) -> np.ndarray:
    """The distribution function [w] of softmax(logits / temperature), in float64."""
    scaled = logits.astype(np.float64) / temperature
    e = np.exp(scaled - scaled.max())
    return np.cumsum(e / e.sum())


def draw_is_thin(run: Rounding, uniform: float, temperature: float, low: int, high: int) -> bool:
    """Whether every edge between two tokens lies where rounding may carry it over the uniform.

    Logits that are off by at most b move a probability by a factor of at most exp(2 b / T), and
    with it a sum of probabilities, which is at most 1, by at most exp(2 b / T) - 1.
    """
    truth, bound = run.truth["logits", None][-1], run.bound("logits")[-1, 0]
    edges = cumulative(truth, temperature)[low:high]
    return bool((abs(edges - uniform) <= np.expm1(2 * bound / temperature)).all())
