"""What a draft tree means: depth, path, position, visibility (TREE-1, POS-1, MASK-2)."""

import numpy as np

from kdtr.contract import DraftTree


def depths(tree: DraftTree) -> tuple[int, ...]:
    """Edges from the root, per node.

    >>> depths(DraftTree(tokens=(7, 3, 5, 3), parents=(-1, 0, 0, 2)))
    (0, 1, 1, 2)
    """
    found: list[int] = []
    for parent in tree.parents:
        found.append(0 if parent == -1 else found[parent] + 1)
    return tuple(found)


def path(tree: DraftTree, i: int) -> tuple[int, ...]:
    """The nodes root..i, both included.

    >>> path(DraftTree(tokens=(7, 3, 5, 3), parents=(-1, 0, 0, 2)), 3)
    (0, 2, 3)
    """
    nodes: list[int] = []
    while i != -1:
        nodes.append(i)
        i = tree.parents[i]
    return tuple(reversed(nodes))


def positions(tree: DraftTree, committed_len: int) -> tuple[int, ...]:
    """committed_len + depth, per node: what the rotary embedding uses (POS-1)."""
    return tuple(committed_len + depth for depth in depths(tree))


def visibility(tree: DraftTree) -> np.ndarray:
    """[n, n] bool: row i sees node j when j lies on path(i) (MASK-2).

    >>> visibility(DraftTree(tokens=(7, 3, 5), parents=(-1, 0, 0))).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [1, 0, 1]])
    """
    n = len(tree)
    visible = np.zeros((n, n), dtype=bool)
    for i in range(n):
        visible[i, list(path(tree, i))] = True
    return visible


def tree_mask(tree: DraftTree, committed_len: int) -> np.ndarray:
    """[n, L + n] bool: every committed slot, then the path (MASK-1, MASK-2)."""
    prefix = np.ones((len(tree), committed_len), dtype=bool)
    return np.concatenate([prefix, visibility(tree)], axis=1)
