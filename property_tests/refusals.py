"""Calls that every engine refuses, and the state in which each is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis.vendor.pretty import RepresentationPrinter

from kdtr.contract import (
    Acceptance,
    CacheError,
    DraftTree,
    InputError,
    KdtrError,
    SessionError,
    TreeError,
)
from kdtr.property_tests.trees import chain, path_to, under_root
from kdtr.property_tests.watched import WatchedSession

# When a call is wrong.
ALWAYS = "always"
ROOTED = "with a root"
PENDING = "with a verify pending"
SETTLED = "with nothing pending"
ROOTLESS = "without a root"


@dataclass(frozen=True, slots=True)
class Wrong:
    """A call that an engine refuses, if it offers the verb at all.

    call  is given the session, a tree under its root (the pending one, if a verify is pending)
          and the vocabulary's size
    """

    label: str
    verb: str
    error: type[KdtrError]
    call: Callable[[WatchedSession, DraftTree, int], object]
    when: str = ALWAYS

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(self.label)


def _too_many(session: WatchedSession, tree: DraftTree, w: int) -> object:
    """One node more than there are slots left."""
    n = session.slots - session.committed_len + 1
    return session.verify(chain([tree.tokens[0], *(i % w for i in range(n - 1))]))


def _too_long(session: WatchedSession, tree: DraftTree, w: int) -> object:
    return session.prefill([0] * (session.slots - session.committed_len + 1))


def _off_path(session: WatchedSession, tree: DraftTree, w: int) -> None:
    """A path that leaves out the root's child, or that ends behind the tree."""
    deep = [i for i in range(len(tree)) if len(path_to(tree, i)) > 2]
    session.commit(Acceptance((0, deep[0] if deep else len(tree)), 0))


def _blind_mask(session: WatchedSession) -> np.ndarray:
    return np.zeros((1, session.committed_len + 1), bool)


WRONG = (
    Wrong(
        "verify under another root",
        "verify",
        TreeError,
        lambda s, t, w: s.verify(under_root(t, (t.tokens[0] + 1) % w)),
        ROOTED,
    ),
    Wrong(
        "verify a token outside the vocabulary",
        "verify",
        TreeError,
        lambda s, t, w: s.verify(DraftTree((*t.tokens, w), (*t.parents, 0))),
        ROOTED,
    ),
    Wrong(
        "round under another root",
        "round",
        TreeError,
        lambda s, t, w: s.round(under_root(t, (t.tokens[0] + 1) % w)),
        ROOTED,
    ),
    Wrong("verify over capacity", "verify", CacheError, _too_many, ROOTED),
    Wrong("prefill over capacity", "prefill", CacheError, _too_long),
    Wrong(
        "prefill a token outside the vocabulary",
        "prefill",
        InputError,
        lambda s, t, w: s.prefill([0, w]),
    ),
    Wrong("prefill a negative token", "prefill", InputError, lambda s, t, w: s.prefill([-1])),
    Wrong("prefill nothing", "prefill", InputError, lambda s, t, w: s.prefill([])),
    Wrong(
        "set a root outside the vocabulary",
        "set_root",
        InputError,
        lambda s, t, w: s.set_root(w),
    ),
    Wrong("commit what is no path", "commit", InputError, _off_path, PENDING),
    Wrong(
        "commit a node behind the tree",
        "commit",
        InputError,
        lambda s, t, w: s.commit(Acceptance((0, len(t)), 0)),
        PENDING,
    ),
    Wrong(
        "commit a bonus outside the vocabulary",
        "commit",
        InputError,
        lambda s, t, w: s.commit(Acceptance((0,), w)),
        PENDING,
    ),
    Wrong(
        "accept with a target too few",
        "accept",
        InputError,
        lambda s, t, w: s.accept(t, [0] * (len(t) - 1)),
    ),
    Wrong(
        "accept with a target outside the vocabulary",
        "accept",
        InputError,
        lambda s, t, w: s.accept(t, [w] * len(t)),
    ),
    Wrong(
        "accept another tree than the verified",
        "accept",
        SessionError,
        lambda s, t, w: s.accept(DraftTree((*t.tokens, w - 1), (*t.parents, len(t) - 1))),
    ),
    Wrong(
        "build with budget -1",
        "build",
        InputError,
        lambda s, t, w: s.build(np.zeros((1, w)), -1),
        ROOTED,
    ),
    Wrong(
        "build from NaN",
        "build",
        InputError,
        lambda s, t, w: s.build(np.full((1, w), np.nan), 1),
        ROOTED,
    ),
    Wrong(
        "build from +inf",
        "build",
        InputError,
        lambda s, t, w: s.build(np.full((1, w), np.inf), 1),
        ROOTED,
    ),
    Wrong(
        "build from another vocabulary",
        "build",
        InputError,
        lambda s, t, w: s.build(np.zeros((1, w + 1)), 1),
        ROOTED,
    ),
    Wrong(
        "forward under a mask that hides a row from itself",
        "forward_tokens",
        InputError,
        lambda s, t, w: s.forward_tokens([0], np.array([0]), _blind_mask(s)),
    ),
    Wrong(
        "forward at a negative position",
        "forward_tokens",
        InputError,
        lambda s, t, w: s.forward_tokens([0], np.array([-1]), ~_blind_mask(s)),
    ),
    Wrong(
        "commit with nothing pending",
        "commit",
        SessionError,
        lambda s, t, w: s.commit(Acceptance((0,), 0)),
        SETTLED,
    ),
    Wrong("verify without a root", "verify", SessionError, lambda s, t, w: s.verify(t), ROOTLESS),
    Wrong("decode without a root", "decode", SessionError, lambda s, t, w: s.decode(), ROOTLESS),
)


def wrong_calls(session: WatchedSession, *, pending: bool) -> list[Wrong]:
    """Those that this engine must refuse in this state: a missing verb takes its own away."""
    states = {ALWAYS, PENDING if pending else SETTLED, ROOTLESS if session.root is None else ROOTED}
    return [entry for entry in WRONG if session.offers(entry.verb) and entry.when in states]
