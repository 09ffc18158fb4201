"""Pictures of a round: what is wrong is seen at once, in 80 columns and without colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_engines import Hostile, raising

from kdtr.conformance import GateResult
from kdtr.conformance.drawing import Drawing
from kdtr.conformance.drawing_mask import kin
from kdtr.conformance.drawing_tree import tree_lines

Judge = Callable[..., GateResult]

ENGINE = "planted_faults:make_engine"
WIDTH = 80


def drawing(parents: Sequence[int], committed_len: int = 3, **fields: Any) -> Drawing:
    """The truth of a tree; `fields` are what an engine shows, and what differs."""
    n = len(parents)
    mask = np.zeros((n, committed_len + n), bool)
    mask[:, :committed_len] = True
    depth = []
    for i, parent in enumerate(parents):
        mask[i, committed_len:] = mask[parent, committed_len:] if i else False
        mask[i, committed_len + i] = True
        depth.append(depth[parent] + 1 if i else 0)
    fields = {"path": (0,), **fields}
    positions = tuple(committed_len + d for d in depth)
    return Drawing(tuple(range(100, 100 + n)), tuple(parents), positions, mask, **fields)


def leaking(drawn: Drawing, *cells: tuple[int, int]) -> Drawing:
    """The engine's mask has these cells (row, column) turned over."""
    shown = drawn.mask.copy()
    for row, column in cells:
        shown[row, column] ^= True
    return replace(drawn, shown_mask=shown, rows=tuple(sorted({row for row, _ in cells})))


def picture(judge: Judge, bundle: Path, fault: str, mode: str = "stepwise") -> list[str]:
    (finding,) = judge(ENGINE, bundle, "y-tree", modes=[mode], until="round0", fault=fault).findings
    assert finding.drawing is not None
    return finding.drawing.lines(WIDTH)


# Golden: what an engineer sees of two faults


def test_a_sibling_leak(judge: Judge, tiny: Path) -> None:
    assert [
        "  tree      4 nodes at L = 13; * accepted path, > where it differs",
        "        position  depth  token  node",
        "     *        13      0     89  0",
        "              14      1    242  ├ 1",
        "    >*        14      1    377  └ 2",
        "     *        15      2     87    3",
        "  mask      x visible, . hidden, ! visible but must be hidden, ? hidden but must",
        "            be visible; slots 0..12 are one column",
        "        0..12 0 1 2 3",
        "      0 x     x . . .",
        "      1 x     x x . .",
        "    > 2 x     x ! x .",
        "      3 x     x . x x",
        "            row 2 sees node 1 (its sibling)",
    ] == picture(judge, tiny, "sibling_visible")


def test_positions_by_index(judge: Judge, tiny: Path) -> None:
    assert [
        "  tree      4 nodes at L = 13; * accepted path, > where it differs",
        "        position  engine's  depth  token  node",
        "     *        13        13      0     89  0",
        "              14        14      1    242  ├ 1",
        "    >*        14   (+1) 15      1    377  └ 2",
        "    >*        15   (+1) 16      2     87    3",
        "  mask      as it must be",
    ] == picture(judge, tiny, "position_by_index")


# What of it is drawn of other findings


def test_a_mask_that_is_not_shown_is_drawn_as_it_must_be(judge: Judge, tiny: Path) -> None:
    """`shipped` shows no stage: the row that was kept wrongly is marked, and nothing else."""
    lines = picture(judge, tiny, "sibling_visible", "shipped")

    assert "  mask      not shown; as it must be: x visible, . hidden; slots 0..12 are one" in lines
    assert "    > 2 x     x . x ." in lines
    assert "    >*        14      1    377  └ 2" in lines
    assert not any("!" in line or "?" in line for line in lines)


def test_a_wrong_path_is_told_beside_the_right_one_and_marked_where_they_part(
    judge: Judge, tiny: Path
) -> None:
    lines = picture(judge, tiny, "first_child_only")

    assert "    >*        13      0     89  0" in lines
    assert "            0-2-3 is accepted, the engine's path is 0" in lines


def test_a_prompt_is_no_tree(judge: Judge, tiny: Path) -> None:
    """And its mask is drawn only where the engine's is wrong."""
    assert [] == picture(judge, tiny, "scale_from_latent")

    chunk = replace(drawing((-1, 0, 1), committed_len=2), is_chunk=True)
    assert [] == chunk.lines(WIDTH)
    assert [] == replace(chunk, shown_mask=chunk.mask).lines(WIDTH)
    assert [
        "        0..1 0 1 2",
        "    > 0 x    x ! .",
        "      1 x    x x .",
        "      2 x    x x x",
        "            row 0 sees row 1",
    ] == leaking(chunk, (0, 3)).lines(WIDTH)[2:]


def test_a_point_that_was_not_driven_has_no_picture(judge: Judge, small: Path) -> None:
    engine = Hostile({"open": raising(ValueError("x"))})

    (finding,) = judge(engine, small, "y", modes=["round"]).findings

    assert "open" == finding.place.point
    assert finding.drawing is None


def test_an_engine_that_raises_is_drawn_with_what_it_showed_before(
    judge: Judge, small: Path
) -> None:
    engine = Hostile({"verify": raising(ValueError("x"))})

    (finding,) = judge(engine, small, "y", modes=["stepwise"]).findings

    assert finding.drawing is not None
    assert () == finding.drawing.rows
    assert "  tree      4 nodes at L = 6; * accepted path" == finding.drawing.lines()[0]


