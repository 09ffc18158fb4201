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
from typing import Any

import torch
import triton
from attention_shapes import SCALE, C, R, Shape
from peers_torch import Data, eager, two_products
from peers_triton import Fold, decode, extend, fold

Call = Callable[[torch.Tensor], Any]  # of one copy's rows

FOLD_BLOCKS = ((64, 32, 8, 2), (64, 64, 8, 1), (32, 32, 4, 2))


def fold_settings(shape: Shape) -> Iterator[Fold]:
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
    times: list[float] = []
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


def time_peers(shapes: list[Shape], budget_s: float = 180.0) -> dict[str, Any]:
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
