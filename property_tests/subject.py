"""An engine under a law, and what "equal" means for it.

Bit for bit where the engine's profile declares it (NUM-4); otherwise within the sum of two bounds
of `kdtr.conformance.tolerance`, since both sides are the engine's own. A difference beyond that is
excused as a near tie only where the truth says that a choice was that thin (NUM-2).
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
from kdtr.conformance.tolerance import row_bound
from kdtr.contract import STAGE, Array, DraftTree, Engine, LogicalCache, Session, Stage
from kdtr.property_tests.strategies import MAX_LEN, SmallModel
from kdtr.property_tests.trees import picture
from kdtr.property_tests.watch import WatchedModel, WatchedSession, current
from kdtr.reference import make_engine
from kdtr.reference.moe import choice_gap
from kdtr.reference.weights import MoeWeights

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

    def numbers(
        self,
        what: str,
        stage: str,
        expected: np.ndarray,
        actual: np.ndarray,
        *,
        histories: Iterable[Sequence[int]],
    ) -> None:
        """Values of a stage; `histories` are the token sequences that they come from."""
        difference = self._difference(STAGE[stage], np.array(expected), np.array(actual))
        if difference is None:
            return
        if not self.subject.exact and any(
            routing_is_thin(self.subject, self.model, history) for history in histories
        ):
            _excuse("near tie of experts")
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
        if not self.subject.exact and (
            choice_is_thin(self.subject, self.model, history, expected, actual)
            or routing_is_thin(self.subject, self.model, history)
        ):
            _excuse("near tie of tokens")
        self._fail(f"{what} after {list(history)}: expected token {expected}, got {actual}")

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

    def _difference(
        self, stage: Stage, expected: np.ndarray, actual: np.ndarray
    ) -> Difference | None:
        self.same(f"shape of {stage.name}", expected.shape, actual.shape)
        if self.subject.exact:
            return different_bits(expected, actual)
        profile, config = self.subject.engine.info.profile, self.model.config
        expected = expected.astype(np.float64)
        bound = 2 * row_bound(stage, None, expected, config, profile)
        comparison = compare_numeric(expected, actual, bound, stage.row_axes)
        example = current()
        if example is not None and comparison.headroom is not None:
            example.saw_error(stage.name, comparison.headroom)
        return comparison.difference

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


# Near ties, asked of the truth and only after a difference


def choice_is_thin(
    subject: Subject, model: SmallModel, history: Sequence[int], one: int, other: int
) -> bool:
    """Whether two tokens after `history` lie closer than the engine's bounds (NUM-2)."""
    truth = plain_logits(Subject("truth", make_engine()), model, history)
    config, profile = model.config, subject.engine.info.profile
    bound = row_bound(STAGE["logits"], None, truth[None], config, profile)[0, 0]
    return bool(abs(truth[one] - truth[other]) <= 2 * bound)


def routing_is_thin(subject: Subject, model: SmallModel, history: Sequence[int]) -> bool:
    """Whether a choice of experts along `history` lies within the engine's bounds (NUM-2)."""
    config, profile = model.config, subject.engine.info.profile
    truth = make_engine().load((config, model.tensors()))
    thin = False

    def trace(stage: str, layer: int | None, array: Array, /) -> None:
        nonlocal thin
        if stage == "router_scores":
            assert layer is not None
            moe = truth.weights.layers[layer].mlp
            assert isinstance(moe, MoeWeights)
            bound = row_bound(STAGE[stage], layer, array, config, profile)[:, 0]
            thin = thin or bool((choice_gap(config, array, moe.bias) <= bound).any())

    truth.open(max_len=MAX_LEN).prefill(history, trace=trace)
    return thin
