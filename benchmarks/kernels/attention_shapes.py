"""The shapes that attention is timed on (verify_attn.py, beside this file), and their floors."""

from __future__ import annotations

from dataclasses import dataclass

SHAPES = (
    *("8/1/1k", "8/1/8k", "8/1/64k", "8/17/1k", "8/17/8k", "8/17/64k"),
    *("8/65/1k", "8/65/8k", "8/65/64k", "64/17/8k"),
)
GOALS_US = dict(zip(SHAPES, (7, 10, 26, 10, 17, 72, 14, 38, 255, 70), strict=True))

C, R = 512, 64
ROW = C + R
SCALE = 192**-0.5  # of a head of 128 + 64
COLD_BYTES = 170e6
READ_BYTES_PER_S, MMA_FLOP_PER_S = 4.6e12, 629e12  # an H200, measured


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    nodes: int
    committed: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        heads, nodes, committed = text.split("/")
        return cls(int(heads), int(nodes), int(committed.replace("k", "")) * 1024)

    def __str__(self) -> str:
        return f"{self.heads}/{self.nodes}/{self.committed // 1024}k"

    def slots(self) -> int:
        return self.committed + self.nodes

    def rows(self) -> int:
        return self.heads * self.nodes

    def cache_bytes(self) -> int:
        return self.slots() * ROW * 2

    def copies(self) -> int:
        return max(4, -(-int(COLD_BYTES) // self.cache_bytes()))

    def floor_us(self) -> float:
        n_bytes = self.cache_bytes() + self.rows() * (ROW + C) * 2
        flop = 2 * self.rows() * self.slots() * (ROW + C)
        return 1e6 * max(n_bytes / READ_BYTES_PER_S, flop / MMA_FLOP_PER_S)
