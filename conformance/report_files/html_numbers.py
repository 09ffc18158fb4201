"""The numbers around a divergence, as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kdtr.conformance.excerpt import Excerpt, Number, RowFare
from kdtr.conformance.report_files.html_elements import Content, Element, element

_ROWS = 10  # of the stage, at once


def numbers_around(excerpt: Excerpt) -> Iterator[Element]:
    """Elements beside the divergence; then how the rows of the stage fared."""
    head = element(
        "tr",
        element("th", excerpt.axis, scope="row"),
        [
            element("th", column, scope="col", class_="at" if column == excerpt.at else None)
            for column in excerpt.columns
        ],
    )
    lines: list[Content] = [
        _line("expected", [number_text(value) for value in excerpt.expected], excerpt),
        _line("actual", [number_text(value) for value in excerpt.actual], excerpt, marked=True),
    ]
    if excerpt.bound is not None:
        off = [_off(*both) for both in zip(excerpt.expected, excerpt.actual, strict=True)]
        lines.append(_line("error", off, excerpt))
    caption = f"{excerpt.where}: " if excerpt.where else ""
    first, last = excerpt.columns[0], excerpt.columns[-1]
    caption += f"{excerpt.axis} {first} to {last} of {excerpt.length}"
    if excerpt.bound is not None:
        caption += f"; an error up to {excerpt.bound:.2g} is rounding in this row"
    yield element(
        "div",
        element("table", element("caption", caption), element("thead", head), lines),
        class_="scroll numbers",
    )
    yield from _rows(excerpt)


def number_text(value: Number) -> str:
    """As in a table.

    >>> number_text(True), number_text(14), number_text(0.1234567891)
    ('yes', '14', '0.123456789')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _line(name: str, texts: list[str], excerpt: Excerpt, *, marked: bool = False) -> Element:
    cells = []
    for i, text in enumerate(texts):
        wrong = marked and excerpt.wrong(i)
        classes = ["at"] * (excerpt.columns[i] == excerpt.at) + ["bad"] * wrong
        content = f"✗ {text}" if wrong else text
        cells.append(element("td", content, class_=" ".join(classes) or None))
    return element("tr", element("th", name, scope="row"), cells)


def _off(expected: Number, actual: Number) -> str:
    error = float(actual) - float(expected)
    return f"{error:+.2g}" if math.isfinite(error) else ""


def _rows(excerpt: Excerpt) -> Iterator[Element]:
    wrong = [row for row in excerpt.rows if row.wrong]
    if not wrong or len(excerpt.rows) + excerpt.left_out < 2:
        return
    n = len(excerpt.rows) + excerpt.left_out
    worst = max(wrong, key=lambda row: row.worst or 0)
    told = f"{len(wrong)} of {n} rows differ"
    if worst.worst is not None:
        told = f"{len(wrong)} of {n} rows are out of bounds, {worst.name} the most: "
        told += _times(worst.worst)
    if len(excerpt.rows) <= _ROWS:
        yield element("p", told, ".", class_="note")
        yield _fares(excerpt.rows)
        return
    summary = element("summary", told)
    yield element("details", summary, _fares(excerpt.rows), _left_out(excerpt))


def _left_out(excerpt: Excerpt) -> Element | None:
    if not excerpt.left_out:
        return None
    return element("p", f"{excerpt.left_out} rows are not told.", class_="note")


def _fares(rows: tuple[RowFare, ...]) -> Element:
    """A line of chips: the name of a row, and how it fared."""
    chips = []
    for row in rows:
        if not row.wrong:
            chips.append(element("li", row.name, element("span", "✓ in bounds"), class_="fine"))
        elif row.worst is None:
            chips.append(element("li", row.name, element("span", f"✗ {row.wrong} differ")))
        else:
            chips.append(element("li", row.name, element("span", f"✗ {_times(row.worst)}")))
    return element("ul", chips, class_="fares")


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times its bound" if math.isfinite(ratio) else "not as finite as the truth"
