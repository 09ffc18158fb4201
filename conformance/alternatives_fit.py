"""Whether what an engine showed at a point fits a truth, and where it does not.

As the judge compares, but without findings, and only what a choice of experts can change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.compare import compare_form, compare_numeric
from kdtr.conformance.drive import Mode
from kdtr.conformance.near_tie import Decisions
from kdtr.conformance.noise_floor import PointNoise
from kdtr.contract import STAGE, ModelConfig, NumericProfile, Source, Stage, stage_order

Key = tuple[str, int | None]

_UNMOVED = (Source.BUILD, Source.JUDGE)  # of the draft, and of the engine against itself


@dataclass(frozen=True, slots=True)
class Misfit:
    """The first row that no rounding explains.

    order  of the stage, in the order of the computation
    index  the row: one number per row axis of the stage; (): a single number, or another shape
    worst  the largest error of the point over its bound; inf where no number is out of bounds
    """

    point: str
    order: int
    stage: Stage
    layer: int | None
    index: tuple[int, ...]
    worst: float


@dataclass(frozen=True, slots=True, eq=False)
class ShownPoint:
    """What an engine showed at one point, and what that is judged with."""

    point: str
    arrays: Mapping[Key, np.ndarray]
    noise: PointNoise
    mode: Mode
    config: ModelConfig
    profile: NumericProfile

    @property
    def shows_choices(self) -> bool:
        return any(name == "expert_ids" for name, _ in self.arrays)

    def decisions(self, expectation: Expectation) -> Decisions:
        """To tell near ties by (NUM-2)."""
        bonus = self.arrays.get(("bonus", None))
        return Decisions(
            expectation,
            self.config,
            self.profile,
            self.noise,
            logits=self.arrays.get(("logits", None)),
            bonus=None if bonus is None else int(bonus),
            router_scores={
                layer: array
                for (name, layer), array in self.arrays.items()
                if name == "router_scores" and layer is not None
            },
        )

    def misfit(self, expectation: Expectation) -> Misfit | None:
        """The first of the point, in the order of the computation; None: all of it fits."""
        first: Misfit | None = None
        worst = 0.0
        for misfit, ratio in self._compared(expectation):
            worst = max(worst, ratio)
            first = first or misfit
        return None if first is None else replace(first, worst=worst if worst > 1 else np.inf)

    def lack(self, misfit: Misfit, expectation: Expectation) -> np.ndarray:
        """How far a row is from an outcome, in bounds: within 1 it fits.

        Of numbers, every element's error. Of a token, by how much each of the others tops it,
        over the sum of two bounds. inf where it hangs on neither.
        """
        expected = expectation.get(misfit.stage.name, misfit.layer)
        actual = self.arrays[misfit.stage.name, misfit.layer]
        assert expected is not None
        if misfit.stage.exact:
            token = self._token(misfit, expectation, expected, actual)
            return np.array(np.inf) if token is None else self._topped(expectation, *token)
        if not misfit.index:
            return np.array(np.inf)
        bound = self.noise.bound(misfit.stage, misfit.layer, expected)[misfit.index]
        of_row, shown = expected[misfit.index], actual[misfit.index].astype(np.float64)
        error = np.where(of_row == shown, 0.0, np.inf)
        both = np.isfinite(of_row) & np.isfinite(shown)
        np.subtract(of_row, shown, out=error, where=both)
        ratio = np.where(error == 0, 0.0, np.inf)
        np.divide(error, bound, out=ratio, where=np.broadcast_to(bound > 0, error.shape))
        return ratio

    def _token(
        self, misfit: Misfit, expectation: Expectation, expected: np.ndarray, actual: np.ndarray
    ) -> tuple[int, int] | None:
        """The row and the token that a decision hangs on.

        Where targets are shown and fit, a walk that does not fit them is no matter of theirs.
        """
        if misfit.stage.name == "targets" and misfit.index:
            return misfit.index[0], int(actual[misfit.index])
        shows_targets = ("targets", None) in self.arrays and not self.mode.hides(STAGE["targets"])
        in_prompt = expectation.get("path") is None
        if shows_targets or (misfit.stage.name == "root" and not in_prompt):
            return None
        parted = self.decisions(expectation).parted(misfit.stage, expected, actual)
        return None if parted is None else (parted[0], parted[2])

    def _topped(self, expectation: Expectation, row: int, token: int) -> np.ndarray:
        logits = expectation.get("logits")
        assert logits is not None
        if not 0 <= token < self.config.vocab_size:
            return np.array(np.inf)
        allowed = 2 * self.noise.bound(STAGE["logits"], None, logits)[row]
        return np.asarray(np.maximum(logits[row] - logits[row, token], 0.0) / allowed)

    def _compared(self, expectation: Expectation) -> Iterator[tuple[Misfit | None, float]]:
        """Stage by stage: where it does not fit, and its largest error over its bound."""
        tied = False  # what hangs on a token's near tie is not compared, as in judge.py
        for order, (stage, layer) in enumerate(stage_order(self.config.num_hidden_layers)):
            expected = expectation.get(stage.name, layer)
            actual = self.arrays.get((stage.name, layer))
            if expected is None or actual is None or self.mode.hides(stage):
                continue
            if stage.source in _UNMOVED or (tied and stage.source is Source.WALK):
                continue
            index: tuple[int, ...] | None = None
            ratio = 0.0
            if compare_form(expected, actual) is not None:
                index = ()
            elif not stage.exact:
                bound = self.noise.bound(stage, layer, expected)
                compared = compare_numeric(expected, actual, bound, stage.row_axes)
                index = None if compared.difference is None else compared.difference.index
                ratio = compared.headroom or 0.0
            elif np.array_equal(expected, actual):
                continue
            elif self.decisions(expectation).near_tie(stage, layer, expected, actual) is None:
                index = tuple(int(i) for i in np.argwhere(expected != actual)[0])
            else:
                tied = tied or stage.source in (Source.WALK, Source.COMMIT)
                if tied and not self.mode.pinned:
                    return  # it went on elsewhere
                continue
            row = None if index is None else index[: stage.row_axes]
            misfit = None if row is None else Misfit(self.point, order, stage, layer, row, ratio)
            yield misfit, ratio
