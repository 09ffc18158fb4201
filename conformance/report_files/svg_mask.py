"""The mask of a finding as pictures: as it must be, the engine's, and where they differ.

A row for each row of the forward; the committed slots are one column, then a column per row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kdtr.conformance.drawing import Drawing
from kdtr.conformance.drawing_mask import mask_notes
from kdtr.conformance.report_files.html_elements import Element, element
from kdtr.conformance.report_files.svg import box, picture, words

_CELL = 21
_LEFT, _TOP = 34, 24  # room for names of rows and of columns
_PREFIX = 2.2  # cells


def mask_pictures(ident: str, drawing: Drawing) -> Iterator[tuple[str, Element]]:
    """(caption, picture): one where the engine's is as it must be, or was not shown; else three."""
    right, shown = drawing.mask, drawing.shown_mask
    if shown is None:
        yield "as it must be (not shown by the engine)", _grid(f"{ident}-right", drawing, right)
    elif np.array_equal(right, shown):
        yield "expected and actual: the same", _grid(f"{ident}-right", drawing, right)
    else:
        yield "expected", _grid(f"{ident}-right", drawing, right)
        yield "actual", _grid(f"{ident}-shown", drawing, shown)
        yield "difference", _difference(f"{ident}-differs", drawing, right, shown)


def mask_words(drawing: Drawing) -> list[str]:
    """What is wrong in the first rows."""
    if drawing.shown_mask is None:
        return []
    both = drawing.mask, drawing.shown_mask
    return list(mask_notes(*both, drawing.parents, is_chunk=drawing.is_chunk))


def _grid(ident: str, drawing: Drawing, mask: np.ndarray) -> Element:
    def cell(row: int, columns: slice) -> tuple[str, str, str]:
        seen = mask[row, columns]
        if seen.all():
            return "seen", "●", "visible"
        return ("part", "◐", "in part visible") if seen.any() else ("hidden", "", "hidden")

    description = "; ".join(_row_words(drawing, mask, row) for row in drawing.mask_nodes())
    return _drawn(ident, "Mask", description, drawing, cell)


def _difference(ident: str, drawing: Drawing, right: np.ndarray, shown: np.ndarray) -> Element:
    def cell(row: int, columns: slice) -> tuple[str, str, str]:
        extra = (shown[row, columns] & ~right[row, columns]).any()
        missing = (right[row, columns] & ~shown[row, columns]).any()
        if extra:
            return "extra", "!", "visible, but must be hidden"
        return ("missing", "?", "hidden, but must be visible") if missing else ("same", "", "same")

    notes = "; ".join(mask_words(drawing)) or "no difference"
    return _drawn(ident, "Mask: where the engine's differs", notes, drawing, cell)


def _drawn(
    ident: str,
    title: str,
    description: str,
    drawing: Drawing,
    cell: Callable[[int, slice], tuple[str, str, str]],
) -> Element:
    nodes, before = drawing.mask_nodes(), drawing.committed_len
    prefix = _PREFIX if before else 0.0
    columns = [(slice(0, before), 0.0, prefix)] if before else []
    columns += [
        (slice(before + node, before + node + 1), prefix + i, 1.0) for i, node in enumerate(nodes)
    ]
    names = ([f"0..{before - 1}"] if before > 1 else ["0"]) if before else []
    names += [str(node) for node in nodes]
    width = _LEFT + (prefix + len(nodes)) * _CELL + 4
    height = _TOP + len(nodes) * _CELL + 4
    shown = drawing.mask if drawing.shown_mask is None else drawing.shown_mask
    differ = set(np.flatnonzero((drawing.mask != shown).any(axis=1)).tolist())
    parts: list[Element] = []
    for name, (_, x, wide) in zip(names, columns, strict=True):
        parts.append(words(_LEFT + (x + wide / 2) * _CELL, _TOP - 7, name, "small"))
    for y, row in enumerate(nodes):
        wrong = row in differ
        top = _TOP + y * _CELL
        label = f"✗ {row}" if wrong else str(row)
        parts.append(words(_LEFT - 6, top + 15, label, "small bad" if wrong else "small", "end"))
        for name, (span, x, wide) in zip(names, columns, strict=True):
            class_, mark, what = cell(row, span)
            left = _LEFT + x * _CELL
            about = f"row {row}, {'slots' if '..' in name else 'column'} {name}: {what}"
            size = (wide * _CELL - 1, _CELL - 1.0)
            parts.append(box(left, top, *size, f"cell {class_}", about))
            if mark:
                middle = left + wide * _CELL / 2 - 0.5
                parts.append(words(middle, top + 15, mark, f"mark {class_}"))
    return picture(ident, title, description, width, height, element("g", parts))


def _row_words(drawing: Drawing, mask: np.ndarray, row: int) -> str:
    nodes = np.flatnonzero(mask[row, drawing.committed_len :]).tolist()
    names = ", ".join(map(str, nodes)) or "none"
    if not drawing.committed_len:
        return f"row {row} sees rows {names}"
    prefix = mask[row, : drawing.committed_len]
    seen = "all" if prefix.all() else "some" if prefix.any() else "none"
    return f"row {row} sees {seen} of the committed slots and rows {names}"