# Masks


def test_every_mark_of_a_mask() -> None:
    """The row itself hidden, an ancestor hidden, a cousin and a descendant visible, and a slot."""
    drawn = drawing((-1, 0, 0, 1, 2))  # 3 under 1, 4 under 2; L = 3
    wrong = leaking(drawn, (1, 4), (1, 6), (3, 3), (3, 7), (4, 0), (4, 1), (4, 2), (0, 1))

    lines = wrong.lines(WIDTH)

    grid = lines[next(i for i, line in enumerate(lines) if "0..2 0 1 2 3 4" in line) :]
    assert [
        "        0..2 0 1 2 3 4",
        "    > 0 ?    x . . . .",
        "    > 1 x    x ? . ! .",
        "      2 x    x . x . .",
        "    > 3 x    ? x . x !",
        "    > 4 ?    x . x . x",
        "            row 0 does not see slot 1 of the prefix",
        "            row 1 sees node 3 (its descendant) and does not see node 1 (itself)",
        "            row 3 sees node 4 (of another branch) and does not see node 0 (its",
        "            ancestor)",
        "            and 1 row more",
    ] == grid
    assert "slots 0..2 of the prefix" in " ".join(leaking(drawn, (4, 0), (4, 1), (4, 2)).lines())
    assert "2 slots of the prefix from 0 to 2" in " ".join(leaking(drawn, (4, 0), (4, 2)).lines())


def test_kinship() -> None:
    parents = (-1, 0, 0, 1)

    assert ["itself", "its sibling", "its ancestor", "its descendant", "of another branch"] == [
        kin(parents, *pair) for pair in ((1, 1), (1, 2), (3, 0), (1, 3), (3, 2))
    ]


def test_without_a_prefix_there_is_no_column_for_it() -> None:
    lines = leaking(drawing((-1, 0, 0), committed_len=0), (2, 1)).lines(WIDTH)

    assert ["         0 1 2", "      0  x . .", "      1  x x .", "    > 2  x ! x"] == lines[-5:-1]


@pytest.mark.parametrize("committed_len", [0, 13, 4000])
def test_thirty_two_rows_fit_and_are_all_drawn(committed_len: int) -> None:
    drawn = drawing((-1, *(i // 2 for i in range(31))), committed_len)

    lines = leaking(drawn, (31, committed_len + 30)).lines(WIDTH)

    assert max(map(len, lines)) <= WIDTH
    assert list(range(32)) == [int(line[5:8]) for line in lines[-33:-1]]
    assert "            row 31 sees node 30 (of another branch)" == lines[-1]


def test_columns_stand_close_where_there_is_no_room() -> None:
    drawn = leaking(drawing((-1, *(0,) * 11)), (11, 3 + 10))

    assert "    > 11 x    x . . . . . . . . . ! x" in drawn.lines(40)
    close = drawn.lines(36)
    assert "         0..2 012345678901" in close
    assert "    > 11 x    x.........!x" in close


def test_of_a_larger_tree_what_is_wrong_and_its_ancestors_are_drawn() -> None:
    parents = (-1, *((i - 1) // 2 for i in range(1, 64)))
    drawn = leaking(drawing(parents, 5), (40, 5 + 39))

    assert [
        "  tree      64 nodes at L = 5; * accepted path, > where it differs; 57 nodes are",
        "            not drawn",
        "        position  depth  token  node",
        "     *         5      0    100  0",
        "               6      1    101  1",
        "               7      2    104  4",
        "               8      3    109  9",
        "               9      4    119  19",
        "              10      5    139  ├ 39",
        "    >         10      5    140  └ 40",
    ] == drawn.lines(WIDTH)[:10]


# Trees


def test_siblings_are_branches_and_an_only_child_stands_below_its_parent() -> None:
    columns = {
        "position": (5, 6, 6, 7, 7, 8, 7),
        "depth": (0, 1, 1, 2, 2, 3, 2),
        "target": (2, 0, 6, 0, 0, 0, 1),
        "token": (9, 1, 2, 3, 4, 5, 6),
    }

    lines = tree_lines((-1, 0, 0, 1, 1, 3, 2), (0, 2, 6), columns)

    assert [
        "   position  depth  target  token  node",
        "*         5      0       2      9  0",
        "          6      1       0      1  ├ 1",
        "          7      2       0      3  │ ├ 3",
        "          8      3       0      5  │ │ 5",
        "          7      2       0      4  │ └ 4",
        "*         6      1       6      2  └ 2",
        "*         7      2       1      6    6",
    ] == lines


@pytest.mark.parametrize("shape", ["chain", "star", "comb"])
def test_forty_nodes_stay_within_the_width(shape: str) -> None:
    parents = {
        "chain": tuple(range(-1, 39)),
        "star": (-1, *(0,) * 39),
        "comb": (-1, *(2 * (i // 2) for i in range(39))),  # every second node branches
    }[shape]
    tokens, positions = range(163_000, 163_040), range(131_000, 131_040)
    columns = {"position": positions, "depth": range(40), "target": tokens, "token": tokens}

    lines = tree_lines(parents, (0,), columns)

    assert 41 == len(lines)
    assert max(map(len, lines)) <= WIDTH - 4  # its indentation
    assert sorted(range(40)) == sorted(int(line.split()[-1]) for line in lines[1:])
