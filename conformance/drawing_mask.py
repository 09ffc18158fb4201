"""A mask in text: a row per row of the forward, the prefix as one column, then the rows themselves.

x visible, . hidden; of a mask that the engine showed, ! visible and must not be, ? the reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

LEGEND = "x visible, . hidden"
LEGEND_SHOWN = f"{LEGEND}, ! visible but must be hidden, ? hidden but must be visible"
_NOTES = 3  # rows told in words
_NAMES = 6  # nodes or slots named in one of them


def mask_lines(
    expected: np.ndarray,
    shown: np.ndarray | None,
    committed_len: int,
    *,
    wrong: Sequence[int],
    only: Sequence[int],
    width: int,
) -> list[str]:
    """The grid [n, 1 + n] of two masks [n, L + n] bool.

    shown  the engine's mask; None: not shown, so that nothing is marked
    wrong  rows to be marked with >
    only   the rows and columns to draw, in ascending order
    """
    marks = _marks(expected, expected if shown is None else shown)
    columns = [committed_len + node for node in only]
    prefix = f"0..{committed_len - 1}" if committed_len else ""
    digits = len(str(max(only)))
    label = f"{{mark}} {{row:>{digits}}} {{prefix:<{len(prefix)}}} "
    # One blank between the columns, where there is room for it.
    gap = " " if len(label.format(mark=" ", row=0, prefix=prefix)) + 2 * len(only) <= width else ""
    heads = [f"{node:>{digits}}" for node in only]
    lines = [
        label.format(mark=" ", row="", prefix=prefix if place == digits - 1 else "")
        + gap.join(head[place] for head in heads)
        for place in range(digits)
    ]
    for row in only:
        mark = ">" if row in wrong else " "
        whole = _whole(marks[row, :committed_len])
        cells = gap.join(marks[row, columns])
        lines.append(label.format(mark=mark, row=row, prefix=whole) + cells)
    return [line.rstrip() for line in lines]


def mask_notes(
    expected: np.ndarray, shown: np.ndarray, parents: Sequence[int], *, is_chunk: bool
) -> Iterator[str]:
    """What is wrong in the first rows, in words: "row 2 sees node 1 (its sibling)"."""
    rows = np.flatnonzero((expected != shown).any(axis=1))
    for row in rows[:_NOTES]:
        extra, missing = shown[row] & ~expected[row], expected[row] & ~shown[row]
        told = [
            f"{verb} {_named(columns, parents, int(row), is_chunk)}"
            for verb, columns in (("sees", extra), ("does not see", missing))
            if columns.any()
        ]
        yield f"row {row} {' and '.join(told)}"
    if len(rows) > _NOTES:
        yield f"and {_count(len(rows) - _NOTES, 'row')} more"


def _marks(expected: np.ndarray, shown: np.ndarray) -> np.ndarray:
    right = np.where(expected, "x", ".")
    return np.where(expected == shown, right, np.where(shown, "!", "?"))


def _whole(prefix: np.ndarray) -> str:
    """One mark for all of the prefix: the worst."""
    return next((mark for mark in "!?x." if mark in prefix), "")


def _named(columns: np.ndarray, parents: Sequence[int], row: int, is_chunk: bool) -> str:
    """The columns [L + n] bool by name: slots of the prefix, then nodes and their kinship."""
    committed_len = len(columns) - len(parents)
    slots = np.flatnonzero(columns[:committed_len])
    names = [_slots(slots)] if len(slots) else []
    nodes = np.flatnonzero(columns[committed_len:]).tolist()
    for node in nodes[:_NAMES]:
        names.append(f"row {node}" if is_chunk else f"node {node} ({kin(parents, row, node)})")
    if len(nodes) > _NAMES:
        names.append(_count(len(nodes) - _NAMES, "other"))
    return ", ".join(names)


def _slots(slots: np.ndarray) -> str:
    first, last = int(slots[0]), int(slots[-1])
    if len(slots) == 1:
        return f"slot {first} of the prefix"
    if len(slots) == last - first + 1:
        return f"slots {first}..{last} of the prefix"
    return f"{len(slots)} slots of the prefix from {first} to {last}"


def kin(parents: Sequence[int], row: int, node: int) -> str:
    """What `node` is to `row` in the tree."""
    if node == row:
        return "itself"
    if node in ancestors(parents, row):
        return "its ancestor"
    if row in ancestors(parents, node):
        return "its descendant"
    return "its sibling" if parents[node] == parents[row] else "of another branch"


def ancestors(parents: Sequence[int], node: int) -> list[int]:
    """Without the node itself, the root last."""
    above = []
    while parents[node] >= 0:
        node = parents[node]
        above.append(node)
    return above


def _count(n: int, one: str) -> str:
    return f"{n} {one}{'' if n == 1 else 's'}"
