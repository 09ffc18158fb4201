"""An example of a law, watched: which engines it opened, what it asked of them, how it ended.

Every session that a law opens is wrapped. The wrapper counts draft trees and rows by shape, skips
the law by the verb's name where the engine has none, and keeps what was played, so that a failed
example can be recorded as a golden case (`failure_case.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pytest
from hypothesis import target
from hypothesis.errors import UnsatisfiedAssumption

from kdtr.contract import VERBS, Acceptance, DraftTree, Model, Session, Verified
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.trees import depth, shape_class

# How an example ended.
HELD = "held"
EXCUSED = "excused"  # it differed where a choice is a near tie (NUM-2)
DISCARDED = "discarded"  # the law does not speak of what was drawn
FAILED = "failed"
SKIPPED = "skipped"  # the engine lacks what the law needs

# What was played on a session: a verb with what it took, or what it was given back.
Event = tuple[str, Any]


@dataclass(slots=True)
class Played:
    """A session's life: `events` are (verb, tokens | token | tree | acceptance), in order."""

    model: SmallModel
    max_len: int
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class Example:
    """One run of a law's body.

    played     every session it opened, in order
    trees      draft trees verified, by shape class
    rows       rows of these trees, by shape class
    deepest    edges from the root of the deepest tree
    widest     most siblings in a tree
    scattered  commits of a path that is not a prefix of the node list
    headroom   per stage, the largest error seen as a fraction of its bound
    excuse     why a difference was let pass, or ""
    verdict    HELD, EXCUSED, DISCARDED, FAILED, SKIPPED; "" while it runs
    """

    law: str
    played: list[Played] = field(default_factory=list)
    trees: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    deepest: int = 0
    widest: int = 0
    scattered: int = 0
    headroom: dict[str, float] = field(default_factory=dict)
    excuse: str = ""
    verdict: str = ""
    _open: list[Any] = field(default_factory=list)
    _models: dict[tuple[int, SmallModel], Any] = field(default_factory=dict)

    def model(self, subject: Any, model: SmallModel) -> Any:
        """The engine's model for this example: loaded once, shared by the example's sessions."""
        key = (id(subject), model)
        if key not in self._models:
            self._models[key] = subject.load((model.config, model.tensors()))
        return self._models[key]

    def saw_tree(self, tree: DraftTree) -> None:
        shape = shape_class(tree)
        self.trees[shape] += 1
        self.rows[shape] += len(tree)
        self.deepest = max(self.deepest, depth(tree))
        self.widest = max(self.widest, *Counter(tree.parents).values())

    def saw_error(self, stage: str, ratio: float) -> None:
        """error/bound of a comparison."""
        self.headroom[stage] = max(ratio, self.headroom.get(stage, 0.0))

    def aim(self) -> None:
        """Tell Hypothesis where faults hide: deep, wide and scattered trees, large errors.

        It climbs these hills in the profile `campaign`; elsewhere it takes no notice.
        """
        if self.trees:
            target(self.deepest, label="depth")
            target(self.widest, label="siblings")
            target(self.scattered, label="scattered commits")
        for stage, ratio in self.headroom.items():
            if isfinite(ratio):
                target(ratio, label=f"error/bound of {stage}")

    def close(self) -> None:
        """Give back what the example opened: a device has no garbage collector."""
        for session in self._open:
            session.close()
        for model in self._models.values():
            model.close()
        self._open.clear()
        self._models.clear()


Sink = Callable[[Example], None]

_current: Example | None = None


def current() -> Example | None:
    """The example that runs, if one does."""
    return _current


@contextmanager
def watching(law: str, sink: Sink) -> Iterator[Example]:
    """Around one run of a law's body: what is opened within belongs to the example."""
    global _current
    example = Example(law)
    _current = example
    try:
        yield example
        example.verdict = HELD
    except UnsatisfiedAssumption:
        example.verdict = EXCUSED if example.excuse else DISCARDED
        raise
    except pytest.skip.Exception:
        example.verdict = SKIPPED
        raise
    except (Exception, pytest.fail.Exception):
        example.verdict = FAILED
        raise
    except BaseException:  # Hypothesis ran out of choices, or somebody wants to stop
        example.verdict = DISCARDED
        raise
    finally:
        _current = None
        if example.verdict == FAILED:
            with _suppressed():  # the failure is the news, not what closing then meets
                example.close()
        else:
            example.close()
        sink(example)


@contextmanager
def _suppressed() -> Iterator[None]:
    try:
        yield
    except Exception:
        return


def need_verb(label: str, verbs: frozenset[str], verb: str) -> None:
    """A law that needs a verb which is not offered is skipped by its name."""
    assert verb in VERBS, verb
    if verb not in verbs:
        pytest.skip(f"{label} does not offer {verb}")


