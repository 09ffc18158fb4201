"""What rows saw, in words: for a difference that no known pattern explains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.xray_fit import Precision, log_bound
from kdtr.conformance.xray_models import FILLER, AttentionXray
from kdtr.conformance.xray_optics import Lenses
from kdtr.conformance.xray_reading import Reading
from kdtr.conformance.xray_replay import Cell, SeenRow, path_to


@dataclass(frozen=True, slots=True)
class Seen:
    """One row, decoded.

    counts     rows seen per token; 1 where that is no whole number
    uncounted  tokens seen in no whole number of rows: their weight is wrong, not their visibility
    distances  p_query - p_key of tokens seen once, where the lenses tell it from all others
    zero_rows  rows that took a share of the attention and hold no token
    """

    counts: dict[int, int]
    distances: dict[int, int]
    zero_rows: int
    uncounted: frozenset[int] = frozenset()


def decode(
    reading: Reading,
    own: int,
    model: AttentionXray,
    lenses: Lenses,
    precision: Precision,
    highest: int,
    layer: int = 0,
) -> Seen:
    """What the row with token `own` saw in a layer; the row itself is the unit."""
    plain = _plain_lens(model, layer)
    weights = reading.weights[plain]
    unit = weights[own] if weights[own] > 0 else weights[weights > 0].min(initial=1.0)
    bound = float(log_bound(model, lenses, precision, highest)[plain])
    off = 2 * bound + 2 * reading.noise / unit
    whole = {int(t): _count(weights[t] / unit, off) for t in np.flatnonzero(weights > 0)}
    counts = {token: count or 1 for token, count in whole.items()}
    uncounted = frozenset(token for token, count in whole.items() if not count)
    n = round(1 / unit)
    zero_rows = max(0, n - sum(counts.values())) if weights.sum() < 1 - 0.5 / max(n, 1) else 0
    distances = {}
    if weights[own] > 0:
        for token, count in counts.items():
            if count == 1 and token not in (own, FILLER):
                found = distance(reading, own, token, model, lenses, precision, highest, layer)
                if found is not None:
                    distances[token] = found
    return Seen(counts, distances, zero_rows, uncounted)


def _count(ratio: float, off: float) -> int:
    """Rows; 0 for what is no whole number of rows.

    off  how far honest rounding may take the ratio from it, as a share
    """
    whole = max(1, round(ratio))
    return whole if abs(ratio - whole) < min(0.2 * whole**0.5, off * whole) else 0


def distance(
    reading: Reading,
    own: int,
    token: int,
    model: AttentionXray,
    lenses: Lenses,
    precision: Precision,
    highest: int,
    layer: int = 0,
) -> int | None:
    """p_query - p_key of a token that was seen once, or None: no distance fits, or several do."""
    of = [b for b, lens in enumerate(model.lenses) if lens.layer == layer and lens.pair is not None]
    if not of or not (reading.weights[of][:, [own, token]] > 0).all():
        return None
    bound = log_bound(model, lenses, precision, highest)[of]
    seen = np.log(reading.weights[of, token] / reading.weights[of, own])
    candidates = np.arange(-highest, highest + 1)
    scores = lenses.scores(np.full(len(candidates), token), candidates)[of]
    unit = lenses.scores(np.array([own]), np.array([0]))[of]
    fits = (np.abs(scores - unit - seen[:, None]) <= bound[:, None]).all(axis=0)
    return int(candidates[fits][0]) if fits.sum() == 1 else None


def distance_range(model: AttentionXray, lenses: Lenses, precision: Precision) -> int:
    """The largest R such that all distances -R..R are told apart, in layer 0."""
    of = [b for b, lens in enumerate(model.lenses) if lens.layer == 0 and lens.pair is not None]
    if not of:
        return 0
    d = np.arange(-600, 601)
    scores = lenses.scores(np.zeros(len(d), int), d)[of]  # [lenses, d]
    bound = log_bound(model, lenses, precision, 600)[of]
    apart = (np.abs(scores[:, :, None] - scores[:, None]) > 2 * bound[:, None, None]).any(axis=0)
    np.fill_diagonal(apart, True)
    for r in range(1, 601):
        if not apart[600 - r : 601 + r, 600 - r : 601 + r].all():
            return r - 1
    return 600


def row_name(row: int, parents: Sequence[int]) -> str:
    """`row 5 (path 0-2-5)`."""
    return f"row {row} (path {'-'.join(map(str, path_to(parents, row)))})"


def visibility_words(seen: Seen, wanted: SeenRow, known: dict[int, Cell]) -> tuple[str, str]:
    """(what it also saw, what it did not see), each empty if nothing; `known` by token."""
    expected: dict[int, int] = {}
    for cell in wanted.visible:
        expected[cell.token] = expected.get(cell.token, 0) + 1
    counts = seen.counts | {t: expected[t] for t in seen.uncounted if t in expected}
    extra = [
        _cell_name(token, known, counts[token] - expected.get(token, 0))
        + " again" * (token in expected)
        for token in counts
        if counts[token] > expected.get(token, 0)
    ]
    if seen.zero_rows:
        extra.append(f"{seen.zero_rows} row{'s' * (seen.zero_rows > 1)} without a token")
    missing = [
        _cell_name(token, known, count - counts.get(token, 0))
        for token, count in expected.items()
        if count > counts.get(token, 0)
    ]
    return _listed(extra), _listed(missing)


def position_words(seen: Seen, wanted: SeenRow, length: int) -> list[str]:
    """What was rotated otherwise: the row itself, if all distances agree, or the cells it saw."""
    shifts = {}
    for cell in wanted.visible:
        found = seen.distances.get(cell.token)
        if found is not None:
            shifts[cell] = found - (wanted.own.position - cell.position)
    off = {cell: shift for cell, shift in shifts.items() if shift}
    if not off:
        return []
    prefix = [shift for cell, shift in shifts.items() if cell.name.startswith("slot")]
    own = prefix[0] if prefix and len(set(prefix)) == 1 else 0
    words = []
    if own:
        words.append(_rotated(wanted.own, wanted.own.position + own, length))
    for cell, shift in shifts.items():
        if shift != own:
            words.append(_rotated(cell, cell.position + own - shift, length))
    return words


def _rotated(cell: Cell, position: int, length: int) -> str:
    if cell.name.startswith("node"):
        return (
            f"{cell.name} was rotated at {_from_length(position - length)}, should be "
            f"{_from_length(cell.position - length)}"
        )
    return f"{cell.name} was rotated at {position}, should be {cell.position}"


def _from_length(offset: int) -> str:
    return f"L{offset:+d}" if offset else "L"


def _cell_name(token: int, known: dict[int, Cell], count: int) -> str:
    name = known[token].name if token in known else f"token {token}, which was never fed"
    if token == FILLER:
        name = "the filler"
    return f"{name} ({count} times)" if count > 1 else name


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def _plain_lens(model: AttentionXray, layer: int) -> int:
    return next(
        b
        for b, lens in enumerate(model.lenses)
        if lens.layer == layer and lens.pair is None and lens.mark is None
    )
