"""Depth, path, position and visibility, by definitions of their own."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract import DraftTree
from kdtr.reference import depths, path, positions, visibility
from kdtr.reference.tree import tree_mask

LAWS = settings(derandomize=True, deadline=None, max_examples=150, database=None)

#        0
#      1   2
#     3   4 6
#         5
BUSHY = DraftTree(tokens=(9, 1, 2, 1, 2, 1, 3), parents=(-1, 0, 0, 1, 2, 4, 2))


def is_ancestor(tree, j, i):
    """Recursively, upwards: i itself, or an ancestor of its parent."""
    return i == j or (tree.parents[i] != -1 and is_ancestor(tree, j, tree.parents[i]))


def test_a_bushy_tree_by_hand():
    assert (0, 1, 1, 2, 2, 3, 2) == depths(BUSHY)
    assert (0, 2, 4, 5) == path(BUSHY, 5)
    assert (0, 2, 6) == path(BUSHY, 6)
    assert (100, 101, 101, 102, 102, 103, 102) == positions(BUSHY, 100)


def test_the_root_is_at_committed_len():
    root_only = DraftTree(tokens=(4,), parents=(-1,))

    assert (0,) == depths(root_only)
    assert (0,) == path(root_only, 0)
    assert (0,) == positions(root_only, 0)
    assert (17,) == positions(root_only, 17)
    assert [[True]] == visibility(root_only).tolist()


def test_siblings_and_cousins_do_not_see_each_other():
    """MASK-2, column by column: who sees node 1, and who sees node 4."""
    visible = visibility(BUSHY)

    assert [1, 3] == np.flatnonzero(visible[:, 1]).tolist()
    assert [4, 5] == np.flatnonzero(visible[:, 4]).tolist()


@LAWS
@given(data=st.data())
def test_visible_is_the_node_and_its_ancestors(data, draft_trees):
    tree = data.draw(draft_trees(), label="tree")

    visible = visibility(tree)

    n = len(tree)
    expected = [[is_ancestor(tree, j, i) for j in range(n)] for i in range(n)]
    assert expected == visible.tolist()
    assert visible.dtype == np.bool_


@LAWS
@given(data=st.data(), committed_len=st.integers(0, 70))
def test_depth_counts_the_ancestors_and_position_adds_the_length(data, committed_len, draft_trees):
    tree = data.draw(draft_trees(), label="tree")

    found = depths(tree)

    counted = tuple(sum(is_ancestor(tree, j, i) for j in range(i)) for i in range(len(tree)))
    assert counted == found
    assert tuple(committed_len + depth for depth in counted) == positions(tree, committed_len)


@LAWS
@given(data=st.data())
def test_a_path_runs_from_the_root_over_parents(data, draft_trees):
    tree = data.draw(draft_trees(), label="tree")
    i = data.draw(st.integers(0, len(tree) - 1), label="node")

    nodes = path(tree, i)

    assert (0, i) == (nodes[0], nodes[-1])
    assert list(nodes[:-1]) == [tree.parents[node] for node in nodes[1:]]
    assert depths(tree)[i] == len(nodes) - 1


@LAWS
@given(data=st.data(), committed_len=st.integers(0, 9))
def test_every_committed_slot_is_visible_beside_the_tree(data, committed_len, draft_trees):
    """MASK-1: and the columns of the tree begin right behind them."""
    tree = data.draw(draft_trees(), label="tree")

    mask = tree_mask(tree, committed_len)

    assert (len(tree), committed_len + len(tree)) == mask.shape
    assert mask[:, :committed_len].all()
    np.testing.assert_array_equal(mask[:, committed_len:], visibility(tree))


def test_a_chain_sees_what_a_causal_run_sees():
    chain = DraftTree(tokens=(1, 1, 1, 1), parents=(-1, 0, 1, 2))

    np.testing.assert_array_equal(visibility(chain), np.tri(4, dtype=bool))
