"""Which tokens a row hangs on: the mask and the cache of an engine of which nothing is known.

One token is exchanged, and the rows that move are those that read it. A row moves by rounding too,
so several tokens take its place, and the largest movement counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kdtr.conformance.self_noise import apart
from kdtr.contract import DraftTree

_TRIES = 3

Ask = Callable[[DraftTree], np.ndarray]


def exchanged(tree: DraftTree, node: int, vocab_size: int, salt: int) -> DraftTree:
    """The tree with another token at the node, unlike its siblings'."""
    taken = {tree.tokens[i] for i in range(len(tree)) if tree.parents[i] == tree.parents[node]} | {
        tree.tokens[node]
    }
    token = (tree.tokens[node] + 1 + salt * 7919) % vocab_size
    while token in taken:
        token = (token + 1) % vocab_size
    return DraftTree((*tree.tokens[:node], token, *tree.tokens[node + 1 :]), tree.parents)


def influence(
    tree: DraftTree, ask: Ask, vocab_size: int, bounds: np.ndarray, nodes: Sequence[int]
) -> np.ndarray:
    """[rows, n] bool: whether a row of `ask(tree)` [rows, w] moves beyond its bounds [rows, w] when
    the node's token is exchanged; only `nodes` are tried, the others' columns are False."""
    rows = ask(tree)
    moved = np.zeros((len(rows), len(tree)), dtype=bool)
    for node in nodes:
        for salt in range(_TRIES):
            other = ask(exchanged(tree, node, vocab_size, salt))
            for i, row in enumerate(rows):
                moved[i, node] |= apart(row, other[i], bounds[i]) > 1
    return moved
