"""When a variant's fault is at work: always, or in some forwards alone.

A fault that is there in every forward is found by any case. Real ones hide: they are there from the
second round on, past a length, after a miss, in one verb.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kdtr.conformance.mutants.planting import on_open


@dataclass(frozen=True, slots=True)
class Occasion:
    """The forward under way, or the latest one, of the session that ran last.

    verb           that launched it: prefill, verify, round (decode too) or forward_tokens
    committed_len  L at its begin
    n_rows         M
    rounds         commits of trees and of rows under a mask that the session had before
    kept, of       rows that the latest of those kept, of how many; 0 of 0 before the first
    parents        of a tree
    capacity       slots of the session
    """

    verb: str = ""
    committed_len: int = 0
    n_rows: int = 0
    rounds: int = 0
    kept: int = 0
    of: int = 0
    parents: tuple[int, ...] | None = None
    capacity: int = 0

    @property
    def is_tree(self) -> bool:
        return self.parents is not None


@dataclass(frozen=True, slots=True)
class When:
    """An occasion on which a fault is at work, and its name: "from the second round on"."""

    name: str
    holds: Callable[[Occasion], bool]

    def __str__(self) -> str:
        return self.name


ALWAYS = When("always", lambda now: True)
IN_PREFILL = When("in prefill", lambda now: now.verb == "prefill")
IN_LATER_CHUNKS = When(
    "in prefill after the first chunk", lambda now: now.verb == "prefill" and now.committed_len > 0
)
IN_LONE_CHUNKS = When(
    "in prefill of one token", lambda now: now.verb == "prefill" and now.n_rows == 1
)
IN_TREES = When("in trees", lambda now: now.is_tree)
IN_VERIFY = When("in verify() alone", lambda now: now.verb == "verify")
IN_ROUND = When("in round() and decode() alone", lambda now: now.verb == "round")
IN_FORWARD = When("in forward_tokens() alone", lambda now: now.verb == "forward_tokens")
OF_A_ROOT = When("in trees of a root alone", lambda now: now.is_tree and now.n_rows == 1)
OF_BRANCHES = When(
    "in trees with a branch",
    lambda now: now.parents is not None and now.parents != tuple(range(-1, now.n_rows - 1)),
)
FIRST_ROUND = When("in the first round alone", lambda now: now.is_tree and now.rounds == 0)
SECOND_ROUND = When("in the second round alone", lambda now: now.is_tree and now.rounds == 1)
LATER_ROUNDS = When("from the second round on", lambda now: now.is_tree and now.rounds >= 1)
THIRD_ROUND_ON = When("from the third round on", lambda now: now.is_tree and now.rounds >= 2)
AFTER_REJECTION = When(
    "after a round that rejected a node", lambda now: now.is_tree and now.kept < now.of
)
AFTER_A_MISS = When(
    "after a round that kept its root alone",
    lambda now: now.is_tree and now.of > 1 and now.kept == 1,
)
AFTER_WHOLE = When(
    "after a round that kept every node of several",
    lambda now: now.is_tree and 1 < now.of == now.kept,
)
AT_ZERO = When("in trees at L = 0", lambda now: now.is_tree and now.committed_len == 0)


def long_from(length: int) -> When:
    return When(f"in trees from L = {length} on", lambda n: n.is_tree and n.committed_len >= length)


def large_from(rows: int) -> When:
    return When(f"in trees of {rows} nodes or more", lambda now: now.is_tree and now.n_rows >= rows)


def small_to(rows: int) -> When:
    return When(f"in trees of up to {rows} nodes", lambda now: now.is_tree and now.n_rows <= rows)


EVERYWHERE = (ALWAYS, IN_PREFILL, IN_TREES)  # for what every forward computes
VERBS = (IN_PREFILL, IN_VERIFY, IN_ROUND, IN_FORWARD)
ROUNDS = (FIRST_ROUND, SECOND_ROUND, LATER_ROUNDS, THIRD_ROUND_ON)
HISTORY = (AFTER_REJECTION, AFTER_A_MISS, AFTER_WHOLE)
SIZES = (long_from(9), long_from(17), large_from(5), large_from(8), small_to(4))
TREES = (IN_TREES, IN_ROUND, *ROUNDS, *HISTORY, *SIZES)  # for what trees alone have


class Watch:
    """What is under way in an engine; planted before the fault that asks it.

    seen  is told every occasion
    """

    def __init__(self, engine: Any, seen: Callable[[Occasion], None] = lambda now: None) -> None:
        self.now = Occasion()
        self._seen = seen
        on_open(engine, self._follow)

    def _follow(self, session: Any) -> None:
        run, advance, reset = session._launcher.run, session._advance, session.reset
        mine = [Occasion(capacity=session._cache.capacity)]

        def watched_run(name: str, rows: Any, *rest: Any) -> Any:
            parents = None if rows.parents is None else tuple(rows.parents.tolist())
            mine[0] = replace(
                mine[0],
                verb=name,
                committed_len=int(rows.committed_len),
                n_rows=rows.n,
                parents=parents,
            )
            self.now = mine[0]
            self._seen(self.now)
            return run(name, rows, *rest)

        def watched_advance(tokens: Any, positions: Any, root: int) -> None:
            before = mine[0]
            self.now = before
            advance(tokens, positions, root)
            if before.verb != "prefill":
                mine[0] = replace(
                    before, rounds=before.rounds + 1, kept=len(tokens), of=before.n_rows
                )

        def watched_reset() -> None:
            reset()
            mine[0] = Occasion(capacity=session._cache.capacity)

        session._launcher.run = watched_run
        session._advance = watched_advance
        session.reset = watched_reset
