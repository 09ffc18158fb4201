"""A draft tree in text: a line per node."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kdtr.conformance.plain_text import table


def tree_lines(
    parents: Sequence[int],
    path: Collection[int],
    columns: Mapping[str, Sequence[object]],
    *,
    wrong: Collection[int] = (),
    only: Collection[int] | None = None,
) -> list[str]:
    """In depth-first order, siblings by node id; * marks the accepted path, > what is wrong.

    columns  numbers of every node, by name
    only     the nodes to draw, each with its parent; None: all
    Only siblings are drawn as branches: an only child stands straight below its parent, so that a
    chain stays narrow however long it is.
    """
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        if only is None or node in only:
            children[parent].append(node)
    rows: list[tuple[object, ...]] = [("", *columns, "node")]
    stack = [(0, "", "")]
    while stack:
        node, branch, below = stack.pop()
        marks = (">" if node in wrong else " " if wrong else "") + ("*" if node in path else "")
        numbers = (column[node] for column in columns.values())
        rows.append((marks, *numbers, f"{branch}{node}"))
        for i, child in reversed(list(enumerate(children[node]))):
            is_last = i == len(children[node]) - 1
            if len(children[node]) == 1:
                stack.append((child, below, below))
            elif is_last:
                stack.append((child, below + "└ ", below + "  "))
            else:
                stack.append((child, below + "├ ", below + "│ "))
    return table(rows, numbers=range(1, 1 + len(columns)))
