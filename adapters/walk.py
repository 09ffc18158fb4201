"""What the libraries know nothing of: a draft tree's depths, what it shows, and the greedy walk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdtr.contract import Acceptance, DraftTree, EmitLimit


def visible_nodes(tree: DraftTree) -> np.ndarray:
    """[n, n] bool: row i sees node j when j is i or an ancestor of i (MASK-2)."""
    n = len(tree)
    visible = np.zeros((n, n), dtype=bool)
    for i, parent in enumerate(tree.parents):
        if parent >= 0:
            visible[i] = visible[parent]  # parents precede children (TREE-1)
        visible[i, i] = True
    return visible


def greedy_walk(tree: DraftTree, targets: Sequence[int], limit: EmitLimit) -> Acceptance:
    """The accepted path and the bonus (ACC-1 to ACC-4).

    targets  one per node
    A token that ends the round is the bonus of the path so far, and its node is not entered.
    """
    path = [0]
    while True:
        target = int(targets[path[-1]])
        if target in limit.stop_tokens or len(path) == limit.max_emitted:
            break
        hits = [i for i, p in enumerate(tree.parents) if p == path[-1] and tree.tokens[i] == target]
        if not hits:
            break
        path.append(hits[0])  # the only one: siblings differ (TREE-2)
    return Acceptance(tuple(path), target)


def emitted_tokens(tree: DraftTree, acceptance: Acceptance) -> tuple[int, ...]:
    """The tokens of path[1:], then the bonus (ACC-3)."""
    return (*(tree.tokens[i] for i in acceptance.path[1:]), acceptance.bonus)
