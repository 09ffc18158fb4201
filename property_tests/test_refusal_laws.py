"""Refused input changes nothing: not the rows, not the root, not a verify that is pending."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from kdtr.contract import (
    Acceptance,
    CacheError,
    DraftTree,
    InputError,
    KdtrError,
    Session,
    SessionError,
    TreeError,
)
from kdtr.property_tests.strategies import Scene, nodes_of, scenes
from kdtr.property_tests.subject import Judge, Subject, different_bits, tree_scene
from kdtr.property_tests.trees import path_to, under_root


@dataclass(frozen=True, slots=True)
class Wrong:
    """A call that every engine refuses; `tree` is verified and pending, w the vocabulary's size."""

    label: str
    error: type[KdtrError]
    call: Callable[[Session, DraftTree, int], object]

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        printer.text(self.label)


def _too_many(session: Session, tree: DraftTree, w: int) -> object:
    """One node more than there are slots: the session has one spare behind the tree."""
    wide = (*range(w), *range(w))[: len(tree) + 2]
    return session.verify(
        under_root(DraftTree(wide, tuple(range(-1, len(wide) - 1))), tree.tokens[0])
    )


def _off_path(session: Session, tree: DraftTree, w: int) -> None:
    """A path that leaves out the root's child, or that ends behind the tree."""
    deep = [i for i in range(len(tree)) if len(path_to(tree, i)) > 2]
    session.commit(Acceptance((0, deep[0] if deep else len(tree)), 0))


WRONG = (
    Wrong(
        "verify under another root",
        TreeError,
        lambda s, t, w: s.verify(under_root(t, (t.tokens[0] + 1) % w)),
    ),
    Wrong(
        "verify a token outside the vocabulary",
        TreeError,
        lambda s, t, w: s.verify(DraftTree((*t.tokens, w), (*t.parents, 0))),
    ),
    Wrong(
        "round under another root",
        TreeError,
        lambda s, t, w: s.round(under_root(t, (t.tokens[0] + 1) % w)),
    ),
    Wrong("verify over capacity", CacheError, _too_many),
    Wrong("prefill over capacity", CacheError, lambda s, t, w: s.prefill([0] * (len(t) + 2))),
    Wrong("prefill a token outside the vocabulary", InputError, lambda s, t, w: s.prefill([0, w])),
    Wrong("prefill a negative token", InputError, lambda s, t, w: s.prefill([-1])),
    Wrong("prefill nothing", InputError, lambda s, t, w: s.prefill([])),
    Wrong("set a root outside the vocabulary", InputError, lambda s, t, w: s.set_root(w)),
    Wrong("commit what is no path", InputError, _off_path),
    Wrong(
        "commit a node behind the tree",
        InputError,
        lambda s, t, w: s.commit(Acceptance((0, len(t)), 0)),
    ),
    Wrong(
        "commit a bonus outside the vocabulary",
        InputError,
        lambda s, t, w: s.commit(Acceptance((0,), w)),
    ),
    Wrong(
        "accept with a target too few", InputError, lambda s, t, w: s.accept(t, [0] * (len(t) - 1))
    ),
    Wrong(
        "accept another tree than the verified",
        SessionError,
        lambda s, t, w: s.accept(DraftTree((*t.tokens, w - 1), (*t.parents, len(t) - 1))),
    ),
    Wrong("build with budget -1", InputError, lambda s, t, w: s.build(np.zeros((1, w)), -1)),
    Wrong("build from NaN", InputError, lambda s, t, w: s.build(np.full((1, w), np.nan), 1)),
    Wrong("build from +inf", InputError, lambda s, t, w: s.build(np.full((1, w), np.inf), 1)),
    Wrong(
        "build from another vocabulary",
        InputError,
        lambda s, t, w: s.build(np.zeros((1, w + 1)), 1),
    ),
    Wrong(
        "forward under a mask that hides a row from itself",
        InputError,
        lambda s, t, w: s.forward_tokens(
            [0], np.array([0]), np.zeros((1, s.committed_len + 1), bool)
        ),
    ),
    Wrong(
        "forward at a negative position",
        InputError,
        lambda s, t, w: s.forward_tokens(
            [0], np.array([-1]), np.ones((1, s.committed_len + 1), bool)
        ),
    ),
)


