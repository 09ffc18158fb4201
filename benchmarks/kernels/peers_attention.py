"""What else attends over a latent cache: timed on the shapes of verify_attn.py, beside this file.

tree-capable   torch eager; torch.compile; SGLang's `extend_attention` construction rebuilt from
               its public description: one program per head and query tile walks the prefix alone,
               then the tree under its mask; and the strongest that one can build in Triton:
               split-KV over the prefix with all nodes and heads as rows, and the tree as one more
               split under its mask
no tree mask   (all slots visible: lower bounds) split-KV decoding in Triton, a node a request;
               FlashInfer's MLA wrapper, where it is installed; the two cuBLAS products alone,
               without a softmax

One layer, bfloat16, random data, as there: a CUDA graph of one call per copy of the cache, cold L2,
medians. A peer's result is compared with torch's before it is timed, and the best of the settings
tried counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

Call = Callable[[torch.Tensor], Any]  # of one copy's rows

C, R = 512, 64
SCALE = 192**-0.5


class Fold(NamedTuple):
    """A setting of `fold`: rows and slots of a program, and splits of the prefix."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


FOLD_BLOCKS = ((64, 32, 8, 2), (64, 64, 8, 1), (32, 32, 4, 2))


class Data:
    """rows [copies, s, 576], query [n, h, 576], seen [n, s]; slots are in order, pages of one."""

    def __init__(self, shape: Any) -> None:
        torch.manual_seed(1)
        self.shape = shape
        n, h, s = shape.nodes, shape.heads, shape.slots()
        self.rows = torch.empty(shape.copies(), s, C + R, device="cuda", dtype=torch.bfloat16)
        for copy in self.rows:
            copy.normal_()
        self.query = torch.randn(n, h, C + R, device="cuda", dtype=torch.bfloat16)
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


