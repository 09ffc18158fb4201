"""Eight faults whose smallest counterexample is known: `shrinking_faults:make_engine`, fault=NAME.

Three of them are planted in `planted_faults.py`, which this module finds by itself: the folder of
this file alone has to be importable. Each fault has the law that names it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.conformance import load_engine
from kdtr.conformance.mutants import Plant
from kdtr.conformance.mutants.planting import on_open, physical, wrap
from kdtr.conformance.mutants.positions import position_by_index

sys.path.append(str(Path(__file__).resolve().parents[2] / "conformance" / "engines"))

from planted_faults import stale_row_visible

PAGE_SIZE = 3  # so small that a handful of rows crosses an edge


@dataclass(frozen=True, slots=True)
class ShrinkingFault:
    """What is planted, and the law that must name it.

    breaks  the rule
    law     of `kdtr.property_tests.laws`
    why     why nothing smaller than the minimum shows it
    twin    options of the second engine, where the law compares two
    """

    plant: Plant
    breaks: str
    law: str
    why: str
    twin: dict[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        return " ".join((self.plant.__doc__ or "").split())


def make_engine(fault: str, page_size: int = PAGE_SIZE, split_size: int = 5) -> Any:
    """The host engine with this fault."""
    engine = load_engine("host", {"page_size": page_size, "split_size": split_size})
    FAULTS[fault].plant(engine)
    return engine


def causal_by_index(engine: Any) -> None:
    """A node sees every earlier node, as if the tree were a chain."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions, np.tri(len(ancestors), dtype=bool)

    wrap(engine, tree_layout=tree_layout)


def descending_compaction(engine: Any) -> None:
    """The moves of a commit are done in place, one by one, from the last node to the first."""

    def commit_rows(
        original: Any, cache: Any, path: Any, accept_len: Any, committed_len: int
    ) -> Any:
        before = cache.rows.copy()
        moves = original(cache, path, accept_len, committed_len)
        cache.rows[:] = before
        for source, destination in moves[: int(accept_len[0])][::-1].tolist():
            cache.rows[:, physical(cache, destination)] = cache.rows[:, physical(cache, source)]
        return moves

    wrap(engine, commit_rows=commit_rows)


def missing_root_row(engine: Any) -> None:
    """Compaction takes the root for cached already: the rows of path[1:] go to L.., and its own
    row is lost. L, tokens and positions are right."""

    def commit_rows(
        original: Any, cache: Any, path: Any, accept_len: Any, committed_len: int
    ) -> Any:
        if accept_len[0] > 1:
            original(cache, path[1:], accept_len - 1, committed_len)
        return _moves(path, int(accept_len[0]), committed_len)

    wrap(engine, commit_rows=commit_rows)


def _moves(path: Any, accept_len: int, committed_len: int) -> Any:
    """What a right compaction would report: the books are not at fault."""
    moves = np.full((len(path), 2), -1)
    moves[:accept_len, 0] = committed_len + path[:accept_len]
    moves[:accept_len, 1] = committed_len + np.arange(accept_len)
    return moves


def wrong_sibling_taken(engine: Any) -> None:
    """Where a child's token is the target, the walk goes on from the first child."""

    def accept_walk(original: Any, tokens: Any, parents: Any, targets: Any, *rest: Any) -> Any:
        led = targets.copy()
        for node in range(len(tokens)):
            below = np.flatnonzero(parents == node)
            if (tokens[below] == targets[node]).any():
                led[node] = tokens[below[0]]
        return original(tokens, parents, led, *rest)

    wrap(engine, accept_walk=accept_walk)


def chunk_edge_low(engine: Any) -> None:
    """The first row of a later chunk of a prompt has the position of the row before it."""

    def change(session: Any) -> None:
        prefill = session.prefill

        def faulty(tokens: Any, **rest: Any) -> Any:
            forward = session._forward
            if forward is not None and session.committed_len:
                session._forward = _FirstRowLow(forward)
            try:
                return prefill(tokens, **rest)
            finally:
                session._forward = forward

        session.prefill = faulty

    on_open(engine, change)


class _FirstRowLow:
    """A `Forward` whose first row is one position too low."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, cache: Any, rows: Any, positions: Any, *rest: Any) -> Any:
        low = positions.copy()
        low[0] -= 1
        return self._forward(cache, rows, low, *rest)


def page_edge_low(engine: Any) -> None:
    """The first slot of a page is taken to be still on the page before: its row overwrites that
    page's first one."""

    def append_latents(
        original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> None:
        first = (slots % cache.page_size == 0) & (slots > 0)
        original(cache, layer, slots - first * cache.page_size, c_kv, k_pe)

    wrap(engine, append_latents=append_latents)


_ROW = "a_row_is_the_plain_run_over_its_path"
_COMMIT = "a_commit_is_plain_decoding_of_the_path"

FAULTS: dict[str, ShrinkingFault] = {
    "causal_by_index": ShrinkingFault(
        causal_by_index,
        "MASK-2",
        _ROW,
        "In a chain every earlier node is an ancestor, and a tree of two nodes is a chain.",
    ),
    "position_by_index": ShrinkingFault(
        position_by_index,
        "POS-1",
        _ROW,
        "In a chain index is depth. The prompt may be empty: the node is one too far from the "
        "root.",
    ),
    "descending_compaction": ShrinkingFault(
        descending_compaction,
        "COMMIT-1",
        _COMMIT,
        "A move from the last to the first is lost only if a later one reads its destination: "
        "path[j] = k for two nodes j < k of the path, which are not the root (it stays where it "
        "is) and of which the first has moved down, so that k = 2 and path[1] = 2, with a node 1 "
        "that is passed over, and a node 3 that moves to 2.",
    ),
    "missing_root_row": ShrinkingFault(
        missing_root_row,
        "COMMIT-1",
        _COMMIT,
        "A root that is accepted alone lies where it belongs, and nothing is moved over it.",
    ),
    "stale_row_visible": ShrinkingFault(
        stale_row_visible,
        "COMMIT-4",
        "a_verify_that_was_not_committed_is_never_seen",
        "A stale slot lies behind the rows of the later tree, which has one node at least; so the "
        "abandoned one has two.",
    ),
    "wrong_sibling_taken": ShrinkingFault(
        wrong_sibling_taken,
        "ACC-1",
        "greedy_output_does_not_depend_on_what_is_drafted",
        "With one child there is no other to take, and a target that is not drafted ends the walk.",
    ),
    "chunk_edge_low": ShrinkingFault(
        chunk_edge_low,
        "FWD-1",
        "every_chunking_of_a_prompt_is_the_same_prefill",
        "A later chunk needs one before it, and each has a token.",
    ),
    "page_edge_low": ShrinkingFault(
        page_edge_low,
        "LOSSLESS",
        "cache_layouts_are_indistinguishable",
        f"Pages hold {PAGE_SIZE} rows, so the first row past an edge is row {PAGE_SIZE + 1}. Rows "
        "of a prompt are cheaper than nodes.",
        twin={"page_size": 64},
    ),
}
