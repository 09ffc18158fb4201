"""The peers of peers_attention.py, beside this file, that are written in Triton."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from attention_shapes import SCALE, C
from peers_torch import Data


@triton.jit
def _extend(
    query, rows, slots, tree, out, n, committed, heads, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    at = (m[:, None] * heads + head) * 576
    q = tl.load(query + at + latent[None, :], mask=m[:, None] < n, other=0.0)
    q_pe = tl.load(query + at + rope[None, :], mask=m[:, None] < n, other=0.0)
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, committed, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + t, mask=t < committed, other=0)
        k = tl.load(
            rows + slot[None, :] * 576 + latent[:, None], mask=t[None, :] < committed, other=0.0
        )
        k_pe = tl.load(
            rows + slot[None, :] * 576 + rope[:, None], mask=t[None, :] < committed, other=0.0
        )
        s = (tl.dot(q, k) + tl.dot(q_pe, k_pe)) * scale
        s = tl.where(t[None, :] < committed, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp(top - new_top)
        p = tl.exp(s - new_top[:, None])
        norm = norm * factor + tl.sum(p, 1)
        v = tl.load(
            rows + slot[:, None] * 576 + latent[None, :], mask=t[:, None] < committed, other=0.0
        )
        acc = acc * factor[:, None] + tl.dot(p.to(v.dtype), v)
        top = new_top
    for start in range(0, n, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + committed + t, mask=t < n, other=0)
        k = tl.load(rows + slot[None, :] * 576 + latent[:, None], mask=t[None, :] < n, other=0.0)
        k_pe = tl.load(rows + slot[None, :] * 576 + rope[:, None], mask=t[None, :] < n, other=0.0)
        s = (tl.dot(q, k) + tl.dot(q_pe, k_pe)) * scale
        inside = (m[:, None] < n) & (t[None, :] < n)
        seen = tl.load(tree + m[:, None] * n + t[None, :], mask=inside, other=0)
        s = tl.where(inside & (seen != 0), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp(top - new_top)
        p = tl.exp(s - new_top[:, None])
        norm = norm * factor + tl.sum(p, 1)
        v = tl.load(rows + slot[:, None] * 576 + latent[None, :], mask=t[:, None] < n, other=0.0)
        acc = acc * factor[:, None] + tl.dot(p.to(v.dtype), v)
        top = new_top
    to = (m[:, None] * heads + head) * 512 + latent[None, :]
    tl.store(out + to, (acc / norm[:, None]).to(tl.bfloat16), mask=m[:, None] < n)


def extend(data: Data, rows: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
    n, h, _ = data.query.shape
    out = torch.empty(n, h, C, device="cuda", dtype=torch.bfloat16)
    grid = (h, triton.cdiv(n, 32))
    _extend[grid](
        data.query, rows, data.slots, tree, out, n, data.shape.committed, h, SCALE,
        BLOCK_M=32, BLOCK_N=64, num_warps=8, num_stages=1,
    )  # fmt: skip
    return out


@triton.jit
def _decode(
    query, rows, slots, partial, log_sums, n_slots, heads, splits, scale,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    node, split = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    real = head[:, None] < heads
    at = (node * heads + head[:, None]) * 576
    q = tl.load(query + at + latent[None, :], mask=real, other=0.0)
    q_pe = tl.load(query + at + rope[None, :], mask=real, other=0.0)
    length = tl.cdiv(n_slots, splits)
    first = split * length
    end = tl.minimum(first + length, n_slots)
    acc = tl.zeros([BLOCK_H, 512], tl.float32)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_H], tl.float32)
    for start in range(first, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + t, mask=t < end, other=0)
        k = tl.load(rows + slot[None, :] * 576 + latent[:, None], mask=t[None, :] < end, other=0.0)
        k_pe = tl.load(rows + slot[None, :] * 576 + rope[:, None], mask=t[None, :] < end, other=0.0)
        s = (tl.dot(q, k) + tl.dot(q_pe, k_pe)) * scale
        s = tl.where(t[None, :] < end, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp(top - new_top)
        p = tl.exp(s - new_top[:, None])
        norm = norm * factor + tl.sum(p, 1)
        acc = acc * factor[:, None] + tl.dot(p.to(k.dtype), tl.trans(k))
        top = new_top
    row = (node * heads + head) * splits + split
    norm = tl.where(norm == 0.0, 1.0, norm)  # a split without slots
    tl.store(partial + row[:, None] * 512 + latent[None, :], acc / norm[:, None], mask=real)
    tl.store(log_sums + row, top + tl.log(norm), mask=head < heads)


@triton.jit
def _fold(
    query, rows, slots, tree, partial, log_sums, n, committed, heads, splits, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = m // heads
    latent, rope = tl.arange(0, 512), 512 + tl.arange(0, 64)
    real = m[:, None] < n * heads
    q = tl.load(query + m[:, None] * 576 + latent[None, :], mask=real, other=0.0)
    q_pe = tl.load(query + m[:, None] * 576 + rope[None, :], mask=real, other=0.0)
    length = tl.cdiv(committed, splits - 1)
    first = tl.minimum(split * length, committed)  # the last split has nothing of the prefix
    end = tl.minimum(first + length, committed)
    acc = tl.zeros([BLOCK_M, 512], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    for start in range(first, end, BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)
        slot = tl.load(slots + t, mask=t < end, other=0)
        k = tl.load(rows + slot[None, :] * 576 + latent[:, None], mask=t[None, :] < end, other=0.0)
        k_pe = tl.load(rows + slot[None, :] * 576 + rope[:, None], mask=t[None, :] < end, other=0.0)
        s = (tl.dot(q, k) + tl.dot(q_pe, k_pe)) * scale
        s = tl.where(t[None, :] < end, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp(top - new_top)
        p = tl.exp(s - new_top[:, None])
        norm = norm * factor + tl.sum(p, 1)
        acc = acc * factor[:, None] + tl.dot(p.to(k.dtype), tl.trans(k))
        top = new_top
    for start in range(0, tl.where(split == splits - 1, n, 0), BLOCK_N):
        t = start + tl.arange(0, BLOCK_N)  # a row sees node 0, and so a slot of the first block
        slot = tl.load(slots + committed + t, mask=t < n, other=0)
        k = tl.load(rows + slot[None, :] * 576 + latent[:, None], mask=t[None, :] < n, other=0.0)
        k_pe = tl.load(rows + slot[None, :] * 576 + rope[:, None], mask=t[None, :] < n, other=0.0)
        s = (tl.dot(q, k) + tl.dot(q_pe, k_pe)) * scale
        inside = real & (t[None, :] < n)
        seen = tl.load(tree + node[:, None] * n + t[None, :], mask=inside, other=0)
        s = tl.where(inside & (seen != 0), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        factor = tl.exp(top - new_top)
        p = tl.exp(s - new_top[:, None])
        norm = norm * factor + tl.sum(p, 1)
        acc = acc * factor[:, None] + tl.dot(p.to(k.dtype), tl.trans(k))
        top = new_top
    norm = tl.where(norm == 0.0, 1.0, norm)  # a split without slots
    row = m * splits + split
    tl.store(partial + row[:, None] * 512 + latent[None, :], acc / norm[:, None], mask=real)
    tl.store(log_sums + row, top + tl.log(norm), mask=m < n * heads)


@triton.jit
def _join(partial, log_sums, out, splits, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    top = -float("inf")
    norm = 0.0
    acc = tl.zeros([128], tl.float32)
    for start in range(0, splits, BLOCK):
        i = start + tl.arange(0, BLOCK)
        log_sum = tl.load(log_sums + row * splits + i, mask=i < splits, other=float("-inf"))
        at = (row * splits + i[:, None]) * 512 + column[None, :]
        its = tl.load(partial + at, mask=i[:, None] < splits, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        factor, weight = tl.exp(top - new_top), tl.exp(log_sum - new_top)
        acc = acc * factor + tl.sum(weight[:, None] * its, 0)
        norm = norm * factor + tl.sum(weight, 0)
        top = new_top
    tl.store(out + row * 512 + column, (acc / norm).to(tl.bfloat16))


class Fold(NamedTuple):
    """A setting of `fold`: rows and slots of a program, and splits of the prefix."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


