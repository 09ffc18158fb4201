"""Sessions and models as a law is given them: the engine's own, and the example is told.

A wrapper counts draft trees and rows by shape, skips the law by the verb's name where the engine
has none, and keeps what was played.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kdtr.contract import (
    NO_LIMIT,
    VERBS,
    Acceptance,
    DraftTree,
    EmitLimit,
    Model,
    Session,
    Verified,
)
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.watch import Played, current


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

    def accept(
        self,
        tree: DraftTree,
        targets: Sequence[int] | None = None,
        *,
        limit: EmitLimit = NO_LIMIT,
    ) -> Acceptance:
        given = () if targets is None else (targets,)
        acceptance: Acceptance = self._offered("accept")(tree, *given, limit=limit)
        self._note("accept", (tree, targets, limit))
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
        example = current()
        if example is not None:
            example.closed(self._session)

    def note_verify(self, tree: DraftTree) -> None:
        """The batch verbs' part in what was played here."""
        example = current()
        if example is not None:
            example.saw_tree(tree)
        self._note("verify", tree)

    def note_commit(self, acceptance: Acceptance) -> None:
        example = current()
        if example is not None:
            example.saw_path(acceptance)
        self._note("commit", acceptance)

    def _offered(self, verb: str) -> Any:
        """The engine's verb."""
        need_verb(self._label, self._verbs, verb)
        return getattr(self._session, verb)

    def _note(self, verb: str, what: Any) -> None:
        self._played.events.append((verb, what))


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
        example = current()
        if example is not None:
            example.opened(session, played)
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
