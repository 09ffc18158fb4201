"""How firm a bundle says that its decisions are, against the gaps that it records (NUM-2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kdtr.conformance.bundle_check import EXPERT_GAP, MARGINS, stage_name
from kdtr.conformance.bundle_point import Contradiction, RecordedPoint
from kdtr.contract import ModelConfig


def check_margins(config: ModelConfig, point: RecordedPoint) -> None:
    """A margin is a gap over a noise: 0 where the gap is 0, inf where the row decides nothing.

    Raises Contradiction naming the margin, the row, and the gap that it cannot be of.
    """
    gap, of = _thinnest(config, point)
    for name in MARGINS:
        margin = point[name]
        wrong = (np.isposinf(margin) != np.isposinf(gap)) | ((margin == 0) != (gap == 0))
        if wrong.any():
            row = int(wrong.argmax())
            must = "0" if gap[row] == 0 else "inf" if np.isposinf(gap[row]) else "finite, above 0"
            raise Contradiction(
                f"{name}[{row}] = {margin[row]:.6g}, but by {of[row]} it is {must} (NUM-2)"
            )


def thin_rows_of(point: RecordedPoint) -> Mapping[str, int]:
    """By precision, how many rows are thin: of all in float32, of those committed in others."""
    counted = {}
    for name in MARGINS:
        precision = name.removeprefix("margin_")
        rows = point[name] if precision == "float32" else point[name][point.path]
        counted[precision] = int((rows <= 1).sum())
    return counted


def _thinnest(config: ModelConfig, point: RecordedPoint) -> tuple[np.ndarray, list[str]]:
    """The smallest gap of each row [n], and which it is; inf where the row decides nothing."""
    two_best = np.partition(point["logits"], -2, axis=1)[:, -2:]
    gap = two_best[:, 1] - two_best[:, 0]
    of = [f"logits[{row}], whose two best are {gap[row]:.3g} apart," for row in range(len(gap))]
    if point.entry is None:  # of a prompt, the last row alone chooses a token
        gap[:-1] = np.inf
        of[:-1] = ["a row that chooses neither a token nor experts"] * (len(gap) - 1)
    for layer in range(config.num_hidden_layers):
        if config.is_dense(layer):
            continue
        name = stage_name(EXPERT_GAP, layer)
        for row in np.flatnonzero(point[name] < gap):
            of[row] = f"{name}[{row}] = {point[name][row]:.3g}"
        gap = np.minimum(gap, point[name])
    return gap, of