def decode(data: Data, rows: torch.Tensor, splits: int) -> torch.Tensor:
    n, h, _ = data.query.shape
    parts = torch.empty(n * h, splits, C, device="cuda")
    log_sums = torch.empty(n * h, splits, device="cuda")
    out = torch.empty(n, h, C, device="cuda", dtype=torch.bfloat16)
    _decode[(n, triton.cdiv(h, 16), splits)](
        data.query, rows, data.slots, parts, log_sums, data.shape.slots(), h, splits, SCALE,
        BLOCK_H=16, BLOCK_N=32, num_warps=4, num_stages=2,
    )  # fmt: skip
    _join[(n * h, 4)](parts, log_sums, out, splits, BLOCK=16, num_warps=4)
    return out


def fold(data: Data, rows: torch.Tensor, tree: torch.Tensor, setting: Fold) -> torch.Tensor:
    n, h, _ = data.query.shape
    splits = setting.splits + 1
    parts = torch.empty(n * h, splits, C, device="cuda")
    log_sums = torch.empty(n * h, splits, device="cuda")
    out = torch.empty(n, h, C, device="cuda", dtype=torch.bfloat16)
    _fold[(triton.cdiv(n * h, setting.block_m), splits)](
        data.query, rows, data.slots, tree, parts, log_sums, n, data.shape.committed, h, splits,
        SCALE, BLOCK_M=setting.block_m, BLOCK_N=setting.block_n,
        num_warps=setting.warps, num_stages=setting.stages,
    )  # fmt: skip
    _join[(n * h, 4)](parts, log_sums, out, splits, BLOCK=16, num_warps=4)
    return out
