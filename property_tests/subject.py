"""An engine under a law, and what "equal" means for it.

Bit for bit where the engine's profile declares it (NUM-4); otherwise within the sum of two bounds
(`rounding.py`), since both sides are the engine's own. A difference beyond that is excused as a
near tie only where the truth says that a choice was that thin (NUM-2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from hypothesis import event, reject
from hypothesis.vendor.pretty import RepresentationPrinter

from kdtr.conformance.compare import Difference, compare_numeric
from kdtr.conformance.engine_loader import load_engine
from kdtr.contract import (
    STAGE,
    Array,
    DraftTree,
    Engine,
    LogicalCache,
    NumericProfile,
    Session,
    Stage,
)
from kdtr.property_tests.rounding import Rounding, rounding, stored_once
from kdtr.property_tests.strategies import MAX_LEN, SmallModel
from kdtr.property_tests.trees import picture
from kdtr.property_tests.watch import WatchedModel, WatchedSession, current

REFERENCE = "kdtr.reference:make_engine"
HOST = "kdtr.engine:make_engine"


@dataclass(frozen=True, slots=True)
class Subject:
    """An engine by name and options, loaded; its sessions are watched (`watch.py`)."""

    label: str
    engine: Engine
    name: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(self.label)

    @property
    def exact(self) -> bool:
        """Whether laws between different calls hold bit for bit."""
        profile = self.engine.info.profile
        return profile.deterministic and profile.batch_invariant

    def offers(self, *verbs: str) -> bool:
        """Whether it has these verbs: for laws that can do without them."""
        return self.engine.info.verbs.issuperset(verbs)

    def load(self, model: SmallModel) -> WatchedModel:
        """Loaded once in an example: its sessions live in one model, as in production."""
        example = current()
        if example is None:
            loaded = self.engine.load((model.config, model.tensors()))
        else:
            loaded = example.model(self.engine, model)
        return WatchedModel(self.label, self.engine.info.verbs, loaded, model)

    def open(self, model: SmallModel, *, max_len: int = MAX_LEN) -> WatchedSession:
        return self.load(model).open(max_len=max_len)

    def committed(
        self, model: SmallModel, tokens: Sequence[int], *, max_len: int = MAX_LEN
    ) -> WatchedSession:
        """A session with these tokens in its cache; none is a session as it opens."""
        session = self.open(model, max_len=max_len)
        if tokens:
            session.prefill(tokens)
        return session


def load_subject(label: str, name: str, options: Mapping[str, Any] | None = None) -> Subject:
    options = dict(options or {})
    return Subject(label, load_engine(name, options), name, tuple(options.items()))


def causal_rows(session: Session, tokens: Sequence[int]) -> np.ndarray:
    """Logits [n, w] of these tokens behind the committed ones, by the plain causal forward."""
    n, committed_len = len(tokens), session.committed_len
    positions = committed_len + np.arange(n)
    mask = np.tri(n, committed_len + n, committed_len, dtype=bool)
    return np.array(session.forward_tokens(tokens, positions, mask))


def plain_logits(subject: Subject, model: SmallModel, tokens: Sequence[int]) -> np.ndarray:
    """The last row [w] of a plain causal run over the tokens, from an empty cache."""
    return causal_rows(subject.open(model), tokens)[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What an engine shows of one row.

    logits  [w], or None where it shows the token alone
    """

    logits: np.ndarray | None
    target: int


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
        if not self.model.is_poisoned:  # equal NaN on both sides would be equal
            self.same(f"{what}: numbers expected to be NaN", 0, int(np.isnan(expected).sum()))
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
        """Tokens emitted after the prompt, one by one."""
        self.same(f"{what}, number of tokens", len(expected), len(actual))
        for k, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            self.target(f"{what}, token {k}", wanted, got, history=[*prompt, *expected[:k]])

    def same(self, what: str, expected: object, actual: object) -> None:
        """Anything that is compared exactly (NUM-2)."""
        if expected != actual:
            self._fail(f"{what}: expected {expected}, got {actual}")

    def same_answers(self, what: str, expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
        """The same call, twice (NUM-4): the same bits, whatever the engine's precision."""
        self.same(f"{what}, targets", [a.target for a in expected], [a.target for a in actual])
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
            if one.logits is not None and other.logits is not None:
                self.same(f"{what}, row {i}", None, different_bits(one.logits, other.logits))

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
        once = stored_once(self.profile, stage, expected)
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

    @property
    def profile(self) -> NumericProfile:
        return self.subject.engine.info.profile

    def _rounding(self, history: Sequence[int]) -> Rounding:
        return rounding(self.profile, self.model, tuple(history))

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


# Near ties, asked of the truth and only after a difference


def choice_is_thin(run: Rounding, one: int, other: int) -> bool:
    """Whether two tokens after the run's history lie closer than two bounds (NUM-2)."""
    truth, bound = run.truth["logits", None][-1], run.bound("logits")[-1, 0]
    return bool(abs(truth[one] - truth[other]) <= 2 * bound)


def cumulative(logits: np.ndarray, temperature: float) -> np.ndarray:
    """The distribution function [w] of softmax(logits / temperature), in float64."""
    scaled = logits.astype(np.float64) / temperature
    e = np.exp(scaled - scaled.max())
    return np.cumsum(e / e.sum())


def draw_is_thin(run: Rounding, uniform: float, temperature: float, low: int, high: int) -> bool:
    """Whether every edge between two tokens lies where rounding may carry it over the uniform.

    Logits that are off by at most b move a probability by a factor of at most exp(2 b / T), and
    with it a sum of probabilities, which is at most 1, by at most exp(2 b / T) - 1.
    """
    truth, bound = run.truth["logits", None][-1], run.bound("logits")[-1, 0]
    edges = cumulative(truth, temperature)[low:high]
    return bool((abs(edges - uniform) <= np.expm1(2 * bound / temperature)).all())
