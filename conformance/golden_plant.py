"""Planting outcomes: trees whose accepted path, and drafts whose hits, are known beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kdtr.conformance.case import Drafted, Planted
from kdtr.conformance.seed_model import hash_below, hash_u64
from kdtr.contract import CaseError, DraftTree, KdtrError


def planted_tree(where: str, plan: Planted, ahead: Sequence[int], vocab_size: int) -> DraftTree:
    """The tree of `plan` with tokens that make exactly plan.path the accepted one.

    ahead  the root and the tokens that follow it by plain decoding
    Off the path every child of a node on it misses that node's target; token 0 and the last
    token id come up first, because engines treat them as padding. With plan.tied the first of them
    has the target's twin, where the vocabulary has one.
    """
    path = plan.path
    if not path:
        raise CaseError(f"{where}: the path is empty; expected at least the root, node 0")
    try:
        shape = DraftTree(tuple(range(len(plan.parents))), plan.parents)
    except KdtrError as error:
        raise CaseError(f"{where}: {error}") from error
    for above, node in zip((-1, *path), path, strict=False):
        if not 0 <= node < len(shape) or shape.parents[node] != above:
            raise CaseError(
                f"{where}: path = {path} does not follow parents = {plan.parents} at node {node}; "
                "expected root, child, grandchild, ..."
            )
    targets = {node: ahead[k + 1] for k, node in enumerate(path)}
    tokens = [ahead[0]]
    for node, parent in enumerate(shape.parents[1:], start=1):
        if node in targets:
            tokens.append(ahead[path.index(node)])
            continue
        siblings = [i for i in range(1, node) if shape.parents[i] == parent]
        if plan.tied is not None and parent in targets and not {*siblings} - targets.keys():
            twin = targets[parent] + plan.tied
            if twin < vocab_size:
                tokens.append(twin)
                continue
        taken = {tokens[i] for i in siblings}
        taken.add(targets.get(parent, -1))
        # A later sibling on the path needs its token too, which is this parent's target.
        tokens.append(_miss(f"{where}, node {node}", tokens[0], taken, vocab_size))
    return DraftTree(tuple(tokens), shape.parents)


def draft_logits(where: str, plan: Drafted, ahead: Sequence[int], vocab_size: int) -> np.ndarray:
    """float32 [depth, vocab]: hashed noise with the truth's next token at the planned rank.

    Ranks 2 and 3 are an exact tie where neither is the truth.
    """
    rows = []
    for depth, rank in enumerate(plan.ranks):
        stream = f"{where} depth {depth} of {ahead[0]}"
        noise = (hash_u64(0, stream, vocab_size) >> np.uint64(40)).astype(np.float32)
        row = noise * np.float32(2.0**-23)  # 0..2, 24 bits, so that ties are rare
        head = np.argsort(-row, kind="stable")[:4]
        row[head] += np.array([9.0, 8.0, 7.0, 6.5], dtype=np.float32)  # a draft that has an opinion
        truth = ahead[depth + 1]
        if rank is None:
            row[truth] = -np.inf
        else:
            if not 0 <= rank < vocab_size:
                raise CaseError(f"{where}: rank {rank}; expected 0..{vocab_size - 1}")
            ranked = np.argsort(-row, kind="stable")
            row[[truth, ranked[rank]]] = row[[ranked[rank], truth]]
        second, third = (int(i) for i in np.argsort(-row, kind="stable")[2:4])
        if truth not in (second, third):
            row[third] = row[second]
        rows.append(row)
    return np.stack(rows) if rows else np.empty((0, vocab_size), dtype=np.float32)


def _miss(where: str, root: int, taken: set[int], vocab_size: int) -> int:
    """A token outside `taken`: 0 and the last id by preference, then hashed ones."""
    hashed = hash_below(root, where, 64, vocab_size).tolist()
    preferred = [0, vocab_size - 1] if hashed[0] % 4 == 0 else []
    for token in (*preferred, *hashed, *range(vocab_size)):
        if token not in taken:
            return int(token)
    raise CaseError(f"{where}: {len(taken)} siblings and a vocabulary of {vocab_size}: none left")
