"""Host kernels of the tree: layout, greedy walk, compaction (POS-1, MASK-2, ACC-*, COMMIT-1)."""

from __future__ import annotations

import numpy as np

from kdtr.engine.kernel_set import Walk
from kdtr.engine.paging import PagedCache, physical_rows

_NOTHING = -1  # past the end of a path, and the parent of the root


def tree_layout(parents: np.ndarray, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
    """parents [n] -> positions [n], ancestors [n, n] bool: row i sees its own path."""
    n = len(parents)
    ancestors = np.zeros((n, n), bool)
    for i, parent in enumerate(parents.tolist()):
        if parent != _NOTHING:
            ancestors[i] = ancestors[parent]  # parents precede children (TREE-1)
        ancestors[i, i] = True
    depths = ancestors.sum(axis=1) - 1  # [n]   edges from the root: the path without the node
    return committed_len + depths, ancestors


def causal_layout(n: int, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
    """positions [n] from L on, block [n, n] bool: row i sees rows 0..i (FWD-1)."""
    return committed_len + np.arange(n), np.tri(n, dtype=bool)


def accept_walk(
    tokens: np.ndarray,
    parents: np.ndarray,
    targets: np.ndarray,
    stop_tokens: np.ndarray,
    max_emitted: int,
) -> Walk:
    """tokens, parents, targets [n] -> the accepted path and the bonus.

    At node k of the path the round emits targets[path[k]]: the token of path[k + 1], or the
    bonus. So the emitted token that ends the round is found before the next node is entered, and
    it is the bonus of the path so far (ACC-4).
    """
    # One node each: siblings differ (TREE-2). Of equals, in a tree that no verb takes, the first.
    child: dict[tuple[int, int], int] = {}
    for i, key in enumerate(zip(parents.tolist(), tokens.tolist(), strict=True)):
        child.setdefault(key, i)
    path = np.full(len(tokens), _NOTHING, np.int64)
    path[0] = node = 0
    accept_len = 1
    while accept_len < max_emitted and targets[node] not in stop_tokens:
        found = child.get((node, int(targets[node])))
        if found is None:
            break
        path[accept_len] = node = found
        accept_len += 1
    return Walk(path, np.array([accept_len]), np.array([targets[node]]))


def commit_rows(
    cache: PagedCache, path: np.ndarray, accept_len: np.ndarray, committed_len: int
) -> np.ndarray:
    """Slot L + path[k] -> slot L + k in every layer -> moves [n, 2]; unused rows are -1.

    Pure copies: a node was rotated at L + depth, which is where it lands. The gather on the right
    is complete before the scatter on the left begins, which is the buffer that COMMIT-1 asks for.
    """
    a = int(accept_len[0])
    moves = np.full((len(path), 2), _NOTHING, np.int64)
    moves[:a, 0] = committed_len + path[:a]
    moves[:a, 1] = committed_len + np.arange(a)
    source, destination = physical_rows(cache.page_table, cache.page_size, moves[:a].T)  # [a] each
    cache.rows[:, destination] = cache.rows[:, source]
    return moves
