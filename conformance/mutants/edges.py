"""EDGE: budget 0, an empty prefix, nodes of padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.padded import Padded
from kdtr.conformance.mutants.planting import on_commit, on_open, wrap
from kdtr.contract import DraftTree

EDGES = MutantClass("edges")


@EDGES.mutant("M069", "EDGE-1", breaks="COMMIT-2", first_seen_at="committed_len", needs="core")
def lone_root_not_kept(engine: Any) -> None:
    """A round of the root alone appends nothing: L stays."""
    on_commit(engine, lambda parents, path, session: path if len(parents) > 1 else [])


@EDGES.mutant(
    "M071", "EDGE-3", breaks="PAD-1", also=("ACC-2",), first_seen_at="bonus", needs="core"
)
def padding_is_walkable(engine: Any) -> None:
    """Nodes of padding are children of the root, and may be walked: the path is told without them.

    The bucket is large, and their tokens count up: many a target is among them.
    """

    def change(padded: Padded, _: dict[Any, Any], rows: Any) -> Any:
        tokens = rows.tokens.copy()
        tokens[padded.rows :] = np.arange(padded.n - padded.rows)
        return rows._replace(tokens=tokens)

    padded = Padded(engine, change, bucket=32)

    def accept_walk(original: Any, tokens: Any, parents: Any, *rest: Any) -> Any:
        rows = padded.rows if len(tokens) == padded.n else len(tokens)
        parents = np.where(np.arange(len(tokens)) < rows, parents, 0)
        walk = original(tokens, parents, *rest)
        own = walk.path < rows
        return walk._replace(
            path=np.where(own, walk.path, -1),
            accept_len=np.array([((walk.path >= 0) & own).sum()]),
        )

    wrap(engine, accept_walk=accept_walk)


@EDGES.mutant("M072", "EDGE-4", breaks="PAD-1", first_seen_at="parents", needs="core")
def lone_root_padded(engine: Any) -> None:
    """A root alone runs as a chain of four, filled up with token 0."""

    def change(session: Any) -> None:
        verify, round_ = session.verify, session.round

        def padded(tree: Any) -> Any:
            root = tree.tokens[0]
            return tree if len(tree) > 1 else DraftTree((root, 0, 0, 0), (-1, 0, 1, 2))

        session.verify = lambda tree, **rest: verify(padded(tree), **rest)
        session.round = lambda tree, **rest: round_(padded(tree), **rest)

    on_open(engine, change)


@EDGES.mutant("M073", "EDGE-5", breaks="MASK-2", first_seen_at="scores", needs="core")
def empty_prefix_of_one(engine: Any) -> None:
    """In the attention of a tree an empty prefix counts as one of one slot."""

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        if seen.open_len == 0 and seen.block.shape[0] == seen.block.shape[1]:
            seen = replace(seen, open_len=1, block=seen.block[:, :-1])
        return original(cache, layer, q_latent, q_pe, seen, *rest)

    wrap(engine, verify_attn=verify_attn)
