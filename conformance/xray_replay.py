"""What every row of a session should see: slots, positions and visibility from the rules alone.

A `Pattern` is a way of being wrong: it replaces one of these few lines, and the replay says what
an engine like that would show. The rules themselves are the pattern that changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kdtr.contract import DraftTree


class Cell(NamedTuple):
    """A row of the cache: its token, the position it was rotated to, and what people call it.

    token   -1 for a slot that was never written: its latent is zero
    """

    token: int
    position: int
    name: str


EMPTY = Cell(-1, 0, "a slot that was never written")


class SeenRow(NamedTuple):
    """What one row of a verify is, and what it sees."""

    own: Cell
    visible: tuple[Cell, ...]


@dataclass(slots=True)
class State:
    """A session between two verbs.

    slots   every slot ever written, also behind the committed ones
    length  L
    sizes   of a mask that is kept: the parents of the first tree of each size
    """

    slots: list[Cell] = field(default_factory=list)
    length: int = 0
    sizes: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def write(self, slot: int, cell: Cell) -> None:
        while len(self.slots) <= slot:
            self.slots.append(EMPTY)
        self.slots[slot] = cell

    def at(self, slot: int) -> Cell:
        return self.slots[slot] if 0 <= slot < len(self.slots) else EMPTY


SeesOtherwise = Callable[[SeenRow], SeenRow]
Parents = tuple[int, ...]
Columns = Callable[[State, Parents], list[set[int]]]
Positions = Callable[[State, Parents], list[int]]
Commit = Callable[[State, Sequence[int], int], None]


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Root to node, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def rule_columns(state: State, parents: Parents) -> list[set[int]]:
    """MASK-1 and MASK-2: slots 0..L-1, and column L + j for every j on the row's path."""
    prefix = set(range(state.length))
    return [
        prefix | {state.length + node for node in path_to(parents, i)} for i in range(len(parents))
    ]


def rule_positions(state: State, parents: Parents) -> list[int]:
    """POS-1: L + depth."""
    return [state.length + len(path_to(parents, i)) - 1 for i in range(len(parents))]


def rule_commit(state: State, path: Sequence[int], n_rows: int) -> None:
    """COMMIT-1 and COMMIT-2: as if through a buffer, and nothing is rotated again."""
    moved = [state.at(state.length + node) for node in path]
    for k, cell in enumerate(moved):
        state.write(state.length + k, cell)
    state.length += len(path)


def rule_chunk_positions(length: int, n: int) -> list[int]:
    """FWD-1: L..L+P-1."""
    return list(range(length, length + n))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A way in which an engine may be wrong, and the sentence that says so.

    stage, rules   for the finding: what the fault would be seen at first, and what it breaks
    writes         whether a forward of n rows writes row i
    otherwise      what is seen of a row, where something else is wrong
    """

    says: str = ""
    stage: str = ""
    rules: tuple[str, ...] = ()
    columns: Columns = rule_columns
    positions: Positions = rule_positions
    commit: Commit = rule_commit
    chunk_positions: Callable[[int, int], list[int]] = rule_chunk_positions
    writes: Callable[[int, int], bool] = lambda n, i: True
    otherwise: SeesOtherwise = lambda row: row


RULES = Pattern()


class Replay:
    """A session as the pattern has it."""

    def __init__(self, pattern: Pattern, sizes: dict[int, Parents] | None = None) -> None:
        self._pattern = pattern
        self._state = State(sizes={} if sizes is None else sizes)
        self._n_rows = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        state, pattern = self._state, self._pattern
        for i, position in enumerate(pattern.chunk_positions(state.length, len(tokens))):
            if pattern.writes(len(tokens), i):
                slot = state.length + i
                state.write(slot, Cell(tokens[i], position, f"slot {slot}"))
        state.length += len(tokens)

    def verify(self, tree: DraftTree) -> list[SeenRow]:
        state, pattern, parents = self._state, self._pattern, tree.parents
        n = self._n_rows = len(tree)
        state.sizes.setdefault(n, parents)
        own = [
            Cell(token, position, f"node {i}")
            for i, (token, position) in enumerate(
                zip(tree.tokens, pattern.positions(state, parents), strict=True)
            )
        ]
        for i, cell in enumerate(own):
            if pattern.writes(n, i):
                state.write(state.length + i, cell)
        return [
            pattern.otherwise(SeenRow(own[i], tuple(state.at(c) for c in sorted(columns))))
            for i, columns in enumerate(pattern.columns(state, parents))
        ]

    def commit(self, path: Sequence[int]) -> None:
        state, first = self._state, self._state.length
        self._pattern.commit(state, path, self._n_rows)
        for slot in range(first, min(state.length, len(state.slots))):
            if state.slots[slot] is not EMPTY:
                state.slots[slot] = state.slots[slot]._replace(name=f"slot {slot}")

    @property
    def length(self) -> int:
        return self._state.length


def together(one: Pattern, other: Pattern) -> Pattern | None:
    """Both faults in one engine, where they do not change the same line."""
    changes = {
        name: getattr(other, name)
        for name in ("columns", "positions", "commit", "chunk_positions", "writes", "otherwise")
        if getattr(other, name) is not getattr(RULES, name)
    }
    if any(getattr(one, name) is not getattr(RULES, name) for name in changes):
        return None
    return replace(one, **changes)