class WatchedSession:
    """A `Session` of the contract that tells its example what it is asked."""

    def __init__(self, label: str, verbs: frozenset[str], session: Session, played: Played) -> None:
        self._label = label
        self._verbs = verbs
        self._session = session
        self._played = played

    @property
    def committed_len(self) -> int:
        return self._session.committed_len

    @property
    def root(self) -> int | None:
        return self._session.root

    @property
    def watched(self) -> Session:
        """The engine's own session: what the batch verbs take."""
        return self._session

    @property
    def slots(self) -> int:
        """The max_len that it was opened with."""
        return self._played.max_len

    def offers(self, *verbs: str) -> bool:
        """Whether the engine has these verbs: for laws that can do without them."""
        return self._verbs.issuperset(verbs)

    def set_root(self, token: int) -> None:
        self._offered("set_root")(token)
        self._note("set_root", token)

    def forward_tokens(self, tokens: Sequence[int], positions: Any, mask: Any, **trace: Any) -> Any:
        logits = self._offered("forward_tokens")(tokens, positions, mask, **trace)
        self._note("forward_tokens", tuple(tokens))
        return logits

    def prefill(self, tokens: Sequence[int], **trace: Any) -> int:
        root: int = self._offered("prefill")(tokens, **trace)
        self._note("prefill", tuple(tokens))
        return root

    def decode(self, **trace: Any) -> int:
        root = self.root
        token: int = self._offered("decode")(**trace)
        self._note("decode", root)
        return token

    def build(self, draft_logits: Any, budget: int) -> DraftTree:
        tree: DraftTree = self._offered("build")(draft_logits, budget)
        return tree

    def verify(self, tree: DraftTree, **trace: Any) -> Any:
        verified = self._offered("verify")(tree, **trace)
        self.note_verify(tree)
        return verified

    def accept(self, tree: DraftTree, *targets: Any, **limit: Any) -> Acceptance:
        acceptance: Acceptance = self._offered("accept")(tree, *targets, **limit)
        return acceptance

    def commit(self, acceptance: Acceptance) -> None:
        self._offered("commit")(acceptance)
        self.note_commit(acceptance)

    def round(self, tree: DraftTree, **more: Any) -> Any:
        done = self._offered("round")(tree, **more)
        self.note_verify(tree)
        self.note_commit(done.acceptance)
        return done

    def snapshot(self) -> Any:
        return self._offered("snapshot")()

    def reset(self) -> None:
        self._offered("reset")()
        self._note("reset", None)

    def close(self) -> None:
        self._session.close()
        if _current is not None and self._session in _current._open:
            _current._open.remove(self._session)

    def note_verify(self, tree: DraftTree) -> None:
        """The batch verbs' part in what was played here."""
        self._saw_tree(tree)
        self._note("verify", tree)

    def note_commit(self, acceptance: Acceptance) -> None:
        self._saw_path(acceptance)
        self._note("commit", acceptance)

    def _offered(self, verb: str) -> Any:
        """The engine's verb."""
        need_verb(self._label, self._verbs, verb)
        return getattr(self._session, verb)

    def _note(self, verb: str, what: Any) -> None:
        self._played.events.append((verb, what))

    def _saw_tree(self, tree: DraftTree) -> None:
        if _current is not None:
            _current.saw_tree(tree)

    def _saw_path(self, acceptance: Acceptance) -> None:
        if _current is not None and acceptance.path != tuple(range(len(acceptance.path))):
            _current.scattered += 1


class WatchedModel:
    """A `Model` of the contract whose sessions are watched."""

    def __init__(self, label: str, verbs: frozenset[str], model: Model, small: SmallModel) -> None:
        self._label = label
        self._verbs = verbs
        self._small = small
        self.watched = model

    def open(self, *, max_len: int) -> WatchedSession:
        played = Played(self._small, max_len)
        session = self.watched.open(max_len=max_len)
        if _current is not None:
            _current.played.append(played)
            _current._open.append(session)
        return WatchedSession(self._label, self._verbs, session, played)

    def verify_batch(
        self, sessions: Sequence[WatchedSession], trees: Sequence[DraftTree]
    ) -> list[Verified]:
        """Of a BatchModel; the sessions are of this model."""
        need_verb(self._label, self._verbs, "verify_batch")
        model: Any = self.watched
        verified: list[Verified] = model.verify_batch([s.watched for s in sessions], trees)
        for session, tree in zip(sessions, trees, strict=True):
            session.note_verify(tree)
        return verified

    def commit_batch(
        self, sessions: Sequence[WatchedSession], acceptances: Sequence[Acceptance]
    ) -> None:
        need_verb(self._label, self._verbs, "commit_batch")
        model: Any = self.watched
        model.commit_batch([s.watched for s in sessions], acceptances)
        for session, acceptance in zip(sessions, acceptances, strict=True):
            session.note_commit(acceptance)
