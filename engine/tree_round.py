"""A tree on the device: its forward, and the fused round that a captured graph replays.

The session decides whether a round may run and keeps the books; here are only kernels, in order.
Nothing comes to the host between the forward and the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kdtr.contract import Array, DraftTree, EmitLimit, Trace
from kdtr.engine.forward import Forward
from kdtr.engine.kernel_set import Rows, Visibility, Walk
from kdtr.engine.paging import PagedCache


class TreeForward(NamedTuple):
    """What a forward over a tree leaves on the device, padding included."""

    positions: Array  # [n]
    logits: Array  # [n, w]
    targets: Array  # [n]


class TreeRound(NamedTuple):
    """What a round leaves on the device, padding included."""

    positions: Array  # [n]
    targets: Array  # [n]
    walk: Walk
    moves: Array  # [n, 2]   logical source and destination slots


def forward_tree(forward: Forward, cache: PagedCache, rows: Rows, trace: Trace) -> TreeForward:
    """One forward over the tree, in slots L..L+n-1 (POS-1, MASK-1, MASK-2)."""
    assert rows.parents is not None, "staged without parents"
    kernels = forward.kernels.over(rows)
    trace("parents", None, rows.parents)
    positions, ancestors = kernels.tree_layout(rows.parents, rows.committed_len)
    visibility = Visibility(rows.committed_len, ancestors)
    logits = forward(cache, rows, positions, visibility, trace)  # [n, w]
    return TreeForward(positions, logits, kernels.argmax(logits))


def tree_round(forward: Forward, cache: PagedCache, rows: Rows, trace: Trace) -> TreeRound:
    """Verify, walk and compact (ACC-1 to ACC-4, COMMIT-1)."""
    kernels = forward.kernels.over(rows)
    positions, _, targets = forward_tree(forward, cache, rows, trace)
    walk = kernels.accept_walk(
        rows.tokens, rows.parents, targets, rows.stop_tokens, rows.max_emitted
    )
    moves = kernels.commit_rows(cache, walk.path, walk.accept_len, rows.committed_len)  # [n, 2]
    return TreeRound(positions, targets, walk, moves)


def walk_limits(tree: DraftTree, limit: EmitLimit, vocab_size: int) -> tuple[Sequence[int], int]:
    """The walk's stop tokens and max_emitted, as numbers that fit the device.

    A stop token outside the vocabulary is never emitted, and a round emits one token per node at
    most (ACC-3).
    """
    stops = sorted(token for token in limit.stop_tokens if token < vocab_size)
    return stops, len(tree) if limit.max_emitted is None else min(limit.max_emitted, len(tree))
