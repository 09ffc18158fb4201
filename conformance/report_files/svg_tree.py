"""The draft tree of a finding as a picture: depth runs to the right, a leaf has a line."""

from __future__ import annotations

from collections.abc import Iterator

from kdtr.conformance.drawing import Drawing
from kdtr.conformance.drawing_mask import ancestors
from kdtr.conformance.report_files.html_elements import Element, element
from kdtr.conformance.report_files.svg import picture, px, words

_DX, _DY = 104, 70  # from a node to its child, from a leaf to the next
_LEFT, _TOP = 46, 30  # of the root's middle
_R = 16


def tree_picture(ident: str, drawing: Drawing) -> Element:
    """Nodes by number, with token and position; the accepted path, and what differs."""
    nodes = drawing.tree_nodes()
    places = _places(drawing, nodes)
    width = _LEFT + max(x for x, _ in places.values()) * _DX + 58
    height = _TOP + max(y for _, y in places.values()) * _DY + 56
    at = {node: (_LEFT + x * _DX, _TOP + y * _DY) for node, (x, y) in places.items()}
    return picture(
        ident,
        "Draft tree",
        _description(drawing, nodes),
        width,
        height,
        [_edge(drawing, at, node) for node in nodes if node],
        [_node(drawing, node, *at[node]) for node in nodes],
    )


def tree_legend(drawing: Drawing) -> Iterator[tuple[str, str]]:
    """(class, words) of each mark that the picture uses."""
    yield "key-path", "accepted path"
    if drawing.shown_path is not None and drawing.shown_path != drawing.path:
        yield "key-engine", "the engine's path"
    if drawing.rows:
        yield "key-wrong", "✗ differs"


def _places(drawing: Drawing, nodes: list[int]) -> dict[int, tuple[float, float]]:
    """(depth, line): a parent is level with the middle of its children."""
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        if node:
            children[drawing.parents[node]].append(node)
    line: dict[int, float] = {}
    leaves = 0
    stack = [(0, False)]
    while stack:
        node, seen = stack.pop()
        if not children[node]:
            line[node], leaves = leaves, leaves + 1
        elif seen:
            below = [line[child] for child in children[node]]
            line[node] = (below[0] + below[-1]) / 2
        else:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children[node])]
    return {node: (len(ancestors(drawing.parents, node)), line[node]) for node in nodes}


def _edge(drawing: Drawing, at: dict[int, tuple[float, float]], node: int) -> Element:
    (x1, y1), (x2, y2) = at[drawing.parents[node]], at[node]
    middle = (x1 + x2) / 2
    classes = ["edge"]
    if node in drawing.path and drawing.parents[node] in drawing.path:
        classes.append("on-path")
    start, end = f"M{px(x1 + _R)} {px(y1)}", f"{px(x2 - _R)} {px(y2)}"
    curve = f"{start}C{px(middle)} {px(y1)} {px(middle)} {px(y2)} {end}"
    return element("path", d=curve, class_=" ".join(classes))


def _node(drawing: Drawing, node: int, x: float, y: float) -> Element:
    wrong, accepted = node in drawing.rows, node in drawing.path
    shown = drawing.shown_positions
    right = drawing.positions[node]
    position = f"pos {right}"
    classes = " ".join(
        name for name, is_so in (("node", True), ("on-path", accepted), ("wrong", wrong)) if is_so
    )
    engines = drawing.shown_path is not None and drawing.shown_path != drawing.path
    return element(
        "g",
        element("title", _about(drawing, node)),
        element("circle", cx=px(x), cy=px(y), r=_R, class_=classes),
        element("circle", cx=px(x), cy=px(y), r=_R - 3.5, class_="ring") if accepted else None,
        element("circle", cx=px(x), cy=px(y), r=_R + 4, class_="engines")
        if engines and node in (drawing.shown_path or ())
        else None,
        words(x, y + 4.5, node, "id"),
        words(x + _R + 1, y - _R + 5, "✗", "cross", "start") if wrong else None,
        words(x, y + _R + 16, f"tok {drawing.tokens[node]}", "small"),
        words(x, y + _R + 29, position, "small")
        if shown is None or shown[node] == right
        else _off(x, y + _R + 29, right, shown[node]),
    )


def _off(x: float, y: float, right: int, shown: int) -> Element:
    """A position that is wrong, and by how much."""
    text = words(x, y, f"pos {right}, is ", "small")
    text.append(element("tspan", f"{shown} ({shown - right:+d})", class_="bad"))
    return text


def _about(drawing: Drawing, node: int) -> str:
    parts = [f"node {node}: token {drawing.tokens[node]}", f"position {drawing.positions[node]}"]
    shown = drawing.shown_positions
    if shown is not None and shown[node] != drawing.positions[node]:
        parts.append(f"the engine has {shown[node]}")
    parts += ["on the accepted path"] if node in drawing.path else []
    parts += ["differs"] if node in drawing.rows else []
    return ", ".join(parts)


def _description(drawing: Drawing, nodes: list[int]) -> str:
    n = len(drawing.parents)
    text = f"{n} node{'' if n == 1 else 's'} after {drawing.committed_len} committed tokens. "
    text += "; ".join(_about(drawing, node) for node in nodes)
    return text if len(nodes) == n else f"{text}; {n - len(nodes)} nodes are not drawn"
