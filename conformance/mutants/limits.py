"""LIM: stop tokens, length limits and the capacity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_open
from kdtr.contract import NO_LIMIT, EmitLimit

LIMITS = MutantClass("limits")


@LIMITS.mutant("M060", "LIM-1", breaks="ACC-4", first_seen_at="path", needs="stop")
def no_stop_tokens(engine: Any) -> None:
    """A stop token is looked for at the end of a round's tokens alone: none is cut at."""
    on_open(engine, limited(lambda limit: EmitLimit(max_emitted=limit.max_emitted)))


@LIMITS.mutant("M062", "LIM-3", breaks="ACC-4", first_seen_at="path", needs="stop")
def no_max_emitted(engine: Any) -> None:
    """Of a limit only the stop tokens count."""
    on_open(engine, limited(lambda limit: EmitLimit(limit.stop_tokens)))


@LIMITS.mutant(
    "M064",
    "LIM-5",
    breaks="SLOT-3",
    first_seen_at="verify one slot over capacity",
    needs="core",
)
def slots_wrap(engine: Any) -> None:
    """One row over the capacity is taken, and goes to slot 0."""

    def change(session: Any) -> None:
        capacity, staged = session._cache.capacity - 1, session._staged

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            rows = staged(*args, **kwargs)
            return rows._replace(slots=rows.slots % capacity)

        session._staged = wrapped

    on_open(engine, change, more_slots=1)


LIMITS.waits("M066", "LIM-7", "a generation loop", "no room is kept for the largest tree")


@LIMITS.mutant("M067", "LIM-8", breaks="ACC-4", first_seen_at="path", needs="stop")
def path_told_uncut(engine: Any) -> None:
    """The limit cuts what is committed, and the path is told as it was before."""

    def change(session: Any) -> None:
        accept, round_ = session.accept, session.round

        def faulty_accept(tree: Any, *rest: Any, limit: EmitLimit = NO_LIMIT) -> Any:
            return accept(tree, *rest)

        def faulty_round(tree: Any, *, limit: EmitLimit = NO_LIMIT, **rest: Any) -> Any:
            targets: list[int] = []
            walk = session._forward.kernels.accept_walk

            def watched(*args: Any) -> Any:
                targets[:] = args[2].tolist()
                return walk(*args)

            session._forward.kernels.accept_walk = watched
            try:
                done = round_(tree, limit=limit, **rest)
            finally:
                session._forward.kernels.accept_walk = walk
            return replace(done, acceptance=accept(tree, targets))

        session.accept, session.round = faulty_accept, faulty_round

    on_open(engine, change)


def limited(change: Callable[[EmitLimit], EmitLimit]) -> Callable[[Any], None]:
    """For `on_open`: accept and round are given change(limit)."""

    def on_session(session: Any) -> None:
        accept, round_ = session.accept, session.round

        def faulty_accept(tree: Any, *rest: Any, limit: EmitLimit = NO_LIMIT) -> Any:
            return accept(tree, *rest, limit=change(limit))

        def faulty_round(tree: Any, *, limit: EmitLimit = NO_LIMIT, **rest: Any) -> Any:
            return round_(tree, limit=change(limit), **rest)

        session.accept, session.round = faulty_accept, faulty_round

    return on_session
