"""The search for thin choices of experts under which everything that was shown fits (NUM-2).

It starts at the first row that does not fit, with the thin choices that reach it
(alternatives_reach.py). Of each it learns the *effect*: by how much it moves that row alone. An
error beyond the bound and all effects together is out of reach, and nothing is left to try;
together they may move a row by TOGETHER times their sum, for they are not quite independent.
Otherwise the choice that leaves the smallest error is made, and the search goes on from there,
and if in vain, without it. Beyond MOST_OUTCOMES, or MOST_ROWS of the reference, it is given up; but
an error is out of reach, then too, if all thin choices together could not bring it about, each with
the largest effect that any had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.alternatives_fit import Misfit, ShownPoint
from kdtr.conformance.alternatives_reach import Reach
from kdtr.conformance.alternatives_truth import AlternativeTruth, Choices, Place
from kdtr.conformance.bundle import Expectation
from kdtr.conformance.near_tie import ThinRows, admissible_choices, thin_rows
from kdtr.contract import ModelConfig

MOST_OUTCOMES = 64
MOST_ROWS = 16_384
TOGETHER = 2.0

_Made = frozenset[tuple[Place, tuple[int, ...]]]
_Key = tuple[str, _Made]


@dataclass(frozen=True, slots=True)
class ThinChoice:
    """A choice of experts that may be another.

    now, others  the experts chosen in the outcome at hand, and what may be instead, best first
    gap, bound   the smaller their ratio, the likelier an engine chooses otherwise
    """

    place: Place
    now: tuple[int, ...]
    others: tuple[tuple[int, ...], ...]
    gap: float
    bound: float


class Spent(Exception):
    """There are more outcomes than may be tried."""


class Search:
    """One search over what was shown up to a point.

    tried     outcomes computed
    nearest   of those that do not fit, the smallest of the largest errors over their bounds
    listed    by what was tried where: the thin choice
    complete  False: a row had more admissible choices than are listed
    start     of the first misfit: the largest error in bounds, and the thin choices that reach it
    furthest  the largest effect that any choice had, in bounds
    """

    def __init__(
        self,
        truth: AlternativeTruth,
        reach: Reach,
        points: Sequence[str],
        shown: Sequence[ShownPoint],
    ) -> None:
        """points: all of the case, in order; shown: those up to the one that does not fit."""
        self._truth = truth
        self._reach = reach
        self._shown = shown
        self._at = {point: i for i, point in enumerate(points)}
        self._by_point = {one.point: one for one in shown}
        self._most_rows = truth.n_rows + MOST_ROWS
        self._expectations: dict[_Key, Expectation] = {}
        self._misfits: dict[_Key, Misfit | None] = {}
        self._measured: dict[tuple[Place, tuple[int, ...]], tuple[Choices, Choices]] = {}
        self._same: dict[_Made, Choices] = {}  # choices that others spell out, by those
        self.listed: dict[tuple[Place, tuple[int, ...]], ThinChoice] = {}
        self.tried = 0
        self.nearest = np.inf
        self.complete = True
        self.start: tuple[float, int] | None = None
        self.furthest = 0.0

    @property
    def out_of_reach(self) -> bool:
        """Whether choices that were not tried could not have brought about the first misfit."""
        if self.start is None or self.furthest == 0:
            return False
        error, n_thin = self.start
        return error > 1 + TOGETHER * n_thin * self.furthest

    def run(self, choices: Choices) -> Choices | None:
        """Choices under which all fits, the given ones among them, or None. Raises Spent."""
        try:
            return self._run(choices)
        except Spent:
            if self.out_of_reach:
                return None
            raise

    def _run(self, choices: Choices) -> Choices | None:
        misfit = self._misfit(choices)
        if misfit is None:
            return choices
        lack = self._lack(choices, misfit)
        if not np.isfinite(lack).all():
            return None  # no choice brings about what is not finite
        thin = self._thin(choices, misfit)
        if self.start is None:
            self.start = float(np.abs(lack).max(initial=0.0)), len(thin)
        left: list[tuple[float, float, ThinChoice, tuple[int, ...]]] = []
        together = np.zeros_like(lack)
        for one in thin:
            largest = np.zeros_like(lack)
            for ids in one.others:
                if (one.place, ids) not in self._measured:
                    other = {**choices, one.place: ids}
                    self.listed[one.place, ids] = one
                    self._measured[one.place, ids] = choices, other
                    if self._misfit(other) is None:
                        return other
                effect = self._effect(one.place, ids, misfit)
                largest = np.maximum(largest, np.abs(effect))
                self.furthest = max(self.furthest, float(np.abs(effect).max(initial=0.0)))
                error = float(np.abs(lack + effect).max(initial=0.0))
                left.append((error, one.gap / one.bound, one, ids))
            together += largest
        if not left or (np.abs(lack) > 1 + TOGETHER * together).any():
            return None
        _, _, one, ids = min(left, key=lambda entry: entry[:2])
        found = self._run({**choices, one.place: ids})
        if found is not None:
            return found
        kept = {**choices, one.place: one.now}
        self._same[frozenset(kept.items())] = choices
        return self._run(kept)

    def n_thin(self, choices: Choices) -> int:
        """All thin choices of an outcome, at every point that was shown."""
        return sum(
            int(rows.thin.sum())
            for shown in self._shown
            for layer in range(shown.config.num_hidden_layers)
            if (rows := thin_rows(self._expectation(shown.point, choices), layer, shown.noise))
        )

    def _misfit(self, choices: Choices) -> Misfit | None:
        """The first in what was shown, point by point; None: all of it fits."""
        fresh = False
        misfit: Misfit | None = None
        for shown in self._shown:
            key = self._key(shown.point, choices)
            if key not in self._misfits:
                if self.tried > MOST_OUTCOMES or self._truth.n_rows > self._most_rows:
                    raise Spent
                self._misfits[key] = shown.misfit(self._expectation(shown.point, choices))
                fresh = True
            misfit = self._misfits[key]
            if misfit is not None:
                break
        if fresh and self.tried and misfit is not None:
            self.nearest = min(self.nearest, misfit.worst)
        self.tried += fresh
        return misfit

    def _expectation(self, point: str, choices: Choices) -> Expectation:
        key = self._key(point, choices)
        if key not in self._expectations:
            mode = self._shown[0].mode
            self._expectations[key] = self._truth.expectation(point, self._as(choices), mode)
        return self._expectations[key]

    def _key(self, point: str, choices: Choices) -> _Key:
        """What the outcome at a point hangs on: the choices up to there."""
        until = self._at[point]
        items = self._as(choices).items()
        return point, frozenset(item for item in items if self._at[item[0][0]] <= until)

    def _as(self, choices: Choices) -> Choices:
        """Choices with the same outcome, which may have been computed already."""
        while (same := self._same.get(frozenset(choices.items()))) is not None:
            choices = same
        return choices

    def _lack(self, choices: Choices, misfit: Misfit) -> np.ndarray:
        """What a row lacks in an outcome, in bounds (alternatives_fit.py)."""
        shown = self._by_point[misfit.point]
        return shown.lack(misfit, self._expectation(misfit.point, choices))

    def _effect(self, place: Place, ids: tuple[int, ...], misfit: Misfit) -> np.ndarray:
        """By how much a choice alone moves what a row lacks; 0 where it lacks everything."""
        before, after = (self._lack(choices, misfit) for choices in self._measured[place, ids])
        finite = np.isfinite(before) & np.isfinite(after)
        return np.subtract(after, before, out=np.zeros_like(before), where=finite)

    def _thin(self, choices: Choices, misfit: Misfit) -> list[ThinChoice]:
        """The thin choices of an outcome that reach a misfit and are not made; thinnest first."""
        found = []
        for shown in self._shown:
            if self._at[shown.point] > self._at[misfit.point]:
                break
            expectation = self._expectation(shown.point, choices)
            for layer in range(shown.config.num_hidden_layers):
                rows = thin_rows(expectation, layer, shown.noise)
                if rows is None:
                    continue
                for row in np.flatnonzero(rows.thin).tolist():
                    place = (shown.point, layer, row)
                    if place in choices or not self._reach.reaches(place, misfit):
                        continue
                    found.append(self._thin_choice(expectation, place, rows, shown.config))
        return sorted(
            (one for one in found if one.others), key=lambda one: (one.gap / one.bound, one.place)
        )

    def _thin_choice(
        self, expectation: Expectation, place: Place, rows: ThinRows, config: ModelConfig
    ) -> ThinChoice:
        _, layer, row = place
        scores, chosen = (expectation.get(name, layer) for name in ("router_scores", "expert_ids"))
        assert scores is not None
        assert chosen is not None
        now = tuple(chosen[row].tolist())
        bound = float(rows.bound[row])
        biased = scores[row] + expectation.router_bias(layer)
        all_of_them = admissible_choices(config, biased, bound)
        self.complete &= all_of_them is not None
        others = tuple(ids for ids in all_of_them or () if ids != now)
        return ThinChoice(place, now, others, float(rows.gap[row]), bound)
