"""Comparing one stage of one point: exactly, or within bounds, with named coordinates."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.contract import Stage

# What the letters of a stage's axes number (contract/stages.py).
AXIS_NAME = {
    "n": "row",
    "s": "slot",
    "h": "head",
    "d": "nope channel",
    "r": "rope channel",
    "c": "latent channel",
    "m": "hidden channel",
    "e": "expert",
    "k": "choice",
    "w": "token",
    "a": "path node",
    "l": "layer",
    "t": "slot",
    "2": "side",
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where and how a stage differs first.

    index   of the element, one number per axis
    ratio   error / bound of a numeric stage; inf where the pattern of inf or NaN differs
    """

    summary: str
    index: tuple[int, ...]
    expected: str
    actual: str
    ratio: float = float("inf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The first difference, or none, and the largest error / bound seen."""

    difference: Difference | None
    headroom: float | None = None


def compare_form(expected: np.ndarray, actual: np.ndarray) -> Difference | None:
    """A difference in shape, before any value is compared."""
    if actual.shape == expected.shape:
        return None
    if expected.ndim == 1 and expected.size <= 32 and actual.size <= 32:
        return Difference("wrong length", (), str(expected.tolist()), str(actual.tolist()))
    return Difference("wrong shape", (), str(list(expected.shape)), str(list(actual.shape)))


def compare_exact(expected: np.ndarray, actual: np.ndarray) -> Comparison:
    """Integers and booleans of equal shape: the first element that differs, in row order."""
    wrong = np.argwhere(expected != actual)
    if not len(wrong):
        return Comparison(None)
    index = tuple(int(i) for i in wrong[0])
    summary = f"{len(wrong)} of {expected.size} differ" if expected.ndim else "differs"
    return Comparison(Difference(summary, index, str(expected[index]), str(actual[index])))


def compare_numeric(
    expected: np.ndarray, actual: np.ndarray, bound: np.ndarray, row_axes: int
) -> Comparison:
    """Numbers of equal shape: equal inf and NaN patterns first, then every row in its bound.

    bound  broadcasts against expected; its first `row_axes` axes number the rows
    Of the first row out of bounds, the worst element is named.
    """
    actual = actual.astype(np.float64)
    pattern = np.argwhere(~_same_pattern(expected, actual))
    if len(pattern):
        index = tuple(int(i) for i in pattern[0])
        summary = f"{len(pattern)} of {expected.size} differ in being finite"
        return Comparison(
            Difference(summary, index, _number(expected[index]), _number(actual[index]))
        )
    error = np.zeros(expected.shape)
    with np.errstate(over="ignore"):  # an engine may show 1e308: that is inf times its bound
        np.subtract(actual, expected, out=error, where=np.isfinite(expected))
        error = np.abs(error)
        # A bound of 0 (a row of zeros) allows no error at all.
        ratio = np.where(error > 0, np.inf, 0.0)
        np.divide(error, bound, out=ratio, where=np.broadcast_to(bound > 0, error.shape))
    headroom = float(ratio.max(initial=0.0))
    if headroom <= 1:
        return Comparison(None, headroom)
    out = np.argwhere(ratio > 1)
    row = tuple(int(i) for i in out[0][:row_axes])
    within = np.unravel_index(int(ratio[row].argmax()), ratio[row].shape)
    index = (*row, *(int(i) for i in within))
    own = float(ratio[index])
    summary = f"{len(out)} of {expected.size} out of bounds, the first row by {own:.3g} times"
    if headroom > own:
        worst = np.unravel_index(int(ratio.argmax()), ratio.shape)[:row_axes]
        names = ("row",) if row_axes == 1 else ("layer", "slot")
        at = ", ".join(f"{name} {i}" for name, i in zip(names, worst, strict=True))
        summary += f", the worst ({at}) by {headroom:.3g} times"
    return Comparison(
        Difference(
            summary,
            index,
            f"{_number(expected[index])} within {float(bound[row].max()):.2g}",
            f"{_number(actual[index])}, off by {float(error[index]):.3g}",
            own,
        ),
        headroom,
    )


def coordinates(
    stage: Stage, layer: int | None, index: tuple[int, ...], parents: tuple[int, ...] | None
) -> str:
    """The element by name: "layer 2, row 3 (path 0-2-3), head 1, slot 14"."""
    parts = [] if layer is None else [f"layer {layer}"]
    for letter, i in zip(stage.axes, index, strict=True):
        part = f"{AXIS_NAME[letter]} {i}"
        if letter == "n" and parents is not None:
            part += f" (path {'-'.join(map(str, _path(parents, i)))})"
        if letter == "2":
            part = ("source", "destination")[i]
        parts.append(part)
    return ", ".join(parts)


def _path(parents: tuple[int, ...], i: int) -> list[int]:
    nodes = [i]
    while parents[nodes[0]] >= 0:
        nodes.insert(0, parents[nodes[0]])
    return nodes


def _same_pattern(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    both_finite = np.isfinite(expected) & np.isfinite(actual)
    return both_finite | (expected == actual) | (np.isnan(expected) & np.isnan(actual))


def _number(x: np.floating) -> str:
    return f"{float(x):.9g}"
