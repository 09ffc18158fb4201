"""POS: positions of nodes, as the rotation uses them."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import on_open, wrap

POSITIONS = MutantClass("positions")


@POSITIONS.mutant("M001", "POS-1", breaks="POS-1", first_seen_at="positions", needs="core")
def drafts_high(engine: Any) -> None:
    """Every node but the root is one too high."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions + (np.arange(len(parents)) > 0), ancestors

    wrap(engine, tree_layout=tree_layout)


@POSITIONS.mutant("M002", "POS-2", breaks="POS-1", first_seen_at="positions", needs="core")
def position_by_index(engine: Any) -> None:
    """Node i is at L + i, as if the tree were a chain."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        _, ancestors = original(parents, committed_len)
        return committed_len + np.arange(len(parents)), ancestors

    wrap(engine, tree_layout=tree_layout)


@POSITIONS.mutant("M005", "POS-5", breaks="POS-1", first_seen_at="positions", needs="core")
def root_high_after_a_round(engine: Any) -> None:
    """The root is at L + 1 in every round but a session's first."""
    is_later = [False]

    def change(session: Any) -> None:
        staged, trees = session._staged, [0]

        def watched(tokens: Any, parents: Any = None, *limits: Any) -> Any:
            is_later[0] = trees[0] > 0
            trees[0] += parents is not None
            return staged(tokens, parents, *limits)

        session._staged = watched

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions + (is_later[0] & (np.arange(len(parents)) == 0)), ancestors

    on_open(engine, change)
    wrap(engine, tree_layout=tree_layout)


POSITIONS.waits("M007", "POS-7", "batch", "accept_len of a batch rolled by one request")


@POSITIONS.mutant("M008", "POS-8", breaks="FWD-4", first_seen_at="embedding", needs="core")
def no_embedding_at_zero(engine: Any) -> None:
    """The embedding of the row at position 0 is zero."""
    at: list[Any] = []

    def rotary_angles(original: Any, positions: Any, *rest: Any) -> Any:
        at[:] = [positions]
        return original(positions, *rest)

    def embed(original: Any, table: Any, tokens: Any) -> Any:
        return original(table, tokens) * (at[0] != 0)[:, None]

    wrap(engine, rotary_angles=rotary_angles, embed=embed)
