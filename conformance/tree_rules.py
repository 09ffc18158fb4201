"""What the rules make of a draft tree, by the judge's own few lines: no engine's, no truth's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdtr.contract import DraftTree, EmitLimit


def node_depths(parents: Sequence[int]) -> list[int]:
    """Edges from the root, per node.

    >>> node_depths((-1, 0, 0, 2))
    [0, 1, 1, 2]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def tree_mask(parents: Sequence[int], committed_len: int) -> np.ndarray:
    """[n, L + n] bool: every committed slot, and in the tree the path (MASK-1, MASK-2).

    >>> tree_mask((-1, 0, 0), 1).astype(int)
    array([[1, 1, 0, 0],
           [1, 1, 1, 0],
           [1, 1, 0, 1]])
    """
    n = len(parents)
    visible = np.zeros((n, committed_len + n), dtype=bool)
    visible[:, :committed_len] = True
    for i, parent in enumerate(parents):
        if parent >= 0:
            visible[i] = visible[parent]
        visible[i, committed_len + i] = True
    return visible


def greedy_walk(tree: DraftTree, targets: Sequence[int]) -> tuple[int, ...]:
    """The accepted path, where nothing limits it (ACC-1).

    >>> greedy_walk(DraftTree((7, 3, 5, 3), (-1, 0, 0, 2)), (5, 1, 3, 9))
    (0, 2, 3)
    """
    below = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path = [0]
    while (child := below.get((path[-1], int(targets[path[-1]])))) is not None:
        path.append(child)
    return tuple(path)


def limited_walk(
    tree: DraftTree, targets: Sequence[int], limit: EmitLimit
) -> tuple[tuple[int, ...], int]:
    """The accepted path and the bonus, cut at the first token that the limit stops at (ACC-4).

    >>> limited_walk(DraftTree((7, 3, 5, 3), (-1, 0, 0, 2)), (5, 1, 3, 9), EmitLimit(max_emitted=2))
    ((0, 2), 3)
    """
    path = greedy_walk(tree, targets)
    emitted = (*(tree.tokens[node] for node in path[1:]), int(targets[path[-1]]))
    for j, token in enumerate(emitted):
        if token in limit.stop_tokens or j + 1 == limit.max_emitted:
            return path[: j + 1], token
    return path, emitted[-1]
