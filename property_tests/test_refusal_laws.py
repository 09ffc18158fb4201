"""Refused input changes nothing: not the rows, not the root, not a verify that is pending."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import Acceptance, CacheError, LogicalCache, SessionError
from kdtr.property_tests.fewer_verbs import answers, place, place_again
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.refusals import wrong_calls
from kdtr.property_tests.strategies import Scene, nodes_of, scenes
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import path_to, walk
from kdtr.property_tests.watched import WatchedSession


def shown(session: WatchedSession) -> LogicalCache | None:
    """The committed rows, where the engine shows them."""
    return session.snapshot() if session.offers("snapshot") else None


@given(scene=scenes(max_nodes=5), data=st.data())
def test_a_refused_call_changes_nothing(engine: Subject, scene: Scene, data: st.DataObject) -> None:
    """FWD-3, SLOT-3, COMMIT-5, TREE-1: a refused call leaves rows, L, root and the pending verify;
    the commit that follows leaves what it leaves in a session that was never asked, bit for bit
    where determinism is declared."""
    model = scene.model
    # One spare slot behind the tree; a prompt of one token where roots cannot be set.
    max_len = max(len(scene.prompt), 1) + len(scene.tree) + 1
    placed = place(engine, model, scene.prompt, scene.tree, max_len=max_len)
    asked, tree = placed.session, placed.tree
    spared = place_again(engine, model, placed, max_len=max_len)
    judge = Judge(engine, model, tree_scene(tree))
    spared.verify(tree)
    targets = [row.target for row in answers(asked, tree)]
    before = shown(asked)
    calls = wrong_calls(asked, pending=True)
    wrong = data.draw(st.lists(st.sampled_from(calls), min_size=1, max_size=3), label="wrong")
    last = data.draw(nodes_of(tree), label="last accepted node")

    for entry in wrong:
        with pytest.raises(entry.error):
            entry.call(asked, tree, model.config.vocab_size)
        judge.same(f"L after {entry.label}", len(placed.prompt), asked.committed_len)
        judge.same(f"root after {entry.label}", tree.tokens[0], asked.root)
    what = f"after {[entry.label for entry in wrong]}"
    judge.same_cache(f"committed rows {what}", before, shown(asked))
    if asked.offers("accept"):
        path, bonus = walk(tree, targets)
        judge.same(f"acceptance {what}", Acceptance(path, bonus), asked.accept(tree))
    for session in (asked, spared):
        session.commit(Acceptance(path_to(tree, last), 0))
    judge.same(f"L {what}", spared.committed_len, asked.committed_len)
    judge.same(f"root {what}", 0, asked.root)
    if asked.offers("snapshot"):
        judge.repeated_cache(f"cache {what}", spared.snapshot(), asked.snapshot())


@given(scene=scenes(max_nodes=6))
def test_capacity_is_legal_up_to_equality(engine: Subject, scene: Scene) -> None:
    """SLOT-3: a tree that fills the session to its last slot is verified; with one slot less it is
    refused, and nothing is written."""
    model = scene.model
    needed = (len(scene.prompt) or not engine.offers("set_root")) + len(scene.tree)
    full = place(engine, model, scene.prompt, scene.tree, max_len=needed)

    full.session.verify(full.tree)

    # A session of no slots does not open, and where a root cannot be set it is prefilled.
    if needed - 1 < (len(full.prompt) or 1):
        return
    short = place_again(engine, model, full, max_len=needed - 1)
    before = shown(short)
    with pytest.raises(CacheError):
        short.verify(full.tree)
    judge = Judge(engine, model, tree_scene(full.tree))
    judge.same_cache("after a verify over capacity", before, shown(short))
    judge.same("L", len(full.prompt), short.committed_len)
    judge.same("root", full.tree.tokens[0], short.root)


@given(scene=scenes(max_nodes=5), data=st.data())
def test_a_commit_applies_once_to_the_latest_verify(
    engine: Subject, scene: Scene, data: st.DataObject
) -> None:
    """COMMIT-5: a second commit, and one after set_root or prefill, is a state error and changes
    nothing."""
    model = scene.model
    placed = place(engine, model, scene.prompt, scene.tree)
    session, tree = placed.session, placed.tree
    session.verify(tree)
    if data.draw(st.booleans(), label="commit first"):
        session.commit(Acceptance((0,), 0))
    elif data.draw(st.booleans(), label="set_root") and session.offers("set_root"):
        session.set_root(0)
    else:
        session.prefill([0])
    before, length, root = shown(session), session.committed_len, session.root

    with pytest.raises(SessionError):
        session.commit(Acceptance((0,), 0))

    judge = Judge(engine, model, tree_scene(tree))
    judge.same("root", root, session.root)
    judge.same("L", length, session.committed_len)
    judge.same_cache("after a second commit", before, shown(session))
