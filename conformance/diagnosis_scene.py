"""What a diagnosis looks at: one stage that differs, what was shown beside it, and guesses at why.

A guess is a sentence and the array that the stage would have if the sentence were true. How much
of the difference the array explains is the guess's fit; nothing is believed for its plausibility.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import frexp

import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.tree_rules import node_depths
from kdtr.contract import NO_LIMIT, EmitLimit, ModelConfig, Source, Stage

Key = tuple[str, int | None]

BY_CHANCE = 0.9  # the fit that a decision may claim: it can be the same for many reasons
FITS = 0.9  # of a difference in numbers: what explains less is not told
_SLACK = 2.0  # a guess is computed from the truth, the engine rounds: twice the bound of the truth
_BETTER = 0.25  # of the squared error that a guess may leave
ROUNDING = 2.0**-40  # of a scale: no engine computes more exactly than this


@dataclass(frozen=True, slots=True)
class Hint:
    """Why a finding looks as it does.

    says      one sentence, with numbers
    rules     ids that such an engine breaks
    fit       share of the difference that it explains; 1.0: every element. Below 1 too where it
              says no more than where the difference lies
    seen_in   the stage in which one would see it directly, where that was not shown
    """

    says: str
    rules: tuple[str, ...] = ()
    fit: float = 1.0
    seen_in: str = ""

    def __str__(self) -> str:
        fit = "fits every element" if self.fit >= 1 else f"fits {100 * self.fit:.0f}%"
        text = f"{self.says} ({', '.join((fit, *self.rules))})"
        return f"{text}; {self.would_tell()}" if self.seen_in else text

    def would_tell(self) -> str:
        """What to show to see it directly."""
        is_cache = self.seen_in.startswith("cache_")
        return f"{'snapshot()' if is_cache else f'the stage {self.seen_in}'} would tell"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A hint, and what it is ranked by after its fit.

    specific  0: says where; 1: a pattern; 2: a cause; 3: a cause that leaves nothing open
    residual  share of the squared error that it leaves
    """

    hint: Hint
    specific: int = 2
    residual: float = 0.0

    def key(self) -> tuple[float, int, float]:
        return (-round(self.hint.fit, 2), -self.specific, self.residual)


