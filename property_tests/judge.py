"""What "equal" means for an engine under a law.

Bit for bit where the engine's profile declares it (NUM-4), and within one session before and after
a call that may change nothing. Otherwise within the sum of two bounds (`rounding.py`), since both
sides are the engine's own. A difference beyond that is excused as a near tie only where the truth
says that a choice was that thin (NUM-2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from hypothesis import event, reject

from kdtr.conformance.compare import Difference, compare_numeric
from kdtr.contract import STAGE, Array, DraftTree, LogicalCache, Stage
from kdtr.property_tests.near_ties import choice_is_thin, draw_is_thin
from kdtr.property_tests.rounding import Rounding, rounding, stored_once
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.subject import Answer, Subject
from kdtr.property_tests.trees import picture
from kdtr.property_tests.watch import current


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds what an engine shows against what the law expects, and says where it is not so.

    scene  what to show of a failure: the tree as text, say
    """

    subject: Subject
    model: SmallModel
    scene: Callable[[], str] = field(default=lambda: "")

    def row(
        self, what: str, expected: np.ndarray, actual: np.ndarray, *, history: Sequence[int]
    ) -> None:
        """Logits [w] of the last token of `history`."""
        self.numbers(what, "logits", expected[None], actual[None], histories=[history])

    def answer(
        self, what: str, expected: Answer, actual: Answer, *, history: Sequence[int]
    ) -> None:
        """The row behind `history`: its logits, where both sides show them, and its token."""
        if expected.logits is not None and actual.logits is not None:
            self.row(what, expected.logits, actual.logits, history=history)
        self.target(what, expected.target, actual.target, history=history)

    def numbers(
        self,
        what: str,
        stage: str,
        expected: np.ndarray,
        actual: np.ndarray,
        *,
        histories: Iterable[Sequence[int]],
        to_rounding: bool = False,
        bounds: int = 2,
    ) -> None:
        """Values of a stage; `histories` are the token sequences that they come from.

        to_rounding  the law itself holds to rounding alone: no engine owes it the same bits
        bounds       how many of the two sides are the engine's, and off by a bound each
        """
        expected, actual = np.array(expected), np.array(actual)
        self.same(f"shape of {stage}", expected.shape, actual.shape)
        self._no_nan(what, expected)
        if self.subject.exact and not to_rounding:
            difference = different_bits(expected, actual)
        else:
            difference = self._beyond(STAGE[stage], expected, actual, list(histories), bounds)
        if difference is not None:
            self._fail(
                f"{what}: {difference.summary} at {stage}{list(difference.index)}; expected "
                f"{difference.expected}, got {difference.actual}"
            )

    def cache(self, what: str, expected: LogicalCache, actual: LogicalCache) -> None:
        """Two logical caches (COMMIT-3)."""
        self.same(f"{what}, tokens", expected.tokens.tolist(), actual.tokens.tolist())
        self.same(f"{what}, positions", expected.positions.tolist(), actual.positions.tolist())
        history = expected.tokens.tolist()
        for stage in ("c_kv", "k_pe"):
            self.numbers(
                what,
                f"cache_{stage}",
                getattr(expected, stage),
                getattr(actual, stage),
                histories=[history] if history else [],
            )

    def repeated_cache(self, what: str, expected: LogicalCache, actual: LogicalCache) -> None:
        """Two logical caches that the same calls left in two sessions: the same bits where the
        engine declares determinism (NUM-4)."""
        if self.subject.deterministic:
            self.same_cache(what, expected, actual)
        else:
            self.cache(what, expected, actual)

    def same_cache(
        self, what: str, expected: LogicalCache | None, actual: LogicalCache | None
    ) -> None:
        """The rows of one session before and after, to the last bit, as far as they are shown."""
        if expected is None or actual is None:
            return
        for name in ("tokens", "positions", "c_kv", "k_pe"):
            difference = different_bits(getattr(expected, name), getattr(actual, name))
            self.same(f"{what}, {name}", None, difference)

    def target(self, what: str, expected: int, actual: int, *, history: Sequence[int]) -> None:
        """A token chosen after `history`, which the engine may only miss by a near tie."""
        if expected == actual:
            return
        if not self.subject.exact:
            run = self._rounding(history)
            if choice_is_thin(run, expected, actual) or run.routing_is_thin:
                _excuse("near tie of tokens")
        self._fail(f"{what} after {list(history)}: expected token {expected}, got {actual}")

    def draw(
        self,
        what: str,
        expected: int,
        actual: int,
        *,
        uniform: float,
        temperature: float,
        history: Sequence[int],
    ) -> None:
        """A token drawn after `history` (ACC-5); it may differ where the uniform is at an edge."""
        if expected == actual:
            return
        tokens = sorted((expected, actual))
        if not self.subject.exact:
            run = self._rounding(history)
            if draw_is_thin(run, uniform, temperature, *tokens) or run.routing_is_thin:
                _excuse("near tie of a draw")
        self._fail(
            f"{what} after {list(history)}, uniform {uniform}, temperature {temperature}: "
            f"expected token {expected}, got {actual}"
        )

    def continuation(
        self, what: str, prompt: Sequence[int], expected: Sequence[int], actual: Sequence[int]
    ) -> None:
        """Tokens emitted after the prompt, one by one; a near tie may end either side's walk."""
        for k, (wanted, got) in enumerate(zip(expected, actual, strict=False)):
            self.target(f"{what}, token {k}", wanted, got, history=[*prompt, *expected[:k]])
        self.same(f"{what}, number of tokens", len(expected), len(actual))

    def same(self, what: str, expected: object, actual: object) -> None:
        """Anything that is compared exactly (NUM-2)."""
        if expected != actual:
            self._fail(f"{what}: expected {expected}, got {actual}")

    def same_answers(self, what: str, expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
        """The same call, twice (NUM-4): the same bits, whatever the engine's precision."""
        self.same(f"{what}, targets", [a.target for a in expected], [a.target for a in actual])
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
            if one.logits is not None and other.logits is not None:
                self._no_nan(f"{what}, row {i}", one.logits)
                self.same(f"{what}, row {i}", None, different_bits(one.logits, other.logits))

    def _no_nan(self, what: str, expected: np.ndarray) -> None:
        """NaN on both sides would be equal: only a poisoned model has some by right."""
        if not self.model.is_poisoned:
            self.same(f"{what}: numbers expected to be NaN", 0, int(np.isnan(expected).sum()))

    def _beyond(
        self,
        stage: Stage,
        expected: np.ndarray,
        actual: np.ndarray,
        histories: Sequence[Sequence[int]],
        bounds: int,
    ) -> Difference | None:
        """A difference beyond so many bounds, that no thin choice of experts excuses."""
        expected = expected.astype(np.float64)
        once = stored_once(self.subject.profile, stage, expected, bounds)
        if compare_numeric(expected, actual, once, stage.row_axes).difference is None:
            return None
        runs = [self._rounding(history) for history in histories]
        bound = bounds * _bound_of(stage, runs)
        comparison = compare_numeric(expected, actual, bound, stage.row_axes)
        example = current()
        if example is not None and comparison.headroom is not None:
            example.saw_error(stage.name, comparison.headroom)
        if comparison.difference is not None and any(run.routing_is_thin for run in runs):
            _excuse("near tie of experts")
        return comparison.difference

    def _rounding(self, history: Sequence[int]) -> Rounding:
        """Of the declared model: all bounds and near ties come from here."""
        return rounding(self.subject.profile, self.subject.as_declared(self.model), tuple(history))

    def _fail(self, text: str) -> NoReturn:
        shown = self.scene()
        raise AssertionError(f"{self.subject.label}: {text}" + (f"\n{shown}" if shown else ""))


def _excuse(why: str) -> NoReturn:
    """End the example: what differs may be a choice that rounding makes."""
    event(why)
    example = current()
    if example is not None:
        example.excuse = why
    reject()


def different_bits(expected: Array, actual: Array) -> Difference | None:
    """The first element that is not the same to the last bit, NaN and the sign of zero included."""
    left, right = np.ascontiguousarray(expected), np.ascontiguousarray(actual)
    if left.dtype == right.dtype and left.shape == right.shape:
        size = left.dtype.itemsize
        bytes_differ = left.view(np.uint8) != right.view(np.uint8)
        wrong = np.argwhere(bytes_differ.reshape(*left.shape, size).any(axis=-1))
        if not len(wrong):
            return None
        index = tuple(int(i) for i in wrong[0])
        return Difference(
            f"{len(wrong)} of {left.size} differ in their bits",
            index,
            repr(left[index].item()),
            repr(right[index].item()),
        )
    return Difference(
        "another array", (), f"{left.dtype} {left.shape}", f"{right.dtype} {right.shape}"
    )


def tree_scene(tree: DraftTree, *rows: int) -> Callable[[], str]:
    """For a judge: the tree as text, with these rows marked."""
    return lambda: picture(tree, rows)


def _bound_of(stage: Stage, runs: Sequence[Rounding]) -> np.ndarray:
    """Of logits, the last row of each run; of a cache, the one run's own rows."""
    if stage.name == "logits":
        return np.concatenate([run.bound(stage.name)[-1:] for run in runs])
    (run,) = runs
    return run.bound(stage.name)
