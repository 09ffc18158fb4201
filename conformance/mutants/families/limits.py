"""Stop tokens, length limits, the capacity, and what a session refuses, keeps and forgets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kdtr.conformance.mutants.families.family import Family, Maker, by_turns
from kdtr.conformance.mutants.families.occasion import (
    ALWAYS,
    FIRST_ROUND,
    LATER_ROUNDS,
    Watch,
    When,
)
from kdtr.conformance.mutants.planting import on_open, physical
from kdtr.contract import NO_LIMIT, Acceptance, CacheError, DraftTree, EmitLimit

_Limit = Callable[[EmitLimit], EmitLimit]


def _most(change: Callable[[int], int | None]) -> _Limit:
    def limit(one: EmitLimit) -> EmitLimit:
        if one.max_emitted is None:
            return one
        return EmitLimit(one.stop_tokens, change(one.max_emitted))

    return limit


def _stops(change: Callable[[list[int]], list[int]]) -> _Limit:
    return lambda one: EmitLimit(frozenset(change(sorted(one.stop_tokens))), one.max_emitted)


_LIMITS: dict[str, _Limit] = {
    "one token more": _most(lambda most: most + 1),
    "two tokens more": _most(lambda most: most + 2),
    "one token fewer": _most(lambda most: max(most - 1, 1)),
    "one token alone": _most(lambda most: 1),
    "twice the tokens": _most(lambda most: 2 * most),
    "no limit of tokens": _most(lambda most: None),
    "no stop token": _stops(lambda stops: []),
    "all stop tokens but the first": _stops(lambda stops: stops[1:]),
    "all stop tokens but the last": _stops(lambda stops: stops[:-1]),
    "stop tokens one too high": _stops(lambda stops: [one + 1 for one in stops]),
    "token 0 stops too": _stops(lambda stops: [*stops, 0] if stops else stops),
    "even tokens stop too": _stops(lambda stops: [*stops, *range(0, 60, 2)] if stops else stops),
    "a limit of tokens where there is none": lambda one: EmitLimit(
        one.stop_tokens, one.max_emitted or 2
    ),
    "either limit alone": lambda one: (
        EmitLimit(one.stop_tokens) if one.stop_tokens else EmitLimit(max_emitted=one.max_emitted)
    ),
}
# acceptance, its tree, the limit -> another one
_CUTS: dict[str, Callable[[Acceptance, DraftTree, EmitLimit], Acceptance]] = {
    "the stop token is cached": lambda one, tree, limit: _and_stop(one, tree, limit),
    "the path is cut one node early": lambda one, tree, limit: (
        Acceptance(one.path[: max(1, len(one.path) - 1)], tree.tokens[one.path[-1]])
        if limit != NO_LIMIT and len(one.path) > 1
        else one
    ),
    "the bonus of a cut path is the root": lambda one, tree, limit: (
        Acceptance(one.path, tree.tokens[0]) if limit != NO_LIMIT else one
    ),
    "the bonus of a cut path is its last token": lambda one, tree, limit: (
        Acceptance(one.path, tree.tokens[one.path[-1]]) if limit != NO_LIMIT else one
    ),
    "a cut path is the root alone": lambda one, tree, limit: (
        Acceptance(one.path[:1], one.bonus) if limit != NO_LIMIT else one
    ),
}


def _and_stop(one: Acceptance, tree: DraftTree, limit: EmitLimit) -> Acceptance:
    below = [i for i, parent in enumerate(tree.parents) if parent == one.path[-1]]
    node = next((i for i in below if tree.tokens[i] == one.bonus), None)
    return one if limit == NO_LIMIT or node is None else Acceptance((*one.path, node), one.bonus)


def limits() -> Family:
    make = Maker("limits", "LIM", "stop tokens and length limits that count otherwise")
    for number, (label, limit) in enumerate(_LIMITS.items()):
        for verbs in (("accept", "round"), by_turns((("accept",), ("round",)), number)):
            plant = _limited(limit, verbs)
            at = " in " + " and ".join(f"{verb}()" for verb in verbs)
            make.add_each(label + at, ("ACC-4",), plant, (ALWAYS, FIRST_ROUND, LATER_ROUNDS))
    for label, cut in _CUTS.items():
        make.add_each(label, ("ACC-4", "ACC-2"), _cut(cut), (ALWAYS,))
    return make.family()


def _limited(limit: _Limit, verbs: tuple[str, ...]) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def change(session: Any) -> None:
            trees = [0]
            advance = session._advance

            def advanced(*args: Any) -> None:
                trees[0] += watch.now.is_tree
                advance(*args)

            session._advance = advanced

            def faulty(verb: Any) -> Any:
                def call(tree: Any, *rest: Any, **kwargs: Any) -> Any:
                    now = replace(watch.now, parents=tree.parents, rounds=trees[0])
                    if when.holds(now):
                        kwargs["limit"] = limit(kwargs.get("limit", NO_LIMIT))
                    return verb(tree, *rest, **kwargs)

                return call

            for name in verbs:
                setattr(session, name, faulty(getattr(session, name)))

        on_open(engine, change)

    return plant


def _cut(cut: Any) -> Callable[[Any, Watch, When], None]:
    """Of accept() alone: round() cuts on the device."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def change(session: Any) -> None:
            accept = session.accept

            def faulty(tree: Any, *rest: Any, limit: EmitLimit = NO_LIMIT) -> Any:
                return cut(accept(tree, *rest, limit=limit), tree, limit)

            session.accept = faulty

        on_open(engine, change)

    return plant


