"""An example of a law, watched: which engines it opened, what it asked of them, how it ended.

Every session that a law opens is wrapped (`watched.py`): the wrapper tells its example what was
played, so that a failed one can be recorded as a golden case (`failure_case.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import pytest
from hypothesis import target
from hypothesis.errors import UnsatisfiedAssumption

from kdtr.conformance.raised import RAISED
from kdtr.contract import Acceptance, DraftTree, Session
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.trees import depth, shape_class

# How an example ended.
HELD = "held"
EXCUSED = "excused"  # it differed where a choice is a near tie (NUM-2)
DISCARDED = "discarded"  # the law does not speak of what was drawn
FAILED = "failed"
SKIPPED = "skipped"  # the engine lacks what the law needs

# What was played on a session: a verb with what it took.
Event = tuple[str, Any]


@dataclass(slots=True)
class Played:
    """A session's life: `events` are (verb, what it took), in order.

    What it took is tokens, a token, a tree, an acceptance, or of `accept` (tree, targets, limit).
    """

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

    def saw_path(self, acceptance: Acceptance) -> None:
        self.scattered += acceptance.path != tuple(range(len(acceptance.path)))

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

    def opened(self, session: Session, played: Played) -> None:
        """To be closed with the example."""
        self._open.append(session)
        self.played.append(played)

    def closed(self, session: Session) -> None:
        """By the law itself."""
        if session in self._open:
            self._open.remove(session)

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
    except (*RAISED, pytest.fail.Exception):
        example.verdict = FAILED
        raise
    except BaseException:  # Hypothesis ran out of choices, or somebody wants to stop
        example.verdict = DISCARDED
        raise
    finally:
        _current = None
        try:
            _close(example)
        finally:
            sink(example)


def _close(example: Example) -> None:
    """An engine that cannot close has failed; of a failed example that is not the news."""
    try:
        example.close()
    except RAISED:
        if example.verdict == FAILED:
            return
        example.verdict = FAILED
        raise
