"""The greedy walk and visibility of the adapters, on trees that can be read."""

from __future__ import annotations

import pytest

from kdtr.adapters.walk import emitted_tokens, greedy_walk, visible_nodes
from kdtr.contract import NO_LIMIT, Acceptance, DraftTree, EmitLimit

TREE = DraftTree(tokens=(7, 3, 5, 3), parents=(-1, 0, 0, 2))


def test_a_node_sees_its_path_and_nothing_else() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]

    assert expected == visible_nodes(TREE).astype(int).tolist()


@pytest.mark.parametrize(
    ("targets", "limit", "path", "bonus"),
    [
        ((5, 1, 3, 9), NO_LIMIT, (0, 2, 3), 9),
        ((4, 1, 3, 9), NO_LIMIT, (0,), 4),
        ((3, 1, 3, 9), NO_LIMIT, (0, 1), 1),
        ((5, 1, 3, 9), EmitLimit(max_emitted=2), (0, 2), 3),
        ((5, 1, 3, 9), EmitLimit(stop_tokens={5}), (0,), 5),
        ((5, 1, 3, 9), EmitLimit(stop_tokens={9}), (0, 2, 3), 9),
    ],
)
def test_the_walk(
    targets: tuple[int, ...], limit: EmitLimit, path: tuple[int, ...], bonus: int
) -> None:
    assert Acceptance(path, bonus) == greedy_walk(TREE, targets, limit)


def test_emitted_are_the_tokens_after_the_root_and_the_bonus() -> None:
    assert (5, 3, 9) == emitted_tokens(TREE, Acceptance((0, 2, 3), 9))
