"""The numbers around a divergence, and how every row of its stage fared: data for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.compare import AXIS_NAME, Difference
from kdtr.contract import Stage

_AROUND = 3  # elements on each side of the divergence
_ROWS = 48  # told of a stage; of more, those that differ come first

Number = bool | int | float


@dataclass(frozen=True, slots=True)
class RowFare:
    """How one row of the stage fared.

    name   "row 2", or "layer 1, slot 14"
    wrong  elements that differ, or are out of bounds
    worst  largest error as a fraction of the row's bound; None: compared exactly
    """

    name: str
    wrong: int
    worst: float | None


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Elements of one row around a divergence.

    where     the row by name: "row 2, head 1"; "" for a stage of one axis
    axis      what `columns` number: "slot", "latent channel"
    columns   ascending indices of the last axis, which has `length` elements
    at        the divergence's own, one of `columns`
    expected  the truth there, and actual: what was judged, one for each column
    bound     the largest honest error of the row; None: compared exactly
    rows      of the stage, ascending; left_out more of them are not told
    """

    where: str
    axis: str
    columns: tuple[int, ...]
    at: int
    length: int
    expected: tuple[Number, ...]
    actual: tuple[Number, ...]
    bound: float | None
    rows: tuple[RowFare, ...]
    left_out: int = 0

    def wrong(self, i: int) -> bool:
        """Whether the element of columns[i] differs, or is out of bounds."""
        both = np.array(self.expected[i]), np.array(self.actual[i])
        bound = None if self.bound is None else np.array(self.bound)
        return bool(_wrong(*both, bound))


def excerpt(
    stage: Stage,
    expected: np.ndarray,
    actual: np.ndarray,
    difference: Difference,
    bound: np.ndarray | None,
) -> Excerpt | None:
    """Around the element that the difference names; None for a single number, and for a
    difference of shape or kind.

    bound  as compare_numeric takes it; None: compared exactly
    """
    index = difference.index
    if not index or len(index) != expected.ndim or actual.shape != expected.shape:
        return None
    within = None if bound is None else np.broadcast_to(bound, expected.shape)
    row, at = index[:-1], index[-1]
    length = expected.shape[-1]
    first = max(0, min(at - _AROUND, length - 2 * _AROUND - 1))
    columns = range(first, min(length, first + 2 * _AROUND + 1))
    rows, left_out = _fares(stage, expected, actual, within)
    names = [AXIS_NAME[letter] for letter in stage.axes]
    return Excerpt(
        where=", ".join(f"{name} {i}" for name, i in zip(names, row, strict=False)),
        axis=names[-1],
        columns=tuple(columns),
        at=at,
        length=length,
        expected=_plain(expected[row][columns.start : columns.stop]),
        actual=_plain(actual[row][columns.start : columns.stop]),
        bound=None if within is None else float(within[index]),
        rows=rows,
        left_out=left_out,
    )


def _fares(
    stage: Stage, expected: np.ndarray, actual: np.ndarray, bound: np.ndarray | None
) -> tuple[tuple[RowFare, ...], int]:
    """Of a stage with rows of more than one element."""
    if expected.ndim <= stage.row_axes:
        return (), 0
    shape = expected.shape[: stage.row_axes]
    wrong = _wrong(expected, actual, bound).reshape(*shape, -1).sum(axis=-1)
    worst = None if bound is None else _ratio(expected, actual, bound).reshape(*shape, -1).max(-1)
    places = list(np.ndindex(*shape))
    if len(places) > _ROWS:
        first = sorted(places, key=lambda place: wrong[place] == 0)[:_ROWS]  # stable
        places = sorted(first)
    names = [AXIS_NAME[letter] for letter in stage.axes]
    fares = tuple(
        RowFare(
            ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=False)),
            int(wrong[place]),
            None if worst is None else float(worst[place]),
        )
        for place in places
    )
    return fares, int(np.prod(shape, dtype=int)) - len(fares)


def _wrong(expected: np.ndarray, actual: np.ndarray, bound: np.ndarray | None) -> np.ndarray:
    if bound is None:
        return np.asarray(expected != actual)
    return _ratio(expected, actual, bound) > 1


def _ratio(expected: np.ndarray, actual: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Errors as fractions of the bound; inf where one of both is not finite and the other is."""
    shown = actual.astype(np.float64)
    truth = expected.astype(np.float64)
    same = (truth == shown) | (np.isnan(truth) & np.isnan(shown))
    with np.errstate(all="ignore"):
        ratio = np.abs(shown - truth) / bound
    return np.where(same, 0.0, np.where(np.isfinite(ratio), ratio, np.inf))


def _plain(values: np.ndarray) -> tuple[Number, ...]:
    exact: Sequence[Number] = (
        values if values.dtype.kind in "biu" else values.astype(np.float64)
    ).tolist()
    return tuple(exact)
