"""The truth along the choices of experts of the engine that is judged (NUM-2).

A thin choice may fall either way. An engine that shows its choice is judged by what follows from
that. One that does not is judged by the record, and where it differs from that, by every outcome
that thin choices may have had (alternatives_search.py): what it showed so far must lie within the
bounds of one of them, and that one takes the record's place. So an excuse has a size, and a fault
in a row with a thin choice is seen. As long as nothing differs, nothing is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.conformance.alternatives_fit import ShownPoint
from kdtr.conformance.alternatives_reach import Reach
from kdtr.conformance.alternatives_search import Search, Spent, ThinChoice
from kdtr.conformance.alternatives_truth import AlternativeTruth, Choices, Place
from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.drive import Mode
from kdtr.conformance.noise_floor import CaseNoise
from kdtr.contract import ModelConfig

_TOLD = 3  # choices in one sentence


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether other choices of experts explain what was shown.

    found      whether some do
    other      the thin choices that fell otherwise, with what was chosen
    checked    False: there are more outcomes than were tried
    n_thin     thin choices in all that was shown so far
    tried      outcomes that were computed besides the one at hand
    nearest    the largest error over its bound in the nearest of them; inf: not known
    """

    found: bool
    other: tuple[tuple[ThinChoice, tuple[int, ...]], ...]
    checked: bool
    n_thin: int
    tried: int
    nearest: float

    def __str__(self) -> str:
        """If it was found: why. If all was tried: how far from it. Else: what was not checked."""
        if self.found:
            told = [_told(*one) for one in self.other[:_TOLD]]
            told += [f"and {len(self.other) - _TOLD} more"] if len(self.other) > _TOLD else []
            return f"an unseen choice of experts explains it: {'; '.join(told)}"
        if not self.checked:
            return f"not checked: {self.n_thin} thin choice{_s(self.n_thin)} of experts"
        if not self.tried:
            return "no thin choice of experts explains it"
        near = f", the nearest is out of bounds by {self.nearest:.3g} times"
        return (
            f"none of {self.tried} outcome{_s(self.tried)} of thin choices of experts explains it"
            f"{near if np.isfinite(self.nearest) else ''}"
        )


class Alternatives:
    """Of one case in one mode."""

    def __init__(
        self,
        config: ModelConfig,
        case: GoldenCase,
        noise: CaseNoise,
        mode: Mode,
        *,
        traced: bool,
    ) -> None:
        """traced: whether the engine shows stages."""
        self._case = case
        self._noise = noise
        self._mode = mode
        self._traced = traced
        self._n_layers = config.num_hidden_layers
        self._shown: dict[str, ShownPoint] = {}
        self._taken: dict[Place, tuple[int, ...]] = {}  # shown by the engine
        self._choices: Choices = {}  # these, and those that were found
        self._expectations: dict[str, Expectation] = {}  # by point, under these choices

    @property
    def guessed(self) -> bool:
        """Whether a search found choices, which others may explain as well."""
        return len(self._choices) > len(self._taken)

    def expectation(self, point: str) -> Expectation:
        """The record, or what takes its place: the same object until that changes."""
        if point not in self._expectations:
            golden = self._case.expectation(point)
            choices = self._choices
            self._expectations[point] = (
                self._truth().expectation(point, choices, self._mode) if choices else golden
            )
        return self._expectations[point]

    def look(self, shown: ShownPoint) -> None:
        """What the engine showed next. Where it shows its choices, there is nothing to search."""
        if not shown.shows_choices:
            self._shown[shown.point] = shown

    def _truth(self) -> AlternativeTruth:
        return self._noise.alternatives(traced=self._traced)

    def take(self, point: str, layer: int, ids: dict[int, tuple[int, ...]]) -> None:
        """The engine showed that it chose so, by row, and may."""
        self._taken.update({(point, layer, row): chosen for row, chosen in ids.items()})
        self._follow({**self._choices, **self._taken})

    def _follow(self, choices: Choices) -> None:
        self._choices = choices
        self._expectations.clear()

    def search(self) -> Answer:
        """Look for what explains all that was shown; if anything does, it holds from now on."""
        reach, points = Reach(self._case, self._n_layers), self._case.inputs.points()
        search = Search(self._truth(), reach, points, [*self._shown.values()])
        checked = True
        found: Choices | None = None
        try:
            found = search.run(self._choices)
            if found is None and self._choices != self._taken:
                found = search.run(self._taken)  # what was found before was something else
        except Spent:
            checked = False
        same = found is None or found == self._choices  # then they explain nothing more
        other: list[tuple[ThinChoice, tuple[int, ...]]] = []
        if not same:
            assert found is not None
            before = self._choices
            self._follow(found)
            other = [
                (search.listed[at, ids], ids)
                for at, ids in found.items()
                if (at, ids) in search.listed and before.get(at) != ids
            ]
        checked = checked and (search.complete or search.out_of_reach)
        n_thin = search.n_thin(self._choices)
        return Answer(not same, tuple(other), checked, n_thin, search.tried - 1, search.nearest)


def _told(thin: ThinChoice, chosen: tuple[int, ...]) -> str:
    point, layer, row = thin.place
    return (
        f"{point}, layer {layer}, row {row} took {_ids(chosen)} for {_ids(thin.now)}, which hangs "
        f"on {thin.gap:.2g}, less than {thin.bound:.2g}"
    )


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids))


def _s(n: int) -> str:
    return "" if n == 1 else "s"