@dataclass(frozen=True, eq=False)
class Scene:
    """A stage that differs at one point of a case. All arrays but `actual` and `seen` are truth.

    expected     and actual: of equal shape, unless the form itself is wrong
    bound        of numeric stages: the largest honest error, with the axes within a row 1
    expectation  everything expected at the point; history: at the points before it, in order
    seen         the engine's observations at the point, by (stage, layer); seen_before: at the
                 point before
    limit        of the round (ACC-4)
    """

    stage: Stage
    layer: int | None
    expected: np.ndarray
    actual: np.ndarray
    expectation: Expectation
    config: ModelConfig
    bound: np.ndarray | None = None
    history: tuple[Expectation, ...] = ()
    seen: Mapping[Key, np.ndarray] = field(default_factory=dict)
    seen_before: Mapping[Key, np.ndarray] = field(default_factory=dict)
    limit: EmitLimit = NO_LIMIT

    def truth(self, name: str, layer: int | None = None) -> np.ndarray:
        array = self.expectation.get(name, layer)
        assert array is not None, f"{name} is recorded at every point"
        return array

    @cached_property
    def committed_len(self) -> int:
        """L before the point."""
        return int(self.truth("slots")[0])

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Of the tree; of a chunk, those of a chain."""
        parents = self.expectation.get("parents")
        if parents is None:
            return tuple(range(-1, len(self.truth("slots")) - 1))
        return tuple(int(parent) for parent in parents)

    @cached_property
    def is_chunk(self) -> bool:
        return self.expectation.get("parents") is None

    @cached_property
    def depth(self) -> np.ndarray:
        """Edges from the root [n]."""
        return np.array(node_depths(self.parents))

    @cached_property
    def path(self) -> tuple[int, ...]:
        """The nodes that are committed; of a chunk all."""
        path = self.expectation.get("path")
        return tuple(range(len(self.parents)) if path is None else (int(i) for i in path))

    @property
    def n(self) -> int:
        return len(self.parents)

    @property
    def same_form(self) -> bool:
        return self.actual.shape == self.expected.shape

    @property
    def point_before(self) -> str:
        """As in "round0"; of a scene with a history."""
        chunks = sum(one.get("parents") is None for one in self.history)
        rounds = len(self.history) - chunks
        return f"round{rounds - 1}" if rounds else f"chunk{chunks - 1}"

    @property
    def cache_was_shown(self) -> bool:
        """Whether there is a snapshot from the point before."""
        return ("cache_c_kv", None) in self.seen_before

    @property
    def cache_was_right(self) -> bool:
        """Whether that snapshot was compared, and so was right: a case may not record it there."""
        recorded = bool(self.history) and self.history[-1].get("cache_c_kv") is not None
        return self.cache_was_shown and recorded

    @property
    def relative_bound(self) -> float:
        """The bound as a fraction of the largest number; inf where there is none."""
        scale = np.abs(self.expected).max(initial=0.0, where=np.isfinite(self.expected))
        if self.bound is None or not scale:
            return np.inf
        return float(self.bound.max(initial=0.0) / scale)

    @cached_property
    def differs(self) -> np.ndarray:
        """Elements that are out of bounds, of the shape of `expected`."""
        return ~self.close(self.expected)

    @cached_property
    def numbers(self) -> np.ndarray:
        """`actual` as float64, for numeric stages."""
        return self.actual.astype(np.float64)

    @property
    def logits_were_right(self) -> bool:
        """Whether the logits behind a decision were shown: then they were right."""
        return self.stage.source is not Source.FORWARD and ("logits", None) in self.seen

    def close(self, predicted: np.ndarray) -> np.ndarray:
        """Elements of `actual` that are `predicted`, in as far as rounding lets one say so."""
        if self.stage.exact:
            return np.asarray(self.actual == predicted)
        actual = self.numbers
        finite = np.isfinite(actual) & np.isfinite(predicted)
        error = np.zeros(actual.shape)
        np.subtract(actual, predicted, out=error, where=finite)
        same = (actual == predicted) | (np.isnan(actual) & np.isnan(predicted))
        tolerance = self._tolerance(predicted)
        return np.where(finite, np.abs(error) <= tolerance, same)

    def _tolerance(self, predicted: np.ndarray) -> np.ndarray:
        """The bound, in proportion to what is predicted where that is larger than the truth."""
        within = tuple(range(self.stage.row_axes, self.expected.ndim))

        def scale(x: np.ndarray) -> np.ndarray:
            finite = np.where(np.isfinite(x), np.abs(x), 0.0)
            return np.asarray(finite.max(axis=within, keepdims=True, initial=0.0))

        right, guessed = scale(self.expected), scale(predicted)
        bound = np.zeros_like(right) if self.bound is None else self.bound
        relative = np.divide(bound, right, out=np.zeros_like(right), where=right > 0)
        other_scale = np.maximum(guessed, right) if predicted is not self.expected else right
        factor = 1.0 if predicted is self.expected else _SLACK
        # A row of zeros has no bound of its own: the others' is taken.
        relative = np.where(right > 0, relative, float(np.median(relative)))
        return factor * np.maximum(relative, ROUNDING) * other_scale


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """A sentence, and what the stage would hold if it were true."""

    says: str
    rules: tuple[str, ...]
    predicted: np.ndarray
    specific: int = 2


def weigh(scene: Scene, guess: Guess, *, most: float = 1.0, seen_in: str = "") -> Ranked | None:
    """The guess as a hint, if it explains the difference.

    Explained is an element that differs from the truth, or would by the guess, and is as guessed.
    most  the fit that the evidence may claim: a decision can be right by chance
    """
    predicted = np.asarray(guess.predicted)
    if predicted.shape != scene.actual.shape:
        return None
    if not scene.same_form:  # a wrong length: all or nothing
        if not np.array_equal(predicted, scene.actual):
            return None
        return Ranked(Hint(guess.says, guess.rules, most, seen_in), guess.specific)
    guessed = _differs(scene, predicted)
    concerned = scene.differs | guessed
    if not (concerned.any() and guessed.any()):
        return None
    right = scene.close(predicted)
    fit = float(right[concerned].mean())
    residual = _residual(scene, predicted, concerned)
    if not scene.stage.exact and np.isnan(scene.numbers).all():
        most = min(most, BY_CHANCE)  # NaN everywhere: many faults end so
    if fit < (1.0 if scene.stage.exact else FITS) or residual > _BETTER:
        return None
    return Ranked(Hint(guess.says, guess.rules, min(fit, most), seen_in), guess.specific, residual)


def _differs(scene: Scene, predicted: np.ndarray) -> np.ndarray:
    """Where the guess differs from the truth by more than rounding."""
    if scene.stage.exact:
        return np.asarray(predicted != scene.expected)
    finite = np.isfinite(predicted) & np.isfinite(scene.expected)
    error = np.zeros(predicted.shape)
    np.subtract(predicted, scene.expected, out=error, where=finite)
    bound = 0.0 if scene.bound is None else scene.bound
    same = (predicted == scene.expected) | (np.isnan(predicted) & np.isnan(scene.expected))
    return np.where(finite, np.abs(error) > bound, ~same)


def _residual(scene: Scene, predicted: np.ndarray, concerned: np.ndarray) -> float:
    """The squared error that the guess leaves, as a share of what it was."""
    if scene.stage.exact:
        return 0.0
    finite = concerned & np.isfinite(scene.numbers) & np.isfinite(predicted)
    finite &= np.isfinite(scene.expected)
    kept = [np.where(finite, x, 0.0) for x in (scene.expected, scene.numbers, predicted)]
    # An engine may show 1e300, which has no square; a power of two rounds nothing.
    scale = 2.0 ** (frexp(max(float(np.abs(x).max(initial=0.0)) for x in kept))[1] - 1)
    right, actual, guessed = (x / scale for x in kept)
    before = float(((actual - right) ** 2).sum())
    after = float(((actual - guessed) ** 2).sum())
    return after / before if before > 0 else 0.0
