"""One chunk or round of a golden case, as its question and its record have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.bundle_check import stage_name
from kdtr.conformance.case import CaseInput, RoundInput


class Contradiction(Exception):
    """Two things of one point that cannot both be true, in words."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedPoint:
    """A point whose arrays have the right shapes (bundle_check.py).

    entry          the round's question; None: a chunk
    tokens         and parents: of the tree; of a chunk, those of a chain
    committed_len  L before the point
    """

    name: str
    entry: RoundInput | None
    tokens: Sequence[int]
    parents: Sequence[int]
    committed_len: int
    _prefix: str
    _tensors: Mapping[str, np.ndarray]

    @classmethod
    def of(
        cls, case: CaseInput, name: str, committed_len: int, tensors: Mapping[str, np.ndarray]
    ) -> RecordedPoint:
        """`tensors` are all of `expect/`."""
        prefix = f"expect/{case.alias}/{name}/"
        if name.startswith("round"):
            entry = case.rounds[int(name.removeprefix("round"))]
            tree = entry.tree
            return cls(name, entry, tree.tokens, tree.parents, committed_len, prefix, tensors)
        chunk = case.chunks[int(name.removeprefix("chunk"))]
        chain = range(-1, len(chunk) - 1)
        return cls(name, None, chunk, chain, committed_len, prefix, tensors)

    def __len__(self) -> int:
        """Rows of the forward."""
        return len(self.tokens)

    @property
    def most_rows(self) -> int:
        """Slots that the point needs after L: a build may be refused by its budget (SLOT-3)."""
        budget = None if self.entry is None else self.entry.budget
        return max(len(self), 0 if budget is None else budget + 1)

    @property
    def path(self) -> list[int]:
        """The rows that are committed: of a chunk all."""
        return list(range(len(self))) if self.entry is None else self["path"].tolist()

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[self._prefix + name]

    def get(self, stage: str, layer: int | None = None) -> np.ndarray | None:
        """The stage's array, or None where the case does not record it there."""
        return self._tensors.get(self._prefix + stage_name(stage, layer))
