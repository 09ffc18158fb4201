"""Which choices of experts can have moved a row: by layers, by what sees what, by what is cached.

A choice in layer l moves its own row from the experts' weights of layer l on, and who sees that
row from the scores of layer l + 1 on; nothing else (taint.py says the same of many rows at once).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kdtr.conformance.alternatives_fit import Misfit
from kdtr.conformance.alternatives_truth import Place
from kdtr.conformance.bundle import GoldenCase
from kdtr.contract import stage_order

_Row = tuple[str, int]  # point, row of its forward


class Reach:
    """Of one case, along the paths of the record."""

    def __init__(self, case: GoldenCase, n_layers: int) -> None:
        self._case = case
        self._points = case.inputs.points()
        order = stage_order(n_layers)
        self._order = {(stage.name, layer): i for i, (stage, layer) in enumerate(order)}
        self._cached: list[_Row] = []  # by slot
        for point in self._points:
            path = case.expectation(point).get("path")
            nodes = range(len(self._mask(point))) if path is None else path.tolist()
            self._cached += [(point, int(row)) for row in nodes]
        self._slot = {row: slot for slot, row in enumerate(self._cached)}

    def reaches(self, place: Place, misfit: Misfit) -> bool:
        """Whether the choice at a place is before the row that does not fit, and in its sight."""
        return any(self._moves(place, row, order) for row, order in self._rows(misfit))

    def _rows(self, misfit: Misfit) -> Iterator[tuple[_Row, int]]:
        """The rows that a misfit is computed from, and up to which stage; all, if it is of none."""
        axes = misfit.stage.axes
        if axes.startswith("n") and misfit.index:
            yield (misfit.point, misfit.index[0]), misfit.order
        elif axes.startswith("lt") and misfit.index:
            layer, slot = misfit.index
            yield self._cached[slot], self._order["c_kv", layer]
        else:
            for row in range(len(self._mask(misfit.point))):
                yield (misfit.point, row), misfit.order

    def _moves(self, place: Place, row: _Row, order: int) -> bool:
        point, layer, chooser = place
        if (point, chooser) == row:
            return order > self._order["expert_ids", layer]
        scores = self._order.get(("scores", layer + 1))
        return scores is not None and order >= scores and self._sees(row, (point, chooser))

    def _sees(self, row: _Row, other: _Row) -> bool:
        mask = self._mask(row[0])  # [n, L + n]
        if row[0] == other[0]:
            n, slots = mask.shape
            return bool(mask[row[1], slots - n + other[1]])
        if self._points.index(other[0]) > self._points.index(row[0]):
            return False
        slot = self._slot.get(other)
        return slot is not None and bool(mask[row[1], slot])

    def _mask(self, point: str) -> np.ndarray:
        mask = self._case.expectation(point).get("mask")
        assert mask is not None
        return mask
