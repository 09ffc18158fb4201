"""Text for a terminal: nothing that it might act on, and columns of equal width."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from kdtr.contract import EngineInfo

_LONGEST_NAME = 60  # characters of an engine's own words for itself


def printable(text: object) -> str:
    """The text with everything a terminal might act on escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def name_text(text: object) -> str:
    """A foreign name in one line: printable, and cut where it is very long."""
    shown = printable(text)
    if len(shown) <= _LONGEST_NAME:
        return shown
    return f"{shown[:_LONGEST_NAME]}... ({len(shown)} characters)"


def engine_name(info: EngineInfo) -> str:
    """How the engine calls itself, whatever that is."""
    return f"{name_text(info.name)} {name_text(info.version)} on {name_text(info.device)}"


def printable_lines(lines: Iterable[str]) -> list[str]:
    """The lines, printable; a line break within one begins another."""
    return [printable(part) for line in lines for part in line.split("\n")]


def entry(label: str, sentence: str, width: int) -> list[str]:
    """A label and a sentence beside it, wrapped to the width."""
    head = f"  {label:<9} "
    return textwrap.wrap(
        sentence,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Sequence[Sequence[object]], numbers: Iterable[int] = ()) -> list[str]:
    """Rows of equal length as lines, in columns; those in `numbers` are right-aligned."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    right = set(numbers)
    return [
        "  ".join(
            f"{cell:>{width}}" if i in right else f"{cell:<{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
