"""The walk, by a recursive definition; the cut of ACC-4; the moves of COMMIT-1."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract import Acceptance, DraftTree, EmitLimit, InputError
from kdtr.reference import accept, commit_moves, emitted, path

LAWS = settings(derandomize=True, deadline=None, max_examples=200, database=None)

#   0 (7): targets 5        the walk: 0 -> 2 -> 3 -> bonus 9
#   1 (3)  2 (5)
#          3 (3)
TREE, TARGETS = DraftTree(tokens=(7, 3, 5, 3), parents=(-1, 0, 0, 2)), (5, 1, 3, 9)


def accepted(tree, targets, i):
    """A node is accepted if it is the root, or its parent is and wants its token."""
    parent = tree.parents[i]
    return parent == -1 or (accepted(tree, targets, parent) and targets[parent] == tree.tokens[i])


def draw_case(data, draft_trees, vocab=4):
    tree = data.draw(draft_trees(vocab), label="tree")
    n = len(tree)
    targets = data.draw(
        st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n), label="targets"
    )
    return tree, targets


@LAWS
@given(data=st.data())
def test_the_path_is_every_accepted_node(data, draft_trees):
    """ACC-1, ACC-2."""
    tree, targets = draw_case(data, draft_trees)

    acceptance = accept(tree, targets)

    nodes = tuple(i for i in range(len(tree)) if accepted(tree, targets, i))
    assert nodes == acceptance.path
    assert nodes == path(tree, nodes[-1])
    assert targets[nodes[-1]] == acceptance.bonus


@LAWS
@given(data=st.data())
def test_a_round_emits_accept_len_targets_along_the_path(data, draft_trees):
    """ACC-3: what is emitted is what each accepted node wanted."""
    tree, targets = draw_case(data, draft_trees)
    acceptance = accept(tree, targets)

    tokens = emitted(tree, acceptance)

    assert tuple(targets[i] for i in acceptance.path) == tokens


@LAWS
@given(data=st.data())
def test_the_limit_cuts_the_emitted_tokens_at_the_first_end(data, draft_trees):
    """ACC-4: the emission is that without a limit, up to a stop token or max_emitted tokens."""
    tree, targets = draw_case(data, draft_trees)
    stops = data.draw(st.frozensets(st.integers(0, 3), max_size=2), label="stop tokens")
    most = data.draw(st.none() | st.integers(1, 5), label="max_emitted")
    free = accept(tree, targets)

    acceptance = accept(tree, targets, limit=EmitLimit(stop_tokens=stops, max_emitted=most))

    expected = []
    for token in emitted(tree, free):
        expected.append(token)
        if token in stops or len(expected) == most:
            break
    assert tuple(expected) == emitted(tree, acceptance)
    assert free.path[: len(expected)] == acceptance.path
    assert expected[-1] == acceptance.bonus


@LAWS
@given(data=st.data(), committed_len=st.integers(0, 50))
def test_moves_go_to_ascending_slots_and_never_overwrite_an_unread_row(
    data, committed_len, draft_trees
):
    tree, targets = draw_case(data, draft_trees)
    nodes = accept(tree, targets).path

    moves = commit_moves(nodes, committed_len)

    assert [committed_len + i for i in nodes] == [source for source, _ in moves]
    slots = [slot for _, slot in moves]
    assert list(range(committed_len, committed_len + len(nodes))) == slots
    assert all(slot <= source for source, slot in moves)


LIMITS = {
    "none": (EmitLimit(), (0, 2, 3), 9),
    "the bonus is a stop token": (EmitLimit(stop_tokens=frozenset({9})), (0, 2, 3), 9),
    "stop at depth 1": (EmitLimit(stop_tokens=frozenset({5})), (0,), 5),
    "stop at depth 2": (EmitLimit(stop_tokens=frozenset({3})), (0, 2), 3),
    "the first of two stops": (EmitLimit(stop_tokens=frozenset({9, 5})), (0,), 5),
    "the root is no emission": (EmitLimit(stop_tokens=frozenset({7})), (0, 2, 3), 9),
    "a rejected node is no emission": (EmitLimit(stop_tokens=frozenset({1})), (0, 2, 3), 9),
    "one": (EmitLimit(max_emitted=1), (0,), 5),
    "two": (EmitLimit(max_emitted=2), (0, 2), 3),
    "as many as there are": (EmitLimit(max_emitted=3), (0, 2, 3), 9),
    "more than there are": (EmitLimit(max_emitted=4), (0, 2, 3), 9),
    "a stop before the limit": (
        EmitLimit(stop_tokens=frozenset({5}), max_emitted=2),
        (0,),
        5,
    ),
    "the limit before a stop": (
        EmitLimit(stop_tokens=frozenset({9}), max_emitted=2),
        (0, 2),
        3,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_by_hand(name):
    limit, nodes, bonus = LIMITS[name]

    assert Acceptance(nodes, bonus) == accept(TREE, TARGETS, limit=limit)


def test_targets_of_any_integer_type_become_python_integers():
    acceptance = accept(TREE, np.array(TARGETS, dtype=np.uint8))

    assert Acceptance((0, 2, 3), 9) == acceptance
    assert int is type(acceptance.bonus)


def test_a_child_is_found_by_its_parent_and_token():
    """Node 3 carries the root's target, but hangs below node 1."""
    tree = DraftTree(tokens=(7, 3, 4, 5), parents=(-1, 0, 0, 1))

    assert Acceptance((0,), 5) == accept(tree, (5, 5, 5, 5))


@pytest.mark.parametrize("n", [3, 5])
def test_one_target_per_node(n):
    with pytest.raises(InputError) as refusal:
        accept(TREE, (1,) * n)

    assert f"{n} targets for 4 nodes; expected one per node" == str(refusal.value)
