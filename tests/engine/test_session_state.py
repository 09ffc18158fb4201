"""What a session keeps, forgets and refuses: pending forwards, reset, close, repetition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.contract import Acceptance, DraftTree, LogicalCache, SessionError

Started = Callable[..., Any]
Same = Callable[[LogicalCache, LogicalCache], bool]


# What becomes of a pending forward


def pending(started: Started) -> tuple[Any, DraftTree]:
    session = started(root=7)
    tree = DraftTree(tokens=(7, 1, 2), parents=(-1, 0, 0))
    session.verify(tree)
    return session, tree


def test_a_commit_applies_once(started: Started) -> None:
    session, _ = pending(started)
    session.commit(Acceptance(path=(0, 2), bonus=4))

    with pytest.raises(SessionError, match="commit needs an uncommitted verify"):
        session.commit(Acceptance(path=(0,), bonus=4))

    assert 8 == session.committed_len


def test_a_commit_applies_to_the_latest_verify(started: Started) -> None:
    session, _ = pending(started)
    session.verify(DraftTree(tokens=(7, 3), parents=(-1, 0)))

    session.commit(Acceptance(path=(0, 1), bonus=4))

    assert [7, 3] == session.snapshot().tokens[6:].tolist()


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.set_root(7),
        lambda s: s.prefill([1]),
        lambda s: s.decode(),
        lambda s: s.round(DraftTree(tokens=(7,), parents=(-1,))),
        lambda s: s.reset(),
    ],
    ids=["set_root", "prefill", "decode", "round", "reset"],
)
def test_verbs_that_forget_a_pending_verify(started: Started, verb: Callable[[Any], Any]) -> None:
    session, tree = pending(started)
    verb(session)
    committed_len = session.committed_len

    with pytest.raises(SessionError, match="COMMIT-5"):
        session.commit(Acceptance(path=(0,), bonus=4))
    with pytest.raises(SessionError, match="needs an uncommitted verify"):
        session.accept(tree)

    assert committed_len == session.committed_len


@pytest.mark.parametrize(
    "verb",
    [
        lambda s: s.build(np.zeros((1, 37)), 2),
        lambda s: s.snapshot(),
        lambda s: s.accept(DraftTree(tokens=(9, 1), parents=(-1, 0)), [1, 2]),
    ],
    ids=["build", "snapshot", "pinned accept"],
)
def test_verbs_that_keep_a_pending_verify(started: Started, verb: Callable[[Any], Any]) -> None:
    session, tree = pending(started)

    verb(session)

    session.commit(session.accept(tree))


def test_accept_walks_the_verified_tree_only(started: Started) -> None:
    session, _ = pending(started)

    with pytest.raises(SessionError, match="the tree of the latest verify"):
        session.accept(DraftTree(tokens=(7, 1, 3), parents=(-1, 0, 0)))


def test_accept_after_forward_tokens_needs_targets(started: Started) -> None:
    session = started(root=7)
    session.forward_tokens([7], [6], np.ones((1, 7), bool))
    tree = DraftTree(tokens=(7,), parents=(-1,))

    with pytest.raises(SessionError, match="needs an uncommitted verify"):
        session.accept(tree)

    session.commit(session.accept(tree, [12]))
    assert 12 == session.root


def test_a_forward_that_a_trace_interrupts_leaves_nothing_to_commit(started: Started) -> None:
    """The rows in the slots are half new, half old: what was pending is lost."""
    session, tree = pending(started)
    before = session.snapshot()

    def interrupt(stage: str, layer: int | None, array: object) -> None:
        if (stage, layer) == ("hidden", 1):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.verify(tree, trace=interrupt)

    with pytest.raises(SessionError):
        session.commit(Acceptance(path=(0,), bonus=4))
    assert np.array_equal(before.c_kv, session.snapshot().c_kv)
    session.decode()  # the session is sound


# Reset, close, repeat


def test_reset_starts_over(started: Started, same_cache: Same) -> None:
    session = started(page_size=4)
    fresh = session.snapshot()
    session.decode()

    session.reset()

    assert (0, None) == (session.committed_len, session.root)
    assert 0 == len(session.snapshot().tokens)
    session.prefill(fresh.tokens.tolist())
    assert same_cache(fresh, session.snapshot())


def test_a_closed_session_refuses_every_verb(started: Started) -> None:
    session, tree = pending(started)
    acceptance = Acceptance(path=(0,), bonus=4)

    session.close()
    session.close()

    verbs: dict[str, Callable[[], Any]] = {
        "set_root": lambda: session.set_root(1),
        "forward_tokens": lambda: session.forward_tokens([1], [0], np.ones((1, 7), bool)),
        "prefill": lambda: session.prefill([1]),
        "decode": session.decode,
        "build": lambda: session.build(np.zeros((1, 37)), 1),
        "verify": lambda: session.verify(tree),
        "accept": lambda: session.accept(tree),
        "commit": lambda: session.commit(acceptance),
        "round": lambda: session.round(tree),
        "snapshot": session.snapshot,
        "reset": session.reset,
    }
    for verb, call in verbs.items():
        with pytest.raises(SessionError, match=f"{verb} on a closed session"):
            call()


def test_the_same_rounds_give_the_same_bits(started: Started, same_cache: Same) -> None:
    """NUM-4, as the profile declares."""
    tree = DraftTree(tokens=(7, 1, 2, 3, 1), parents=(-1, 0, 0, 2, 2))

    first, second = started(root=7), started(root=7)
    logits = [session.verify(tree).logits.tobytes() for session in (first, second, first)]

    assert 1 == len(set(logits))
    assert same_cache(first.snapshot(), second.snapshot())


def test_what_a_verb_returned_stays_as_it_was(started: Started) -> None:
    session, tree = pending(started)
    verified, cache = session.verify(tree), session.snapshot()
    logits, c_kv = verified.logits.copy(), cache.c_kv.copy()

    session.round(tree)
    session.decode()

    assert np.array_equal(logits, verified.logits)
    assert np.array_equal(c_kv, cache.c_kv)


def test_a_commit_that_is_interrupted_is_not_done_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows may have been moved: moved again, slot L + 1 would get what L + 2 has."""
    session, _ = pending(started)
    kernels = session._forward.kernels
    honest = kernels.commit_rows

    def interrupted(*arguments: Any) -> None:
        honest(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(kernels), "commit_rows", staticmethod(interrupted))
    with pytest.raises(KeyboardInterrupt):
        session.commit(Acceptance(path=(0, 2), bonus=4))

    with pytest.raises(SessionError, match="commit needs an uncommitted verify"):
        session.commit(Acceptance(path=(0, 2), bonus=4))
    assert (6, 7) == (session.committed_len, session.root)


def test_a_verify_that_fails_leaves_nothing_to_commit(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = started(root=7)

    def runs_out(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(session._forward.kernels), "to_host", staticmethod(runs_out))
        with pytest.raises(MemoryError):
            session.verify(DraftTree(tokens=(7, 1, 2), parents=(-1, 0, 0)))

    with pytest.raises(SessionError, match="commit needs an uncommitted verify"):
        session.commit(Acceptance(path=(0, 2), bonus=4))