# What a session refuses, keeps and forgets


def _too_early(short: int) -> Any:
    def plant(session: Any) -> None:
        check_room, cache = session._cache.check_room, session._cache

        def faulty(verb: str, length: int, n_rows: int) -> None:
            if length + n_rows > cache.capacity - short:
                raise CacheError(
                    f"{verb} of {n_rows} rows at {length}: {cache.capacity} slots less {short}"
                )
            check_room(verb, length, n_rows)

        cache.check_room = faulty

    return plant


def _too_late(session: Any) -> None:
    """The room is looked at when the rows are already there."""
    cache, check_room = session._cache, session._cache.check_room

    def faulty(verb: str, length: int, n_rows: int) -> None:
        try:
            check_room(verb, length, n_rows)
        except CacheError:
            cache.rows[:, physical(cache, 0)] = 0
            raise

    cache.check_room = faulty


def _grows_when_refused(session: Any) -> None:
    cache, check_room = session._cache, session._cache.check_room

    def faulty(verb: str, length: int, n_rows: int) -> None:
        try:
            check_room(verb, length, n_rows)
        except CacheError:
            session._tokens.append(0)
            session._positions.append(length)
            raise

    cache.check_room = faulty


def _root_by_refusal(session: Any) -> None:
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        try:
            return verify(tree, **rest)
        except Exception:
            session._root = tree.tokens[0]
            raise

    session.verify = faulty


def _any_root(session: Any) -> None:
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        return verify(replace(tree, tokens=(session.root, *tree.tokens[1:])), **rest)

    session.verify = faulty


def _root_from_tree(session: Any) -> None:
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        session._root = tree.tokens[0]
        return verify(tree, **rest)

    session.verify = faulty


def _tokens_clipped(session: Any) -> None:
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        top = session._forward.config.vocab_size - 1
        return verify(replace(tree, tokens=tuple(min(t, top) for t in tree.tokens)), **rest)

    session.verify = faulty


def _commit_again(session: Any) -> None:
    """What was committed stays pending."""
    commit = session.commit

    def faulty(acceptance: Any) -> None:
        pending = session._pending
        commit(acceptance)
        session._pending = pending

    session.commit = faulty


def _commit_of_nothing(session: Any) -> None:
    commit = session.commit

    def faulty(acceptance: Any) -> None:
        if session._pending is not None:
            commit(acceptance)

    session.commit = faulty


def _any_path(session: Any) -> None:
    commit = session.commit

    def faulty(acceptance: Any) -> None:
        pending = session._pending
        if pending is not None:
            session._pending = replace(pending, tree=None)
        commit(acceptance)

    session.commit = faulty


def _root_stays(session: Any) -> None:
    reset = session.reset

    def faulty() -> None:
        root = session._root
        reset()
        session._root = root

    session.reset = faulty


