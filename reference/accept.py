"""The greedy walk, what it emits, and where its rows go (ACC-1 to ACC-4, COMMIT-1)."""

from __future__ import annotations

from collections.abc import Sequence

from kdtr.contract import NO_LIMIT, Acceptance, DraftTree, EmitLimit, InputError


def accept(tree: DraftTree, targets: Sequence[int], *, limit: EmitLimit = NO_LIMIT) -> Acceptance:
    """Walk from the root to the child whose token is the current node's target.

    >>> accept(DraftTree(tokens=(7, 3, 5, 3), parents=(-1, 0, 0, 2)), targets=(5, 1, 3, 9))
    Acceptance(path=(0, 2, 3), bonus=9)
    """
    if len(targets) != len(tree):
        raise InputError(f"{len(targets)} targets for {len(tree)} nodes; expected one per node")
    child = {edge: i for i, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    path = [0]
    while (follower := child.get((path[-1], int(targets[path[-1]])))) is not None:
        path.append(follower)
    return _cut(tree, Acceptance(tuple(path), int(targets[path[-1]])), limit)


def emitted(tree: DraftTree, acceptance: Acceptance) -> tuple[int, ...]:
    """The tokens of path[1:], then the bonus (ACC-3)."""
    return (*(tree.tokens[i] for i in acceptance.path[1:]), acceptance.bonus)


def commit_moves(path: Sequence[int], committed_len: int) -> tuple[tuple[int, int], ...]:
    """(source, destination) slots of the accepted path, in the order of COMMIT-1.

    >>> commit_moves((0, 2, 3), 10)
    ((10, 10), (12, 11), (13, 12))
    """
    return tuple((committed_len + node, committed_len + k) for k, node in enumerate(path))


def _cut(tree: DraftTree, acceptance: Acceptance, limit: EmitLimit) -> Acceptance:
    """ACC-4: emitted token j, a stop token or the last allowed, becomes the bonus."""
    for j, token in enumerate(emitted(tree, acceptance)):
        if token in limit.stop_tokens or j + 1 == limit.max_emitted:
            return Acceptance(acceptance.path[: j + 1], token)
    return acceptance
