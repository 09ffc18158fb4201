"""The walk: against a definition of its own, the recursion of `trees.py`."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kdtr.contract import NO_LIMIT, Acceptance, DraftTree, EmitLimit, Session
from kdtr.property_tests.judge import Judge, tree_scene
from kdtr.property_tests.profiles import cheap
from kdtr.property_tests.strategies import (
    PLAIN,
    SmallModel,
    draft_trees,
    emit_limits,
    targets_of,
    topological_orders,
)
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.trees import path_tokens, reordered, walk
from kdtr.reference import commit_moves, emitted

MODEL = SmallModel()
VOCAB_SIZE = PLAIN.vocab_size


def opened(engine: Subject) -> Session:
    """A session: accept with given targets needs no more."""
    return engine.open(MODEL)


@cheap()
@given(data=st.data(), tree=draft_trees())
def test_the_walk_follows_the_targets(
    engine: Subject, data: st.DataObject, tree: DraftTree
) -> None:
    """ACC-1, ACC-2: the path is the longest whose tokens are the targets above them; the bonus is
    the target of its last node."""
    targets = data.draw(targets_of(tree, VOCAB_SIZE), label="targets")

    acceptance = opened(engine).accept(tree, targets)

    judge = Judge(engine, MODEL, tree_scene(tree, *acceptance.path))
    path, bonus = walk(tree, targets)
    judge.same("acceptance", Acceptance(path, bonus), acceptance)


@cheap()
@given(data=st.data(), tree=draft_trees(), limit=emit_limits())
def test_the_walk_stops_at_a_stop_token_and_at_the_length_limit(
    engine: Subject, data: st.DataObject, tree: DraftTree, limit: EmitLimit
) -> None:
    """ACC-4, ACC-3: the first stop token or the last token allowed becomes the bonus, and the
    round emits accept_len tokens, which end with it."""
    targets = data.draw(targets_of(tree, VOCAB_SIZE), label="targets")
    session = opened(engine)

    acceptance = session.accept(tree, targets, limit=limit)

    judge = Judge(engine, MODEL, tree_scene(tree, *acceptance.path))
    path, bonus = walk(tree, targets, limit)
    judge.same("acceptance", Acceptance(path, bonus), acceptance)
    free = session.accept(tree, targets, limit=NO_LIMIT)
    uncut = (*path_tokens(tree, free.path[-1])[1:], free.bonus)
    judge.same("emitted", uncut[: len(path)], emitted(tree, acceptance))


@cheap()
@given(data=st.data(), tree=draft_trees())
def test_the_walk_does_not_see_the_order_of_the_nodes(
    engine: Subject, data: st.DataObject, tree: DraftTree
) -> None:
    """TREE-1, ACC-1, LOSSLESS: in another topological order the walk accepts the same nodes."""
    targets = data.draw(targets_of(tree, VOCAB_SIZE), label="targets")
    order = data.draw(topological_orders(tree), label="order")
    session = opened(engine)

    acceptance = session.accept(tree, targets)
    other = session.accept(reordered(tree, order), [targets[node] for node in order])

    judge = Judge(engine, MODEL, tree_scene(tree, *acceptance.path))
    judge.same("path", acceptance.path, tuple(order[k] for k in other.path))
    judge.same("bonus", acceptance.bonus, other.bonus)


@cheap()
@given(data=st.data(), tree=draft_trees(), committed_len=st.integers(0, 9))
def test_commit_moves_close_the_gaps(
    data: st.DataObject, tree: DraftTree, committed_len: int
) -> None:
    """COMMIT-1: move k is from slot L + path[k] to slot L + k; done one after the other in the
    order given, no move reads a slot that an earlier one wrote over."""
    targets = data.draw(targets_of(tree, VOCAB_SIZE), label="targets")
    path, _ = walk(tree, targets)

    moves = commit_moves(path, committed_len)

    slots = {committed_len + i: i for i in range(len(tree))}
    for source, destination in moves:
        slots[destination] = slots[source]
    assert list(path) == [slots[committed_len + k] for k in range(len(path))]
    assert [committed_len + k for k in range(len(path))] == [to for _, to in moves]
