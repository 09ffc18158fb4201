from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from kdtr.contract import ModelConfig
from kdtr.engine.host_attention import append_latents
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.host_tree import accept_walk, commit_rows, tree_layout
from kdtr.engine.paging import PagedCache

# Root 0 with children 1 and 2; node 3 is a child of 2, node 4 of 1.
Y_PARENTS = np.array([-1, 0, 0, 2, 1])
Y_TOKENS = np.array([9, 5, 6, 7, 8])


def walk(
    targets: list[int], stop_tokens: tuple[int, ...] = (), max_emitted: int = 99
) -> tuple[list[int], int]:
    stops = np.array(stop_tokens, np.int64)
    result = accept_walk(Y_TOKENS, Y_PARENTS, np.array(targets), stops, max_emitted)
    accept_len = int(result.accept_len[0])
    assert [-1] * (5 - accept_len) == result.path[accept_len:].tolist()
    return result.path[:accept_len].tolist(), int(result.bonus[0])


def test_positions_follow_depth_and_rows_see_their_path() -> None:
    positions, ancestors = tree_layout(Y_PARENTS, 11)

    assert [11, 12, 12, 13, 13] == positions.tolist()
    assert [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ] == ancestors.astype(int).tolist()


def test_an_ancestor_beyond_64_nodes_is_seen() -> None:
    """Node 69 hangs on node 1, the others on the root: no 64-bit word holds its row."""
    parents = np.array([-1, *[0] * 68, 1])

    positions, ancestors = tree_layout(parents, 3)

    assert [0, 1, 69] == np.flatnonzero(ancestors[69]).tolist()
    assert 5 == positions[69]


@pytest.mark.parametrize(
    ("targets", "path", "bonus"),
    [
        ([6, 0, 7, 3, 0], [0, 2, 3], 3),  # the accepted sibling is not the first
        ([5, 8, 0, 0, 4], [0, 1, 4], 4),
        ([4, 5, 6, 7, 8], [0], 4),  # no child of the root is right
        ([6, 0, 8, 0, 0], [0, 2], 8),  # node 4 has that token, but is not a child of node 2
    ],
)
def test_the_walk_is_maximal(targets: list[int], path: list[int], bonus: int) -> None:
    assert (path, bonus) == walk(targets)


@pytest.mark.parametrize(
    ("stop_tokens", "max_emitted", "path", "bonus"),
    [
        ((6,), 99, [0], 6),  # the first emitted token stops: node 2 is not cached
        ((7,), 99, [0, 2], 7),
        ((3,), 99, [0, 2, 3], 3),  # the bonus itself stops
        ((9, 5), 99, [0, 2, 3], 3),  # the root is not emitted, node 1 is not on the path
        ((), 1, [0], 6),
        ((), 2, [0, 2], 7),
        ((), 3, [0, 2, 3], 3),
        ((7,), 1, [0], 6),
    ],
)
def test_the_walk_stops_where_the_round_stops_emitting(
    stop_tokens: tuple[int, ...], max_emitted: int, path: list[int], bonus: int
) -> None:
    """Every cut of path 0, 2, 3 with bonus 3 (ACC-4)."""
    assert (path, bonus) == walk([6, 0, 7, 3, 0], stop_tokens, max_emitted)


def test_official_ddtree_masks_and_walks(
    ddtree_cases: list[tuple[dict[str, Any], Mapping[str, np.ndarray]]],
) -> None:
    """Positions, visibility and every walk of the official code, on its own trees."""
    for case, arrays in ddtree_cases:
        parents, tokens = np.array(case["parents"]), np.array(case["verify_input_ids"])
        n = len(parents)

        positions, ancestors = tree_layout(parents, case["past_length"])

        assert case["verify_position_ids"] == positions.tolist(), case["case"]
        stored = np.unpackbits(arrays["visibility_packed"], axis=1)[:, :n].astype(bool)
        assert np.array_equal(stored, ancestors), case["case"]
        if case["duplicate_child_tokens"]:
            continue  # not a tree of ours (TREE-2)
        for expected in case["walks"]:
            targets = np.array(expected["posterior"])
            found = accept_walk(tokens, parents, targets, np.array([], np.int64), n)
            accept_len = int(found.accept_len[0])
            assert expected["accepted_indices"] == found.path[:accept_len].tolist(), case["case"]
            assert expected["bonus_token"] == found.bonus[0], case["case"]


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
def test_commit_moves_whole_rows_of_every_layer(small: ModelConfig, page_size: int) -> None:
    """Slot 3 + path[k] to slot 3 + k, across pages; source rows may be destinations too."""
    cache = PagedCache(HostKernels(), small, capacity=9, page_size=page_size)
    cache.map_slots(9)
    c, r = small.kv_lora_rank, small.qk_rope_head_dim
    for layer in range(small.num_hidden_layers):
        values = np.arange(9)[:, None] + 100.0 * layer  # slot and layer
        append_latents(cache, layer, np.arange(9), np.tile(values, c), np.tile(values + 0.5, r))

    moves = commit_rows(cache, np.array([0, 2, 3, 5, -1, -1]), np.array([4]), 3)

    assert [[3, 3], [5, 4], [6, 5], [8, 6], [-1, -1], [-1, -1]] == moves.tolist()
    rows = HostKernels.read_rows(cache, 7)  # [l, 7, c + r]
    for layer in range(small.num_hidden_layers):
        expected = np.array([0, 1, 2, 3, 5, 6, 8]) + 100.0 * layer
        assert np.array_equal(np.tile(expected[:, None], c), rows[layer, :, :c])
        assert np.array_equal(np.tile(expected[:, None] + 0.5, r), rows[layer, :, c:])
