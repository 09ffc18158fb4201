"""What the peers of peers_attention.py, beside this file, attend over, and those of torch."""

from __future__ import annotations

import torch
from attention_shapes import ROW, SCALE, C, Shape


class Data:
    """rows [copies, s, 576], query [n, h, 576], seen [n, s]; slots are in order, pages of one."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(1)
        self.shape = shape
        n, h, s = shape.nodes, shape.heads, shape.slots()
        self.rows = torch.empty(shape.copies(), s, ROW, device="cuda", dtype=torch.bfloat16)
        for copy in self.rows:
            copy.normal_()
        self.query = torch.randn(n, h, ROW, device="cuda", dtype=torch.bfloat16)
        tree = torch.eye(n, dtype=torch.bool)
        for i in range(1, n):
            tree[i] |= tree[int(torch.randint(max(0, i - 6), i, ()))]
        self.tree = tree.cuda()
        self.seen = torch.ones(n, s, dtype=torch.bool, device="cuda")
        self.seen[:, shape.committed :] = self.tree
        self.slots = torch.arange(s, device="cuda", dtype=torch.int64)


def eager(query: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    n, h, _ = query.shape
    scores = (query.view(n * h, -1) @ rows.T).view(n, h, -1).float() * SCALE
    p = torch.softmax(scores.masked_fill(~seen[:, None, :], float("-inf")), -1)
    return (p.to(rows.dtype).view(n * h, -1) @ rows[:, :C]).view(n, h, C)


def two_products(query: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    n, h, _ = query.shape
    scores = query.view(n * h, -1) @ rows.T
    return (scores @ rows[:, :C]).view(n, h, C)
