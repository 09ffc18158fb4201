"""The round of a finding as a picture in text: its draft tree, and its mask.

Made for a terminal of 80 columns without colour: what is wrong has a mark of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.conformance.drawing_mask import LEGEND, LEGEND_SHOWN, ancestors, mask_lines, mask_notes
from kdtr.conformance.drawing_tree import tree_lines
from kdtr.conformance.plain_text import entry

_WHOLE = 32  # nodes that are drawn all; of more, those that matter
_ROWS = 3  # wrong rows of a larger tree that are drawn
_COLUMNS = 12  # wrong columns of each of them
_INDENT = "    "


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """What the truth is at a point, and what the engine showed of it.

    parents    of a tree; of a chunk, those of a chain
    positions  [n], mask [n, L + n] bool, path (the root first): truth
    slots      [n], where each row is written: truth
    rows       rows in which the finding differs, where that can be said
    shown_*    the engine's; None where it was not shown, or had another form
    shown_moves  what the engine said that its commit copies: (source slot, destination slot)
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    positions: tuple[int, ...]
    mask: np.ndarray
    path: tuple[int, ...]
    rows: tuple[int, ...] = ()
    is_chunk: bool = False
    shown_positions: tuple[int, ...] | None = None
    shown_mask: np.ndarray | None = None
    shown_path: tuple[int, ...] | None = None
    slots: tuple[int, ...] = ()
    shown_slots: tuple[int, ...] | None = None
    shown_moves: tuple[tuple[int, int], ...] | None = None

    @property
    def committed_len(self) -> int:
        """L before the point."""
        return int(self.mask.shape[1]) - len(self.parents)

    def lines(self, width: int = 80) -> list[str]:
        """The tree, but of a prompt; then the mask, where it is wrong or was not shown."""
        tree = [] if self.is_chunk else self._tree_lines(width)
        return tree + self._mask_lines(width)

    def _tree_lines(self, width: int) -> list[str]:
        only = self.tree_nodes()
        legend = "* accepted path" + (", > where it differs" if self.rows else "")
        n = len(self.parents)
        head = f"{n} node{'' if n == 1 else 's'} at L = {self.committed_len}; {legend}"
        if len(only) < n:
            head += f"; {n - len(only)} nodes are not drawn"
        columns: dict[str, tuple[object, ...]] = {"position": self.positions}
        if self.shown_positions is not None and self.shown_positions != self.positions:
            columns["engine's"] = tuple(
                _beside(*both) for both in zip(self.positions, self.shown_positions, strict=True)
            )
        columns["depth"] = tuple(len(ancestors(self.parents, i)) for i in range(n))
        columns["token"] = self.tokens
        drawn = tree_lines(self.parents, self.path, columns, wrong=self.rows, only=only)
        lines = entry("tree", head, width) + [_INDENT + line for line in drawn]
        if self.shown_path is not None and self.shown_path != self.path:
            both = f"{path_text(self.path)} is accepted, the engine's path is "
            lines += entry("", both + path_text(self.shown_path), width)
        return lines

    def _mask_lines(self, width: int) -> list[str]:
        right, shown = self.mask, self.shown_mask
        if shown is not None and np.array_equal(right, shown):
            return [] if self.is_chunk else ["  mask      as it must be"]
        if shown is None and (self.is_chunk or len(self.parents) == 1):
            return []  # causal, as every prompt; or all visible: there is nothing to see in it
        legend = LEGEND_SHOWN
        if shown is None:
            legend = f"not shown; as it must be: {LEGEND}"
        if self.committed_len:
            legend += f"; slots 0..{self.committed_len - 1} are one column"
        drawn = mask_lines(
            right,
            shown,
            self.committed_len,
            wrong=self.rows,
            only=self.mask_nodes(),
            width=width - len(_INDENT),
        )
        lines = entry("mask", legend, width) + [_INDENT + line for line in drawn]
        if shown is not None:
            for note in mask_notes(right, shown, self.parents, is_chunk=self.is_chunk):
                lines += entry("", note, width)
        return lines

    def tree_nodes(self) -> list[int]:
        """The nodes to draw of the tree, ascending, each with its parent: all of a small tree."""
        return sorted({*self.mask_nodes(), *self._walked()})

    def _walked(self) -> set[int]:
        """The nodes of both paths that are nodes of the tree, with those above them."""
        n = len(self.parents)
        nodes = [i for i in (*self.path, *(self.shown_path or ())) if 0 <= i < n]
        return {above for node in nodes for above in (node, *ancestors(self.parents, node))}

    def mask_nodes(self) -> list[int]:
        """Rows and columns to draw of the mask, ascending: all of a small one; of a larger one
        what is wrong, and its path."""
        n = len(self.parents)
        if n <= _WHOLE:
            return list(range(n))
        kept = {0}
        for row in self.rows[:_ROWS]:
            kept |= {row, *([] if self.is_chunk else ancestors(self.parents, row))}
            if self.shown_mask is not None:
                wrong = np.flatnonzero(self.mask[row] != self.shown_mask[row])
                nodes = wrong[wrong >= self.committed_len] - self.committed_len
                for node in nodes[:_COLUMNS].tolist():
                    kept |= {node, *([] if self.is_chunk else ancestors(self.parents, node))}
        return sorted(kept)


def _beside(right: int, shown: int) -> str:
    """The engine's position, and by how much it is off: "15 (+1)"."""
    return str(shown) if shown == right else f"({shown - right:+d}) {shown}"


def path_text(path: tuple[int, ...]) -> str:
    """As in 0-2-3; an engine's path may be of any length, and is cut."""
    more = f"... ({len(path)} nodes)" if len(path) > _WHOLE else ""
    return "-".join(map(str, path[:_WHOLE])) + more