def _length_stays(session: Any) -> None:
    reset = session.reset

    def faulty() -> None:
        tokens, positions = [*session._tokens], [*session._positions]
        pages = session._cache.unmap_all
        session._cache.unmap_all = lambda: None
        try:
            reset()
        finally:
            session._cache.unmap_all = pages
        session._tokens.extend(tokens)
        session._positions.extend(positions)

    session.reset = faulty


def _pages_stay(session: Any) -> None:
    reset = session.reset

    def faulty() -> None:
        pages = session._cache.unmap_all
        session._cache.unmap_all = lambda: None
        try:
            reset()
        finally:
            session._cache.unmap_all = pages

    session.reset = faulty


def _pending_stays(session: Any) -> None:
    set_root = session.set_root

    def faulty(token: int) -> None:
        pending = session._pending
        set_root(token)
        session._pending = pending

    session.set_root = faulty


def _root_not_set(session: Any) -> None:
    set_root = session.set_root

    def faulty(token: int) -> None:
        root = session.root
        set_root(token)
        if root is not None:
            session._root = root

    session.set_root = faulty


def _verify_grows(session: Any) -> None:
    """L is that of after the round from the verify on, until the commit."""
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        done = verify(tree, **rest)
        session._tokens.append(tree.tokens[0])
        session._positions.append(len(session._positions))
        return done

    session.verify = faulty


def _verify_moves_root(session: Any) -> None:
    verify = session.verify

    def faulty(tree: Any, **rest: Any) -> Any:
        done = verify(tree, **rest)
        session._root = done.targets[0]
        return done

    session.verify = faulty


def _view(session: Any) -> None:
    """A snapshot without its last row."""
    snapshot = session.snapshot

    def faulty() -> Any:
        cache = snapshot()
        return replace(
            cache,
            tokens=cache.tokens[:-1],
            positions=cache.positions[:-1],
            c_kv=cache.c_kv[:, :-1],
            k_pe=cache.k_pe[:, :-1],
        )

    session.snapshot = faulty


_SESSIONS: dict[str, tuple[tuple[str, ...], Callable[[Any], None]]] = {
    "room for one slot less": (("SLOT-3",), _too_early(1)),
    "room for two slots less": (("SLOT-3",), _too_early(2)),
    "room for a page less": (("SLOT-3",), _too_early(3)),
    "a refusal for want of room clears slot 0": (("SLOT-3", "FWD-3"), _too_late),
    "a refusal for want of room lets L grow": (("SLOT-3", "FWD-3"), _grows_when_refused),
    "a refused tree leaves its root": (("FWD-3",), _root_by_refusal),
    "a tree under another root is taken under the session's": (("FWD-3",), _any_root),
    "a tree brings its root along": (("FWD-3",), _root_from_tree),
    "tokens outside the vocabulary are the last id": (("FWD-3",), _tokens_clipped),
    "a commit applies twice": (("COMMIT-5",), _commit_again),
    "a commit of nothing is not refused": (("COMMIT-5",), _commit_of_nothing),
    "a path is not held to its tree": (("COMMIT-5", "ACC-1"), _any_path),
    "reset leaves the root": (("FWD-1",), _root_stays),
    "reset leaves L": (("FWD-1",), _length_stays),
    "reset leaves the pages": (("FWD-1", "COMMIT-4"), _pages_stay),
    "set_root leaves what is pending": (("COMMIT-5", "FWD-3"), _pending_stays),
    "set_root changes no root that is there": (("FWD-3", "COMMIT-5"), _root_not_set),
    "L grows with the verify": (("SLOT-2", "COMMIT-2", "COMMIT-3"), _verify_grows),
    "verify leaves the root's target as root": (
        ("SLOT-2", "FWD-3", "COMMIT-2"),
        _verify_moves_root,
    ),
    "a snapshot lacks its last row": (("COMMIT-3", "COMMIT-2"), _view),
}


def sessions() -> Family:
    make = Maker(
        "sessions", "EDGE", "what a session refuses, and what a refusal, a reset or a verify leaves"
    )
    for label, (rules, change) in _SESSIONS.items():
        make.add(label, rules, _in_sessions(change), ALWAYS)
    return make.family()


def _in_sessions(change: Callable[[Any], None]) -> Callable[[Any, Watch], None]:
    return lambda engine, watch: on_open(engine, change)
