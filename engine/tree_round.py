"""A tree on the device: its forward, and the fused round that a captured graph will replay.

The session decides whether a round may run and keeps the books; here are only kernels, in order,
and one look at the outcome. Nothing comes to the host between the forward and the commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.contract import Acceptance, Array, DraftTree, EmitLimit, Trace
from kdtr.engine.forward import Forward
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache


@dataclass(frozen=True, slots=True)
class TreeOnDevice:
    """What a forward over a tree leaves on the device."""

    parents: Array  # [n]
    positions: Array  # [n]
    logits: Array  # [n, w]
    targets: Array  # [n]


@dataclass(frozen=True, slots=True)
class FusedRound:
    """A committed round on the host, without the padding of the device's fixed shapes (PAD-1)."""

    acceptance: Acceptance
    positions: tuple[int, ...]  # [n]
    targets: np.ndarray  # [n]
    moves: np.ndarray  # [accept_len, 2]   logical source and destination slots


def forward_tree(
    forward: Forward, cache: PagedCache, committed_len: int, tree: DraftTree, trace: Trace
) -> TreeOnDevice:
    """One forward over the tree, in slots L..L+n-1 (POS-1, MASK-1, MASK-2)."""
    kernels = forward.kernels
    parents = kernels.upload(np.array(tree.parents))  # [n]
    trace("parents", None, parents)
    positions, ancestors = kernels.tree_layout(parents, committed_len)  # [n], [n, n]
    visibility = Visibility(committed_len, ancestors)
    logits = forward(cache, committed_len, tree.tokens, positions, visibility, trace)  # [n, w]
    return TreeOnDevice(parents, positions, logits, kernels.argmax(logits))


def fused_round(
    forward: Forward,
    cache: PagedCache,
    committed_len: int,
    tree: DraftTree,
    limit: EmitLimit,
    trace: Trace,
) -> FusedRound:
    """Verify, walk and compact (ACC-1 to ACC-4, COMMIT-1)."""
    kernels = forward.kernels
    verified = forward_tree(forward, cache, committed_len, tree, trace)
    walk = kernels.accept_walk(
        kernels.upload(np.array(tree.tokens)),
        verified.parents,
        verified.targets,
        *walk_limits(forward, tree, limit),
    )
    moves = kernels.commit_rows(cache, walk.path, walk.accept_len, committed_len)  # [n, 2]

    accept_len = int(kernels.to_host(walk.accept_len)[0])
    path = tuple(kernels.to_host(walk.path)[:accept_len].tolist())
    return FusedRound(
        acceptance=Acceptance(path=path, bonus=int(kernels.to_host(walk.bonus)[0])),
        positions=tuple(kernels.to_host(verified.positions).tolist()),
        targets=kernels.to_host(verified.targets),
        moves=kernels.to_host(moves)[:accept_len],
    )


def walk_limits(forward: Forward, tree: DraftTree, limit: EmitLimit) -> tuple[Array, int]:
    """The walk's stop tokens and max_emitted, as numbers that fit the device.

    A stop token outside the vocabulary is never emitted, and a round emits one token per node at
    most (ACC-3).
    """
    stops = [token for token in limit.stop_tokens if token < forward.config.vocab_size]
    most = len(tree) if limit.max_emitted is None else min(limit.max_emitted, len(tree))
    return forward.kernels.upload(np.array(sorted(stops), np.int64)), most
