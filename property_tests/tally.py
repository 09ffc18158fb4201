"""What a run of laws has tried: examples by how they ended, trees and rows by shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kdtr.property_tests.trees import SHAPES
from kdtr.property_tests.watch import DISCARDED, EXCUSED, FAILED, HELD, SKIPPED, Example

VERDICTS = (HELD, EXCUSED, DISCARDED, FAILED, SKIPPED)


@dataclass(slots=True)
class Tally:
    """Sums over examples; sums of sums by `add`, so that processes can count apart.

    laws     examples by law, however they ended
    excused  by law: a law that is mostly excused has shown little
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    trees: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    scattered: int = 0
    laws: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)

    def count(self, example: Example) -> None:
        self.verdicts[example.verdict] += 1
        self.trees += example.trees
        self.rows += example.rows
        self.scattered += example.scattered
        self.laws[example.law] += 1
        if example.verdict == HELD:
            self.held[example.law] += 1
        if example.verdict == EXCUSED:
            self.excused[example.law] += 1

    def add(self, other: Tally) -> None:
        self.verdicts += other.verdicts
        self.trees += other.trees
        self.rows += other.rows
        self.scattered += other.scattered
        self.laws += other.laws
        self.held += other.held
        self.excused += other.excused

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a process boundary."""
        counters = {
            name: dict(getattr(self, name))
            for name in ("verdicts", "trees", "rows", "laws", "held", "excused")
        }
        return {**counters, "scattered": self.scattered}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Tally:
        counters = {name: Counter(value) for name, value in values.items() if name != "scattered"}
        return cls(scattered=values["scattered"], **counters)

    def lines(self) -> list[str]:
        """For people: one line of examples, and a table of shapes."""
        ended = ", ".join(f"{self.verdicts[v]:,} {v}" for v in VERDICTS if self.verdicts[v])
        total = self.verdicts.total()
        lines = [f"{total:,} examples of {len(self.laws)} laws: {ended or 'none'}"]
        width = max(len(shape) for shape in (*SHAPES, "all shapes"))
        lines.append(f"{'shape':<{width}}  {'trees':>10}  {'rows':>10}")
        for shape in SHAPES:
            lines.append(f"{shape:<{width}}  {self.trees[shape]:>10,}  {self.rows[shape]:>10,}")
        trees, rows = self.trees.total(), self.rows.total()
        lines.append(f"{'all shapes':<{width}}  {trees:>10,}  {rows:>10,}")
        lines.append(f"{self.scattered:,} commits of a path that is not a prefix of the nodes")
        mostly = [law for law in self.excused if self.excused[law] > self.held[law]]
        if mostly:
            lines.append(f"mostly excused as near ties, so little shown: {', '.join(mostly)}")
        return lines