def fold_settings(shape: Any) -> Iterator[Fold]:
    """A wave of programs, or half of one more."""
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    blocks = ((16, 32, 4, 2), (16, 64, 4, 1)) if shape.rows() <= 16 else FOLD_BLOCKS
    for block_m, block_n, warps, stages in blocks:
        row_blocks = -(-shape.rows() // block_m)
        most = max(1, shape.committed // block_n)
        wanted = {max(1, n_sms // row_blocks - 1), max(1, n_sms // row_blocks // 2)}
        for splits in sorted({min(most, s) for s in wanted}):
            yield Fold(block_m, block_n, warps, stages, splits)


def flashinfer_mla(data: Data, backend: str) -> Call:
    """A causal chain of the n nodes as one request, on pages of one slot.

    Made at the first call, since its kernels are compiled then: a failure is that call's.
    """
    made = cache(lambda: _flashinfer_mla(data, backend))
    return lambda rows: made()(rows)


def _flashinfer_mla(data: Data, backend: str) -> Call:
    import flashinfer

    n, h, _ = data.query.shape
    s = data.shape.slots()
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 * 1024 * 1024, dtype=torch.int8, device="cuda"), backend=backend
    )

    def number(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    indices = torch.arange(s, dtype=torch.int32, device="cuda")
    wrapper.plan(
        number(0, n), number(0, s), indices, number(s), h, C, R, 1, True, SCALE,
        torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    q_nope, q_pe = data.query[..., :C].contiguous(), data.query[..., C:].contiguous()

    def run(rows: torch.Tensor) -> torch.Tensor:
        return wrapper.run(q_nope, q_pe, rows[:, None, :C], rows[:, None, C:])

    return run


def graph_us(call: Call, data: Data, replays: int = 7) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(data.rows[0])
        call(data.rows[1])
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for rows in data.rows:
            call(rows)
    times = []
    for i in range(replays + 1):
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i:
            times.append(start.elapsed_time(end) * 1e3 / len(data.rows))
    return statistics.median(times)


EAGER, COMPILED = "torch eager", "torch.compile"
EXTEND = "extend_attention (SGLang), rebuilt in Triton"
FOLD = "split-KV and tree tail in Triton"
DECODE = "split-KV decode in Triton, a node a request"
PRODUCTS = "two cuBLAS products, no softmax"
FLASHINFER = "FlashInfer MLA, causal"


def candidates(data: Data) -> Iterator[tuple[str, Call, torch.Tensor | None]]:
    """Name, call on one copy's rows, expected result (None: nothing to compare with)."""
    everything = eager(data.query, data.rows[0], torch.ones_like(data.seen)).float()
    want = eager(data.query, data.rows[0], data.seen).float()
    tree = data.tree.to(torch.uint8).contiguous()
    shape = data.shape
    yield EAGER, lambda rows: eager(data.query, rows, data.seen), None
    yield EXTEND, lambda rows: extend(data, rows, tree), want
    for setting in fold_settings(shape):
        yield FOLD, partial(fold, data, tree=tree, setting=setting), want
    n_sms = torch.cuda.get_device_properties(0).multi_processor_count
    programs = shape.nodes * triton.cdiv(shape.heads, 16)
    most = shape.slots() // 32
    for splits in sorted({max(1, min(most, n_sms // programs * k // 2)) for k in (1, 2, 4)}):
        yield DECODE, partial(decode, data, splits=splits), everything
    if find_spec("flashinfer"):
        chain = torch.ones_like(data.seen)
        chain[:, shape.committed :] = torch.ones_like(data.tree).tril()
        causal = eager(data.query, data.rows[0], chain).float()
        hopper = torch.cuda.get_device_capability()[0] == 9
        for backend in ("fa3", "fa2") if hopper else ("fa2",):
            yield FLASHINFER, flashinfer_mla(data, backend), causal
    yield PRODUCTS, lambda rows: two_products(data.query, rows), None


def time_peers(shapes: list[Any], budget_s: float = 180.0) -> dict[str, Any]:
    """times: peer -> shape -> microseconds; and what the peers are, and what did not run."""
    started = time.time()
    times: dict[str, dict[str, float]] = {}
    notes = [
        "FlashInfer's kernels, causal and not under a tree, are compiled on the spot by nvcc."
        if find_spec("flashinfer")
        else "FlashInfer is not installed here: not measured.",
        "FlashMLA: the registry has no wheel of it: not measured.",
    ]

    def measure(name: str, data: Data, call: Call, expected: torch.Tensor | None) -> None:
        if time.time() - started > budget_s:
            notes.append(f"{name} at {data.shape}: no time was left.")
            return
        try:
            if expected is not None:
                error = (call(data.rows[0]).float() - expected).abs().max() / expected.abs().max()
                assert error < 2e-2, f"differs from torch by {float(error):.1e}"
            us = graph_us(call, data)
        except Exception as error:
            why = " ".join(str(error).split())[:200]
            notes.append(f"{name} at {data.shape} failed: {type(error).__name__}: {why}")
            print(notes[-1], flush=True)
            return
        its = times.setdefault(name, {})
        its[str(data.shape)] = min(us, its.get(str(data.shape), us))
        setting = getattr(call, "keywords", {})
        what = setting.get("setting") or setting.get("splits") or ""
        print(f"| {name} | {data.shape} | {us:.1f} | {what} |", flush=True)

    print("| peer | shape | us | setting |\n|---|---|---|---|")
    for shape in shapes:
        data = Data(shape)
        for name, call, expected in candidates(data):
            measure(name, data, call, expected)
        del data, call, expected
        torch.cuda.empty_cache()
    torch._dynamo.config.cache_size_limit = 64
    compiled = torch.compile(eager, dynamic=False)
    for shape in sorted(shapes, key=lambda shape: shape.nodes != 17):
        data = Data(shape)  # last: compilation takes the most time
        expected = eager(data.query, data.rows[0], data.seen).float()
        call = partial(lambda rows, data: compiled(data.query, rows, data.seen), data=data)
        measure(COMPILED, data, call, expected)
        del data, call, expected
        torch.cuda.empty_cache()
    return {
        "times": times,
        "tree_capable": [EAGER, COMPILED, EXTEND, FOLD],
        "partial": [PRODUCTS],
        "extend": [EXTEND],
        "notes": notes,
    }
