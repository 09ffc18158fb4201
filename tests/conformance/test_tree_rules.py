"""The judge's own reading of a tree is the reference's, which shares no code with it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kdtr.conformance.tree_rules import greedy_walk, limited_walk, node_depths, tree_mask
from kdtr.contract import NO_LIMIT, DraftTree, EmitLimit
from kdtr.reference import tree as reference_tree
from kdtr.reference.accept import accept

# 0 ─┬ 1 ── 4
#    └ 2 ─┬ 3
#         └ 5
TREE = DraftTree((7, 3, 5, 3, 8, 2), (-1, 0, 0, 2, 1, 2))


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    n = draw(st.integers(1, 9))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, n)]
    tokens = [parents[:i].count(parent) for i, parent in enumerate(parents)]
    return DraftTree(tuple(tokens), tuple(parents))


def test_a_tree_by_hand() -> None:
    assert [0, 1, 1, 2, 2, 2] == node_depths(TREE.parents)
    assert [
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 0, 1, 0],
        [1, 1, 1, 0, 1, 0, 0, 1],
    ] == tree_mask(TREE.parents, 2).astype(int).tolist()
    assert (0, 2, 5) == greedy_walk(TREE, (5, 8, 2, 0, 0, 9))
    assert ((0, 2, 5), 9) == limited_walk(TREE, (5, 8, 2, 0, 0, 9), NO_LIMIT)


def test_the_walk_is_cut_where_a_limit_stops_it() -> None:
    targets = (5, 8, 2, 0, 0, 9)

    assert ((0,), 5) == limited_walk(TREE, targets, EmitLimit(max_emitted=1))
    assert ((0, 2), 2) == limited_walk(TREE, targets, EmitLimit(frozenset({2})))
    assert ((0,), 5) == limited_walk(TREE, targets, EmitLimit(frozenset({2, 9, 5})))
    assert ((0, 2, 5), 9) == limited_walk(TREE, targets, EmitLimit(frozenset({9, 7}), 3))


@given(tree=trees(), data=st.data())
def test_it_is_what_the_reference_makes_of_the_tree(tree: DraftTree, data: st.DataObject) -> None:
    token = st.integers(0, 4)
    targets = data.draw(st.lists(token, min_size=len(tree), max_size=len(tree)))
    limit = EmitLimit(
        data.draw(st.frozensets(token, max_size=2)), data.draw(st.none() | st.integers(1, 4))
    )

    expected = accept(tree, targets, limit=limit)

    assert list(reference_tree.depths(tree)) == node_depths(tree.parents)
    assert np.array_equal(reference_tree.tree_mask(tree, 3), tree_mask(tree.parents, 3))
    assert (expected.path, expected.bonus) == limited_walk(tree, targets, limit)