@given(scene=scenes(max_nodes=5), data=st.data())
def test_a_refused_call_changes_nothing(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """FWD-3, SLOT-3, COMMIT-5, TREE-1: a refused call leaves rows, L, root and the pending verify;
    the commit that follows leaves what it leaves in a session that was never asked."""
    model, tree = scene.model, scene.tree
    wrong = data.draw(st.lists(st.sampled_from(WRONG), min_size=1, max_size=3), label="wrong")
    last = data.draw(nodes_of(tree), label="last accepted node")
    max_len = len(scene.prompt) + len(tree) + 1
    asked, spared = (engine.committed(model, scene.prompt, max_len=max_len) for _ in range(2))
    for session in (asked, spared):
        session.set_root(tree.tokens[0])
        session.verify(tree)

    judge = Judge(engine, model, tree_scene(tree, last))
    for entry in wrong:
        with pytest.raises(entry.error):
            entry.call(asked, tree, model.config.vocab_size)
        judge.same(f"L after {entry.label}", len(scene.prompt), asked.committed_len)
        judge.same(f"root after {entry.label}", tree.tokens[0], asked.root)
    judge.same("acceptance", spared.accept(tree), asked.accept(tree))
    for session in (asked, spared):
        session.commit(Acceptance(path_to(tree, last), 0))
    expected, actual = spared.snapshot(), asked.snapshot()
    for field in ("tokens", "positions", "c_kv", "k_pe"):
        difference = different_bits(getattr(expected, field), getattr(actual, field))
        judge.same(f"{field} after {[entry.label for entry in wrong]}", None, difference)


@given(scene=scenes(max_nodes=6))
def test_capacity_is_legal_up_to_equality(engine: Subject, scene: Scene) -> None:
    """SLOT-3: a tree that fills the session to its last slot is verified; with one slot less it is
    refused, and nothing is written."""
    model, tree, prompt = scene.model, scene.tree, scene.prompt
    needed = len(prompt) + len(tree)
    full = engine.committed(model, prompt, max_len=needed)
    full.set_root(tree.tokens[0])

    full.verify(tree)

    if needed == 1:
        return  # a session of no slots does not open
    short = engine.committed(model, prompt, max_len=needed - 1)
    short.set_root(tree.tokens[0])
    before = short.snapshot()
    with pytest.raises(CacheError):
        short.verify(tree)
    after = short.snapshot()
    judge = Judge(engine, model, tree_scene(tree))
    judge.same("c_kv", None, different_bits(before.c_kv, after.c_kv))
    judge.same("L", len(prompt), short.committed_len)


@given(scene=scenes(max_nodes=5), data=st.data())
def test_a_commit_applies_once_to_the_latest_verify(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-5: a second commit, and one after set_root or prefill, is a state error and changes
    nothing."""
    model, tree = scene.model, scene.tree
    session = engine.committed(model, scene.prompt)
    session.set_root(tree.tokens[0])
    session.verify(tree)
    if data.draw(st.booleans(), label="commit first"):
        session.commit(Acceptance((0,), 0))
    elif data.draw(st.booleans(), label="set_root"):
        session.set_root(0)
    else:
        session.prefill([0])
    before, root = session.snapshot(), session.root

    with pytest.raises(SessionError):
        session.commit(Acceptance((0,), 0))

    judge = Judge(engine, model, tree_scene(tree))
    judge.same("root", root, session.root)
    judge.same("tokens", before.tokens.tolist(), session.snapshot().tokens.tolist())
    judge.same("c_kv", None, different_bits(before.c_kv, session.snapshot().c_kv))
