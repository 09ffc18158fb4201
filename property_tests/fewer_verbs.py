"""What laws ask, in the verbs that an engine has.

prefill, verify and commit are enough for much: where roots cannot be set, a tree is put under the
root that prefill chose; where there is no forward by hand, a plain run is a prefill and lone
roots; where there is no round, it is verify, walk and commit. An engine with every verb is asked
as if this file did not exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kdtr.contract import NO_LIMIT, Acceptance, DraftTree, EmitLimit, Verified
from kdtr.property_tests.judge import Judge
from kdtr.property_tests.strategies import MAX_LEN, SmallModel
from kdtr.property_tests.subject import Answer, Subject, causal_rows
from kdtr.property_tests.trees import path_tokens, under_root
from kdtr.property_tests.watched import WatchedSession
from kdtr.reference import accept, emitted


@dataclass(frozen=True, slots=True)
class Placed:
    """A session behind a prompt, and a tree under its root."""

    session: WatchedSession
    prompt: tuple[int, ...]
    tree: DraftTree

    def history(self, node: int) -> list[int]:
        """The tokens that the node's row comes from."""
        return [*self.prompt, *path_tokens(self.tree, node)]


def place(
    engine: Subject,
    model: SmallModel,
    prompt: Sequence[int],
    tree: DraftTree,
    *,
    max_len: int = MAX_LEN,
) -> Placed:
    """The tree under its own root, where roots can be set.

    Elsewhere it gets the root that prefill chose, and an empty prompt, behind which there is
    none, becomes token 0.
    """
    if not engine.offers("set_root"):
        prompt = prompt or (0,)
    session = engine.committed(model, prompt, max_len=max_len)
    return Placed(session, tuple(prompt), rooted(session, tree))


def place_again(
    engine: Subject, model: SmallModel, placed: Placed, *, max_len: int = MAX_LEN
) -> WatchedSession:
    """Another session behind the same prompt, under the same root."""
    again = place(engine, model, placed.prompt, placed.tree, max_len=max_len)
    root = placed.tree.tokens[0]
    Judge(engine, model).target("root", root, again.tree.tokens[0], history=placed.prompt)
    return again.session


def rooted(session: WatchedSession, tree: DraftTree) -> DraftTree:
    """The tree, and the session's root set to its own; or the tree under the session's root."""
    if session.offers("set_root"):
        session.set_root(tree.tokens[0])
        return tree
    assert session.root is not None
    return under_root(tree, session.root)


def answers(session: WatchedSession, tree: DraftTree) -> list[Answer]:
    """A verify, row by row, and copied: the arrays are the session's."""
    return rows_of(session.verify(tree))


def rows_of(verified: Verified) -> list[Answer]:
    if verified.logits is None:
        return [Answer(None, target) for target in verified.targets]
    logits = np.array(verified.logits)
    return [Answer(row, token) for row, token in zip(logits, verified.targets, strict=True)]


def plain_answer(
    engine: Subject, model: SmallModel, prompt: Sequence[int], tokens: Sequence[int]
) -> Answer:
    """The row of the last token of a plain run over prompt and tokens, from an empty cache."""
    history = [*prompt, *tokens]
    if engine.offers("forward_tokens"):
        row = causal_rows(engine.open(model), history)[-1]
        return Answer(row, int(row.argmax()))
    if engine.offers("set_root"):
        session = engine.committed(model, history[:-1])
        session.set_root(history[-1])
        return answers(session, lone(history[-1]))[0]
    session = engine.committed(model, prompt)
    if session.root != tokens[0]:  # not what this engine would say, so its token is all we get
        return Answer(None, engine.open(model).prefill(history))
    for token, bonus in pairwise(tokens):
        session.verify(lone(token))
        session.commit(Acceptance((0,), bonus))
    return answers(session, lone(tokens[-1]))[0]


def lone(root: int) -> DraftTree:
    """The tree of plain decoding (FWD-2)."""
    return DraftTree((root,), (-1,))


def decoded(session: WatchedSession, n: int) -> list[int]:
    """n tokens by plain decoding."""
    return [_decode(session) for _ in range(n)]


def _decode(session: WatchedSession) -> int:
    if session.offers("decode"):
        return session.decode()
    assert session.root is not None
    acceptance, _ = played(session, lone(session.root))
    return acceptance.bonus


def walked(
    session: WatchedSession,
    tree: DraftTree,
    targets: Sequence[int],
    limit: EmitLimit = NO_LIMIT,
) -> Acceptance:
    """The walk, or where the engine leaves it to its caller the reference's."""
    if session.offers("accept"):
        return session.accept(tree, targets, limit=limit)
    return accept(tree, targets, limit=limit)


def played(
    session: WatchedSession, tree: DraftTree, limit: EmitLimit = NO_LIMIT
) -> tuple[Acceptance, tuple[int, ...]]:
    """A round, fused where there is one: the walk, and the tokens that it emits (ACC-3)."""
    if session.offers("round"):
        done = session.round(tree, limit=limit)
        return done.acceptance, done.emitted
    acceptance = walked(session, tree, session.verify(tree).targets, limit)
    session.commit(acceptance)
    return acceptance, emitted(tree, acceptance)
