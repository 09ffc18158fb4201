"""Watching what a mode shows, so that a finding can be drawn."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.drive import Mode
from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.observe import Observation
from kdtr.conformance.stdio_protocol import ExchangeError
from kdtr.contract import STAGE, Source, Stage

_ROW = re.compile(r"\brow (\d+)")
_SLOT = re.compile(r"\bslot (\d+)")
_PATH_NODE = re.compile(r"\bpath node (\d+)")


class Sight:
    """What the engine showed at the point that a mode drove last: a finding ends its case there."""

    def __init__(self) -> None:
        self._seen: Observation | None = None
        self._exchange_broke = False

    def watching(self, mode: Mode) -> Mode:
        """The mode, of which each point is watched."""
        chunk, entry = self._watched(mode.drive_chunk), self._watched(mode.drive_round)
        return replace(mode, drive_chunk=chunk, drive_round=entry)

    def drawn(self, finding: Finding, case: GoldenCase) -> Finding:
        """The finding with the picture of its point; of a near tie, and of no point, without.

        Nor where the exchange with a process broke: that has nothing to do with the tree.
        """
        point = finding.place.point
        if self._exchange_broke and finding.verdict is Verdict.ERROR:
            return finding
        if self._seen is None or not finding.verdict.is_bad or point not in case.inputs.points():
            return finding
        return replace(finding, drawing=_drawing(finding, case, self._seen))

    def _watched(self, drive: Callable[..., None]) -> Callable[..., None]:
        def watched(driver: Any, entry: Any, pin: Any, seen: Observation) -> None:
            self._seen = seen  # before the engine is asked: it may raise
            self._exchange_broke = False
            try:
                drive(driver, entry, pin, seen)
            except ExchangeError:
                self._exchange_broke = True
                raise

        return watched


def _drawing(finding: Finding, case: GoldenCase, seen: Observation) -> Drawing | None:
    point, inputs = finding.place.point, case.inputs
    expectation = case.expectation(point)
    positions, mask = expectation.get("positions"), expectation.get("mask")
    slots = expectation.get("slots")
    if positions is None or mask is None:
        return None
    number = int(point.removeprefix("chunk").removeprefix("round"))
    is_chunk = point.startswith("chunk")
    n = len(positions)
    path = tuple(range(n)) if is_chunk else _integers(expectation.get("path"))
    shown = {
        name: _shown(seen, name, None if truth is None else truth.shape)
        for name, truth in (
            ("positions", positions),
            ("mask", mask),
            ("slots", slots),
            ("path", None),
        )
    }
    shown_mask, moves = shown["mask"], seen.arrays.get(("moves", None))
    return Drawing(
        tokens=inputs.chunks[number] if is_chunk else inputs.rounds[number].tree.tokens,
        parents=tuple(range(-1, n - 1)) if is_chunk else inputs.rounds[number].tree.parents,
        positions=_integers(positions),
        mask=mask.astype(bool),
        path=path,
        rows=_rows(finding, expectation, seen, path),
        is_chunk=is_chunk,
        shown_positions=None if shown["positions"] is None else _integers(shown["positions"]),
        shown_mask=None if shown_mask is None else shown_mask.astype(bool),
        shown_path=None if shown["path"] is None else _integers(shown["path"]),
        slots=_integers(slots),
        shown_slots=None if shown["slots"] is None else _integers(shown["slots"]),
        shown_moves=None if moves is None else _pairs(moves),
    )


def _shown(seen: Observation, name: str, shape: tuple[int, ...] | None) -> np.ndarray | None:
    """What was shown, if it has the form (None: any length) of what it is drawn beside."""
    array = seen.arrays.get((name, None))
    if array is None or array.dtype.kind not in "biu":
        return None
    fits = array.ndim == 1 if shape is None else array.shape == shape
    return array if fits else None


def _rows(
    finding: Finding, expectation: Expectation, seen: Observation, path: tuple[int, ...]
) -> tuple[int, ...]:
    """Rows that differ: all of an exact stage, else the one that is named; of a decision and of
    what a commit keeps, the node that it is about."""
    stage = STAGE.get(finding.stage)
    if stage is None:
        return ()
    expected, actual = expectation.get(stage.name), seen.arrays.get((stage.name, None))
    if stage.name == "path":
        return (_parting(path, _shown(seen, "path", None)),)
    if stage.name in ("bonus", "root"):
        return path[-1:]
    if stage.name == "copied" and actual is not None and actual.shape == (len(path),):
        return tuple(node for node, same in zip(path, actual, strict=True) if not same)
    if expected is not None and actual is not None and _is_of_rows(stage, expected, actual):
        wrong = (expected != actual).reshape(len(expected), -1).any(axis=1)
        return _integers(np.flatnonzero(wrong))
    row, node, slot = (pattern.search(finding.where) for pattern in (_ROW, _PATH_NODE, _SLOT))
    if row is not None:
        return (int(row[1]),)
    slots = expectation.get("slots")
    if node is not None:
        kept = int(node[1])
    elif slot is not None and slots is not None and stage.source is Source.COMMIT:
        kept = int(slot[1]) - int(slots[0])
    else:
        return ()
    return path[kept : kept + 1] if kept >= 0 else ()


def _is_of_rows(stage: Stage, expected: np.ndarray, actual: np.ndarray) -> bool:
    return stage.exact and stage.axes.startswith("n") and expected.shape == actual.shape


def _parting(path: tuple[int, ...], shown: np.ndarray | None) -> int:
    """The last node on which the two walks agree: there one of them went wrong."""
    both = zip(path, () if shown is None else _integers(shown), strict=False)
    agreed = 0
    for right, other in both:
        if right != other:
            break
        agreed += 1
    return path[max(agreed, 1) - 1]


def _pairs(array: np.ndarray) -> tuple[tuple[int, int], ...] | None:
    if array.dtype.kind not in "iu" or array.ndim != 2 or array.shape[1] != 2:
        return None
    return tuple((int(source), int(destination)) for source, destination in array)


def _integers(array: np.ndarray | None) -> tuple[int, ...]:
    return () if array is None else tuple(int(x) for x in array)
