"""Projections, router and experts on a CUDA device: checked, timed, and beside cuBLAS and torch.

    python benchmarks/kernels/linear.py --check --time [--variants] [--table FILE] [--out FILE]

Checks compare with float64, demand the same bits in every replay of a graph, and that a row's bits
do not depend on the other rows. Times are medians over replays of a CUDA graph with one call per
copy of the weights, with copies enough that L2 has forgotten a copy when its turn comes again; a
call's time is the graph's divided by its calls, launches included. `overlap` lets a launch begin
before the one ahead of it ends. The read bandwidth is that of a kernel that only reads, in the same
run.
Needs CuPy, torch and a GPU.
"""

# Closures over loop variables are called before the loop goes on.
# ruff: noqa: B023

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.engine import cuda_experts, cuda_hopper, cuda_linear
from kdtr.engine.cuda_modules import HOPPER_FILES, KERNELS

COLD_BYTES = 170e6
READ = """
extern "C" __global__ void __launch_bounds__(512) read_only(
    const uint4* from, long long n, int* to) {
    long long stride = (long long)gridDim.x * blockDim.x;
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned int x = 0;
    for (; at + 7 * stride < n; at += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; ++j)
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(v[j].x), "=r"(v[j].y), "=r"(v[j].z), "=r"(v[j].w)
                         : "l"(from + at + j * stride));
#pragma unroll
        for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; at < n; at += stride) {
        uint4 v = from[at];
        x ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (x == 0x12345678) *to = x;
}
"""
LINEAR_SHAPES = {  # TP8 of a model like Kimi K2: q_b, o, qkv_a, and the whole o
    "4.7 MB": (1536, 1536),
    "14.7 MB": (7168, 1024),
    "30 MB": (2112, 7168),
    "117 MB": (7168, 8192),
}
ROWS = (1, 17, 65)


class Device:
    """Compiled kernels, one stream for CuPy and torch, and graphs."""

    def __init__(self) -> None:
        import cupy as cp
        import torch

        self.cp, self.torch = cp, torch
        self.hopper = cp.cuda.Device().compute_capability == "90"
        self.torch_stream = torch.cuda.Stream()
        self.stream = cp.cuda.ExternalStream(self.torch_stream.cuda_stream)
        self.stream.use()
        torch.cuda.set_stream(self.torch_stream)
        self.modules: dict[tuple[str, str], Any] = {}
        self.kernels: dict[tuple[str, str, str], Any] = {}

    def getter(self, file: str, dtype: str) -> Callable[[str], Any]:
        if (file, dtype) not in self.modules:
            path = KERNELS / f"{file}.cu"
            options = ("-std=c++17", f"-I{path.parent}")
            options += ("-DSTORE_BF16",) if dtype == "bf16" else ()
            if file in HOPPER_FILES:
                module = cuda_hopper.compiled(self.cp, path.read_text(), path.name, options)
            else:
                module = self.cp.RawModule(code=path.read_text(), options=options)
            self.modules[file, dtype] = module

        def get(name: str) -> Any:
            key = file, dtype, name
            if key not in self.kernels:
                self.kernels[key] = self.modules[file, dtype].get_function(name)
            return self.kernels[key]

        return get

    def linear(self, dtype: str) -> Callable[[str], Any]:
        """Kernels of projections, whatever their file."""
        get, get_wgmma = self.getter("linear", dtype), None
        if dtype == "bf16" and self.hopper:
            get_wgmma = self.getter("linear_wgmma", dtype)
        return lambda name: (
            get_wgmma(name) if get_wgmma and name.startswith("linear_wgmma") else get(name)
        )

    def fitting(self, o: int) -> set[str]:
        """Kernels of projections that may serve o rows of weights: those with as many slices."""
        slices = cuda_linear.slices_of(o)
        found = set()
        for name in cuda_linear.SHARED_BYTES:
            kind, *numbers = name.split("_")[1:]
            its = {
                "stream": lambda: 8 if numbers[0] == "32" else 16,
                "wide": lambda: int(numbers[1]),
                "wgmma": lambda: int(numbers[2]) if self.hopper else 0,
            }.get(kind, lambda: 0)
            if its() == slices:
                found.add(name)
        return found

    def of(self, tensor: Any) -> Any:
        """A torch tensor, bfloat16 as its bits, as a CuPy array of the same memory."""
        if tensor.dtype == self.torch.bfloat16:
            tensor = tensor.view(self.torch.int16)
        return self.cp.asarray(tensor)

    def back(self, array: Any, dtype: str) -> Any:
        """A CuPy array as a torch tensor of the same memory."""
        tensor = self.torch.as_tensor(array, device="cuda")
        return tensor.view(self.torch.bfloat16) if dtype == "bf16" else tensor

    def graph(self, calls: Callable[[], Any]) -> tuple[Any, Any]:
        """Runs once, captures; the graph, and what the captured calls returned."""
        calls()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="relaxed")
        kept = calls()
        graph.capture_end()
        return graph, kept

    def time_us(self, calls: Callable[[], Any], n_calls: int, budget_s: float = 0.4) -> float:
        """Median time of a call."""
        graph, kept = self.graph(calls)
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        times: list[float] = []
        began = time.monotonic()
        for replay in range(60):
            start.record(self.torch_stream)
            graph.replay()
            end.record(self.torch_stream)
            end.synchronize()
            if replay > 1:
                times.append(start.elapsed_time(end) * 1e3 / n_calls)
            if time.monotonic() - began > budget_s and len(times) >= 5:
                break
        del kept
        return statistics.median(times)


# Checks


class Checks:
    def __init__(self, device: Device) -> None:
        self.d = device
        self.torch = device.torch
        self.torch.manual_seed(1)
        self.failed = 0
        self.passed = 0

    def expect(self, name: str, good: bool, detail: str = "") -> None:
        self.passed += bool(good)
        self.failed += not good
        if not good:
            print(f"FAILED {name} {detail}", flush=True)

    def random(self, *shape: int, dtype: str, scale: float = 1.0) -> Any:
        x = self.torch.randn(*shape, device="cuda") * scale
        return x.to(self.torch.bfloat16) if dtype == "bf16" else x

    def close(self, name: str, y: Any, exact: Any, magnitude: Any, dtype: str) -> None:
        """|y - exact| within half a unit of storage and float32 sums of `magnitude` in all."""
        bound = 4e-6 * magnitude + 1e-30
        if dtype == "bf16":
            bound = bound + exact.abs() * 2.0**-8 * 1.01
        error = (y.double() - exact).abs()
        ratio = (error / bound).max().item()
        self.expect(name, ratio <= 1, f"error / bound = {ratio:.3g}")

    def linear(self) -> None:
        torch, d = self.torch, self.d
        shapes = [
            *((1, 16, 32), (1, 1536, 1536), (3, 17, 40), (17, 100, 264), (25, 130, 520)),
            *((65, 2112, 7168), (129, 300, 256), (5, 7, 9), (200, 50, 24), (33, 4100, 1024)),
            *((24, 4096, 136), (40, 4097, 8), (66, 257, 1032), (8, 1, 8), (1, 1, 1), (70, 33, 100)),
            *((300, 4100, 512), (17, 7168, 1024), (2, 5000, 3000)),
        ]
        for dtype in ("f32", "bf16"):
            get = d.linear(dtype)
            for n, o, i in shapes:
                wide = self.random(n, i + 24, dtype=dtype)
                x, w = wide[:, 8 : 8 + i], self.random(o, i, dtype=dtype)
                rows = max(1, n - n // 3)
                x[rows:] = float("nan")
                count = d.of(torch.tensor([rows], device="cuda"))
                ax = d.of(wide)[:, 8 : 8 + i]
                exact = x[:rows].double() @ w.double().T
                size = x[:rows].double().abs() @ w.double().abs().T
                names = {cuda_linear.plan(ax, d.of(w), hopper=d.hopper)}
                if cuda_linear.fast(ax, d.of(w)):
                    names |= self.d.fitting(o)
                same = None
                for name in sorted(names):
                    out = torch.full((n, o), 7.0, device="cuda").to(w.dtype)
                    cuda_linear.run(get, name, ax, d.of(w), d.of(out), count)
                    label = f"{name} {dtype} n={n} o={o} i={i}"
                    self.close(label, out[:rows], exact, size, dtype)
                    self.expect(label + " padding", bool((out[rows:] == 7).all()))
                    same = out[:rows] if same is None else same
                    self.expect(label + " same bits", torch.equal(same, out[:rows]))
                wgmma = get if d.hopper and dtype == "bf16" else None
                y = d.back(cuda_linear.linear(get, ax, d.of(w), count, wgmma=wgmma), dtype)
                self.expect(f"linear {dtype} {n} {o} {i}", torch.equal(y[:rows], same))
                for row in (0, rows // 2, rows - 1):
                    alone = d.back(cuda_linear.linear(get, ax[row : row + 1], d.of(w)), dtype)
                    self.expect(f"alone {dtype} {n} {o} {i}", torch.equal(y[row : row + 1], alone))
            for n, h, o, i in (
                *((1, 8, 512, 128), (17, 8, 512, 128), (65, 4, 128, 512), (5, 3, 20, 12)),
            ):
                q = self.random(n, h, i + 64, dtype=dtype)
                w = self.random(h, o, i, dtype=dtype)
                out = torch.zeros(n, h, o + 64, device="cuda").to(w.dtype)
                count = d.of(torch.tensor([n], device="cuda"))
                aq, a_out = d.of(q)[:, :, :i], d.of(out)[:, :, :o]
                cuda_linear.batched_linear(get, aq, d.of(w), a_out, count)
                x = q[:, :, :i].double()
                exact = torch.einsum("nhi,hoi->nho", x, w.double())
                size = torch.einsum("nhi,hoi->nho", x.abs(), w.double().abs())
                self.close(f"batched {dtype} {n} {h} {o} {i}", out[:, :, :o], exact, size, dtype)
                self.expect("batched rest", bool((out[:, :, o:] == 0).all()))
                few = torch.zeros_like(out)
                for row in range(n):
                    one = slice(row, row + 1)
                    cuda_linear.batched_linear(get, aq[one], d.of(w), d.of(few)[one, :, :o])
                self.expect(f"batched alone {dtype} {n} {h}", torch.equal(few, out))
        get = d.getter("linear", "bf16")
        for n, h, c, nope, r in (
            *((1, 8, 512, 128, 64), (17, 8, 512, 128, 64), (65, 64, 512, 128, 64)),
            *((70, 3, 40, 24, 8), (6, 2, 33, 8, 0), (33, 4, 96, 200, 16)),
        ):
            q = self.random(n, h, nope + r, dtype="bf16")
            w = self.random(h, c, nope, dtype="bf16", scale=nope**-0.5)
            angle = torch.rand(n, r // 2, device="cuda") * 6
            cos, sin = angle.cos(), angle.sin()
            rows = max(1, n - n // 3)
            q[rows:] = float("nan")
            query = torch.full((n, h, c + r), 7.0, device="cuda").bfloat16()
            count = d.of(torch.tensor([rows], device="cuda"))
            self.expect("fast query", cuda_linear.fast_query(d.of(q), d.of(w)))
            tables = (d.cp.empty((n, 0), d.cp.float32),) * 2 if r == 0 else (d.of(cos), d.of(sin))
            cuda_linear.latent_query(get, d.of(q), d.of(w), *tables, d.of(query), count)
            x = q[:rows].double()
            exact = torch.einsum("nhi,hoi->nho", x[..., :nope], w.double())
            size = torch.einsum("nhi,hoi->nho", x[..., :nope].abs(), w.double().abs())
            label = f"latent query n={n} h={h} c={c}"
            self.close(label, query[:rows, :, :c], exact, size, "bf16")
            first, second = x[..., nope : nope + r // 2], x[..., nope + r // 2 :]
            by_cos, by_sin = cos[:rows, None].double(), sin[:rows, None].double()
            turned = torch.cat(
                (first * by_cos - second * by_sin, second * by_cos + first * by_sin), -1
            )
            if r:
                largest = first.abs() + second.abs()
                largest = torch.cat((largest, largest), -1)
                self.close(label + " rope", query[:rows, :, c:], turned, largest, "bf16")
            self.expect(label + " padding", bool((query[rows:] == 7).all()))
            alone = torch.zeros(1, h, c + r, device="cuda").bfloat16()
            last = slice(rows - 1, rows)
            one = [t[last] for t in tables]
            cuda_linear.latent_query(get, d.of(q)[last], d.of(w), *one, d.of(alone))
            self.expect(label + " alone", torch.equal(alone[0], query[rows - 1]))

    def router(self) -> None:
        torch, d = self.torch, self.d
        arrived = d.cp.zeros(1, d.cp.int32)
        for dtype in ("f32", "bf16"):
            get = d.getter("experts", dtype)
            for e, m, k, n_group, topk_group, scoring, norm in (
                (384, 7168, 8, 1, 1, "sigmoid", True),
                (256, 512, 8, 8, 4, "sigmoid", True),
                (64, 256, 6, 1, 1, "softmax", False),
                (512, 96, 16, 32, 8, "sigmoid", True),
                (160, 104, 6, 8, 3, "softmax", False),
                (12, 50, 3, 4, 2, "sigmoid", True),
                (6, 33, 2, 6, 2, "softmax", True),
            ):
                config = types.SimpleNamespace(
                    num_experts_per_tok=k, n_group=n_group, topk_group=topk_group,
                    norm_topk_prob=norm, routed_scaling_factor=2.5, scoring_func=scoring,
                )  # fmt: skip
                for n in (1, 9, 65):
                    for tied in (False, True):
                        label = f"router {dtype} e={e} m={m} k={k} {scoring} n={n} tied={tied}"
                        x = self.random(n, m, dtype=dtype)
                        gate = self.random(e, m, dtype=dtype, scale=m**-0.5)
                        bias = 0.1 * torch.randn(e, device="cuda")
                        if tied:
                            gate[:] = gate[:1]
                            gate[e // 2 :] = gate[:1] * 0.5
                            bias[:] = 0.125
                        rows = max(1, n - 2)
                        x[rows:] = float("nan")
                        count = d.of(torch.tensor([rows], device="cuda"))
                        groups = cuda_experts.new_groups(n, e, k)
                        scores, ids, weights = (
                            v[:rows].get()
                            for v in cuda_experts.route(
                                get, d.of(x), d.of(gate), d.of(bias), config, count, groups, arrived
                            )
                        )
                        raw = x[:rows].double() @ gate.double().T
                        exact = raw.sigmoid() if scoring == "sigmoid" else raw.softmax(-1)
                        error = np.abs(scores - exact.cpu().numpy()).max()
                        self.expect(label, error < 4e-6, f"error {error:.3g}")
                        want_ids, want = choose(scores, bias.cpu().numpy(), config)
                        self.expect(label + " ids", np.array_equal(ids, want_ids))
                        near = np.allclose(weights, want, rtol=1e-6, atol=0)
                        self.expect(label + " weights", near)
                        self.groups(label, groups.get(), ids, n, e, k)
                        alone = cuda_experts.route(get, d.of(x[:1]), d.of(gate), d.of(bias), config)
                        self.expect(label + " alone", np.array_equal(alone[0].get(), scores[:1]))

    def groups(
        self, label: str, groups: np.ndarray, ids: np.ndarray, n: int, e: int, k: int
    ) -> None:
        touched, pairs = np.unique(ids, return_counts=True)
        order = np.argsort(ids.ravel(), kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        first = np.concatenate(([0], np.cumsum(pairs)))
        good = groups[0] == len(touched)
        good &= np.array_equal(groups[1 : 1 + len(touched)], touched)
        good &= np.array_equal(groups[1 + e : 2 + e + len(touched)], first)
        good &= np.array_equal(groups[2 + 2 * e :][: len(order)], order // k)
        good &= np.array_equal(groups[2 + 2 * e + n * k :][: len(order)], rank)
        self.expect(label + " groups", bool(good))

    def experts(self) -> None:
        torch, d = self.torch, self.d
        for dtype in ("f32", "bf16"):
            get, get_linear = d.getter("experts", dtype), d.getter("linear", dtype)
            for e, k, m, i, s in (
                (64, 8, 512, 256, 256),
                (16, 3, 264, 40, 72),
                (8, 2, 96, 24, 0),
                (5, 2, 33, 7, 9),
                (40, 8, 7168, 256, 256),
            ):
                gate_up = self.random(e, 2 * i, m, dtype=dtype, scale=m**-0.5)
                down = self.random(e, m, i, dtype=dtype, scale=i**-0.5)
                shared = None
                if s:
                    shared = (
                        self.random(2 * s, m, dtype=dtype, scale=m**-0.5),
                        self.random(m, s, dtype=dtype, scale=s**-0.5),
                    )
                limit = 4e-5 if dtype == "f32" else 0.05
                few = e // 2 + k // 2
                for n, spread in (
                    *((1, e), (9, e), (17, e), (65, e), (65, k), (65, few), (129, k)),
                ):
                    label = f"experts {dtype} e={e} k={k} m={m} i={i} s={s} n={n} of {spread}"
                    x = self.random(n, m, dtype=dtype)
                    order = torch.rand(n, min(spread, e), device="cuda").argsort(-1)
                    ids = order[:, :k].sort(-1).values.contiguous()
                    weights = torch.rand(n, k, device="cuda")
                    rows = max(1, n - n // 4)
                    x[rows:] = float("nan")
                    ids[rows:] = -(10**9)
                    count = d.of(torch.tensor([rows], device="cuda"))
                    arrays = (d.of(gate_up), d.of(down), shared and tuple(map(d.of, shared)))
                    routed = d.of(ids), d.of(weights)
                    y = d.back(cuda_experts.moe(get, d.of(x), *routed, *arrays, count), dtype)
                    exact = self.exact_moe(
                        x[:rows], ids[:rows], weights[:rows], gate_up, down, shared
                    )
                    error = (y[:rows].double() - exact).abs().max() / exact.square().mean().sqrt()
                    self.expect(label, error.item() < limit, f"error {error.item():.3g}")
                    some = rows // 2
                    alone = d.back(
                        cuda_experts.moe(
                            get, d.of(x[some : some + 1]), d.of(ids[some : some + 1]),
                            d.of(weights[some : some + 1]), *arrays,
                        ), dtype,
                    )  # fmt: skip
                    self.expect(label + " alone", torch.equal(alone[0], y[some]))
                if shared:
                    for n in (1, 17, 65):
                        x = self.random(n, m, dtype=dtype)
                        two = map(d.of, shared)
                        y = d.back(cuda_experts.swiglu(get, get_linear, d.of(x), *two), dtype)
                        exact = self.exact_swiglu(x, *shared)
                        error = (y.double() - exact).abs().max() / exact.square().mean().sqrt()
                        self.expect(f"swiglu {dtype} {m} {s} {n}", error.item() < limit)

    def exact_swiglu(self, x: Any, gate_up: Any, down: Any) -> Any:
        gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
        return (gate * gate.sigmoid() * up).to(x.dtype).double() @ down.double().T

    def exact_moe(
        self, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, shared: Any
    ) -> Any:
        """In float64, rounded where the kernels store."""
        torch = self.torch
        out = torch.zeros(len(x), x.shape[1], device="cuda", dtype=torch.float64)
        for expert in ids.unique().tolist():
            rows, choice = (ids == expert).nonzero(as_tuple=True)
            y = self.exact_swiglu(x[rows], gate_up[expert], down[expert]).to(x.dtype).double()
            out[rows] += weights[rows, choice].double()[:, None] * y
        if shared:
            out = out.to(x.dtype).double()
            out += self.exact_swiglu(x, *shared).to(x.dtype).double()
        return out.to(x.dtype)

    def replays(self) -> None:
        """100 replays leave the same bits, with launches that overlap and without."""
        torch, d = self.torch, self.d
        e, k, m, i = 64, 8, 1024, 256
        linear, experts = d.getter("linear", "bf16"), d.getter("experts", "bf16")
        config = types.SimpleNamespace(
            num_experts_per_tok=k, n_group=1, topk_group=1, norm_topk_prob=True,
            routed_scaling_factor=2.5, scoring_func="sigmoid",
        )  # fmt: skip
        w = d.of(self.random(2112, m, dtype="bf16", scale=m**-0.5))
        back = d.of(self.random(m, 2112, dtype="bf16", scale=2112**-0.5))
        gate = d.of(self.random(e, m, dtype="bf16", scale=m**-0.5))
        bias = d.of(torch.zeros(e, device="cuda"))
        gate_up = d.of(self.random(e, 2 * i, m, dtype="bf16", scale=m**-0.5))
        down = d.of(self.random(e, m, i, dtype="bf16", scale=i**-0.5))
        shared = (gate_up[0].copy(), down[0].copy())
        arrived = d.cp.zeros(1, d.cp.int32)
        for n in (1, 17, 65):
            x = d.of(self.random(n, m, dtype="bf16"))
            count = d.of(torch.tensor([max(1, n - 1)], device="cuda"))
            reference = None
            for overlap in (False, True):

                def chain(overlap: bool = overlap) -> Any:
                    h = cuda_linear.linear(linear, x, w, count, overlap=overlap)
                    h = cuda_linear.linear(linear, h, back, count, overlap=overlap)
                    groups = cuda_experts.new_groups(n, e, k)
                    scores, ids, weights = cuda_experts.route(
                        experts, h, gate, bias, config, count, groups, arrived, overlap=overlap
                    )
                    y = cuda_experts.moe(
                        experts, h, ids, weights, gate_up, down, shared, count, groups,
                        overlap=overlap,
                    )  # fmt: skip
                    last = cuda_linear.linear(linear, y, w, count, overlap=overlap)
                    return last, scores, ids, h, y, weights

                graph, kept = d.graph(chain)
                rows = max(1, n - 1)
                differ = 0
                for _ in range(100):
                    graph.replay()
                    self.torch.cuda.synchronize()
                    found = [v[:rows].get().tobytes() for v in kept]
                    reference = reference or found
                    differ += found != reference
                what = f"replays n={n} overlap={overlap}"
                self.expect(what, differ == 0, f"{differ} of 100 differ")

    def run(self) -> bool:
        for part in (self.linear, self.router, self.experts, self.replays):
            began = time.monotonic()
            try:
                part()
            except Exception as error:  # the other parts still say something
                import traceback

                traceback.print_exc()
                self.expect(part.__name__, False, repr(error))
            self.torch.cuda.synchronize()
            print(f"checked {part.__name__} in {time.monotonic() - began:.1f} s", flush=True)
        print(f"{self.passed} checks passed, {self.failed} failed", flush=True)
        return not self.failed


def choose(scores: np.ndarray, bias: np.ndarray, config: Any) -> tuple[np.ndarray, np.ndarray]:
    """host_moe.choose_experts."""

    def largest(values: np.ndarray, count: int) -> np.ndarray:
        return np.argsort(-values, axis=-1, kind="stable")[:, :count]

    n, e = scores.shape
    grouped = (scores + bias).reshape(n, config.n_group, -1)
    kept_groups = largest(np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1), config.topk_group)
    kept = np.zeros((n, config.n_group), bool)
    np.put_along_axis(kept, kept_groups, True, axis=-1)
    eligible = np.where(kept[..., None], grouped, -np.inf).reshape(n, e)
    ids = np.sort(largest(eligible, config.num_experts_per_tok), axis=-1)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return ids, weights * np.float32(config.routed_scaling_factor)


# Times


class Times:
    def __init__(self, device: Device, variants: bool) -> None:
        self.d, self.torch, self.variants = device, device.torch, variants
        self.rows: list[dict[str, Any]] = []
        self.read = device.cp.RawKernel(READ, "read_only", options=("-std=c++17",))
        self.bandwidth = 0.0

    def note(self, what: str, n: int, n_bytes: float, time_us: float) -> None:
        gb = n_bytes / time_us / 1e3
        self.rows.append({"what": what, "n": n, "mb": n_bytes / 1e6, "us": time_us, "gb_per_s": gb})
        print(
            f"{what:44} n={n:3} {n_bytes / 1e6:8.1f} MB {time_us:9.2f} us {gb:7.0f} GB/s "
            f"{100 * gb / self.bandwidth:5.1f} %",
            flush=True,
        )

    def bandwidths(self, spare: Any) -> None:
        """The highest is what percentages refer to; the others show what a size allows."""
        cp, d = self.d.cp, self.d
        to = cp.zeros(1, cp.int32)
        sms = cuda_linear.multiprocessors()
        words = spare.view(self.torch.int32)
        pointer, total = words.data_ptr(), words.numel() * 4
        found = []
        for mb in (4.7, 14.7, 30.3, 117.4, 1000):
            size = int(mb * 1e6) // 4096 * 4096
            copies = min(total // size, max(2, -(-int(COLD_BYTES) // size)))
            best = 1e9
            for blocks in (2, 4):

                def calls(size: int = size, copies: int = copies, blocks: int = blocks) -> None:
                    for c in range(copies):
                        at = np.uint64(pointer + c * size)
                        self.read((blocks * sms,), (512,), (at, np.int64(size // 16), to))

                best = min(best, d.time_us(calls, copies, 0.2))
            found.append((size, best))
        self.bandwidth = max(size / best / 1e3 for size, best in found)
        print(f"read bandwidth {self.bandwidth:.0f} GB/s")
        for size, best in found:
            self.note("read only", 0, size, best)

    def linear(self) -> None:
        torch, d = self.torch, self.d
        get = d.linear("bf16")
        for label, (o, i) in LINEAR_SHAPES.items():
            n_bytes = o * i * 2
            copies = max(4, -(-int(COLD_BYTES) // n_bytes))
            weights = [
                (torch.randn(o, i, device="cuda") * i**-0.5).bfloat16() for _ in range(copies)
            ]
            arrays = [d.of(w) for w in weights]
            for n in ROWS:
                x = torch.randn(n, i, device="cuda").bfloat16()
                ax, count = d.of(x), d.of(torch.tensor([n], device="cuda"))
                out = d.cp.empty((n, o), d.cp.int16)
                chosen = cuda_linear.plan(ax, arrays[0], hopper=d.hopper)
                names = [chosen]
                if self.variants:
                    names += sorted(d.fitting(o) - {chosen})
                elif d.hopper and chosen != (portable := cuda_linear.plan(ax, arrays[0])):
                    names.append(portable)
                for name in names:
                    for overlap in (False, True):

                        def calls(name: str = name, overlap: bool = overlap) -> None:
                            for w in arrays:
                                cuda_linear.run(get, name, ax, w, out, count, overlap=overlap)

                        what = f"{label} {name}{' overlap' if overlap else ''}"
                        self.note(what, n, n_bytes, d.time_us(calls, copies, 0.1))
                what = f"{label} cuBLAS"
                functional = torch.nn.functional.linear
                kept = d.time_us(lambda: [functional(x, w) for w in weights], copies, 0.15)
                self.note(what, n, n_bytes, kept)

    def heads(self) -> None:
        torch, d = self.torch, self.d
        get = d.getter("linear", "bf16")
        h, o, i = 8, 512, 128
        weights = [torch.randn(h, o, i, device="cuda").bfloat16() for _ in range(160)]
        arrays = [d.of(w) for w in weights]
        for n in ROWS:
            x = torch.randn(n, h, i + 64, device="cuda").bfloat16()[:, :, :i]
            ax = d.cp.ascontiguousarray(d.cp.asarray(x.contiguous().view(torch.int16)))
            out = d.cp.empty((n, h, o), d.cp.int16)
            for overlap in (False, True):

                def calls(overlap: bool = overlap) -> None:
                    for w in arrays:
                        cuda_linear.batched_linear(get, ax, w, out, overlap=overlap)

                what = f"8 heads 512x128{' overlap' if overlap else ''}"
                self.note(what, n, h * o * i * 2, d.time_us(calls, len(arrays), 0.15))
            xt = x.transpose(0, 1).contiguous()
            kept = d.time_us(lambda: [torch.bmm(xt, w.transpose(1, 2)) for w in weights], 160, 0.15)
            self.note("8 heads 512x128 cuBLAS bmm", n, h * o * i * 2, kept)
        for h in (8, 64):
            copies = 160 if h == 8 else 20
            shape = (h, o, i)
            stacks = [torch.randn(shape, device="cuda").bfloat16() for _ in range(copies)]
            arrays = [d.of(w) for w in stacks]
            for n in ROWS:
                q = d.of(torch.randn(n, h, i + 64, device="cuda").bfloat16())
                cos, sin = (d.of(torch.rand(n, 32, device="cuda")) for _ in range(2))
                query = d.cp.empty((n, h, o + 64), d.cp.int16)
                for overlap in (False, True):

                    def queries(overlap: bool = overlap) -> None:
                        for w in arrays:
                            cuda_linear.latent_query(get, q, w, cos, sin, query, overlap=overlap)

                    what = f"latent query, {h} heads{' overlap' if overlap else ''}"
                    self.note(what, n, h * o * i * 2, d.time_us(queries, copies, 0.1))
                x = d.cp.empty((n, h, o), d.cp.int16)
                x.fill(0)
                out = d.cp.empty((n, h, i), d.cp.int16)
                backs = [w.reshape(h, i, o) for w in arrays]
                for overlap in (False, True):

                    def values(overlap: bool = overlap) -> None:
                        for w in backs:
                            cuda_linear.batched_linear(get, x, w, out, overlap=overlap)

                    what = f"{h} heads 128x512{' overlap' if overlap else ''}"
                    self.note(what, n, h * o * i * 2, d.time_us(values, copies, 0.1))

    def experts(self) -> None:
        torch, d = self.torch, self.d
        get = d.getter("experts", "bf16")
        e, k, m, i = 384, 8, 7168, 256
        gate_up = torch.empty(e, 2 * i, m, device="cuda", dtype=torch.bfloat16)
        down = torch.empty(e, m, i, device="cuda", dtype=torch.bfloat16)
        for j in range(e):
            gate_up[j] = torch.randn(2 * i, m, device="cuda") * m**-0.5
            down[j] = torch.randn(m, i, device="cuda") * i**-0.5
        gates = [(torch.randn(e, m, device="cuda") * m**-0.5).bfloat16() for _ in range(32)]
        shared = (gate_up[0].clone(), down[0].clone())
        arrays = (d.of(gate_up), d.of(down))
        shared_arrays = (d.of(shared[0]), d.of(shared[1]))
        bias = d.of(torch.zeros(e, device="cuda"))
        arrived = d.cp.zeros(1, d.cp.int32)
        config = types.SimpleNamespace(
            num_experts_per_tok=k, n_group=1, topk_group=1, norm_topk_prob=True,
            routed_scaling_factor=2.5, scoring_func="sigmoid",
        )  # fmt: skip
        for n in ROWS:
            x = torch.randn(n, m, device="cuda").bfloat16()
            ax, count = d.of(x), d.of(torch.tensor([n], device="cuda"))
            copies = 8 if n == 1 else 2
            # With one row, copies touch different experts, so that none is in L2.
            ids = [
                (torch.arange(8, device="cuda")[None] * 48 + c * 5).contiguous()
                if n == 1
                else torch.rand(n, e, device="cuda").argsort(-1)[:, :k].sort(-1).values.contiguous()
                for c in range(copies)
            ]
            weights = torch.rand(n, k, device="cuda")
            touched = [len(v.unique()) for v in ids]
            each = (3 * i * m) * 2
            n_bytes = each * statistics.mean(touched)
            id_arrays, weight_array = [d.of(v) for v in ids], d.of(weights)
            groups = [cuda_experts.new_groups(n, e, k) for _ in ids]
            for v, g in zip(id_arrays, groups, strict=True):
                cuda_experts.launch(get("group"), (1, 1, 1), 128, 0, (v, g, count, n, e, k))
            for extra, name in ((None, "experts"), (shared_arrays, "experts and shared")):
                for overlap in (False, True):

                    def calls(extra: Any = extra, overlap: bool = overlap) -> None:
                        for v, g in zip(id_arrays, groups, strict=True):
                            cuda_experts.moe(
                                get, ax, v, weight_array, *arrays, extra, count, g, overlap=overlap
                            )

                    time_us = d.time_us(calls, copies, 0.3)
                    mean = statistics.mean(touched)
                    what = f"{name}, {mean:.0f} touched{' overlap' if overlap else ''}"
                    self.note(what, n, n_bytes + (each if extra else 0), time_us)
            for part in ("gate_up", "down"):

                def one(part: str = part) -> None:
                    inner = d.cp.empty((n * k, i), d.cp.int16)
                    y, out = d.cp.empty((n * k, m), d.cp.int16), d.cp.empty((n, m), d.cp.int16)
                    for g in groups:
                        if part == "gate_up":
                            cuda_experts._gate_up(
                                get, True, ax, arrays[0], None, inner, None, g, count,
                                (n, e, k, m, i, 0), False,
                            )  # fmt: skip
                        else:
                            tiles = m // 16
                            row_tiles = -(-tiles // (2 * cuda_linear.multiprocessors()))
                            cuda_experts.launch(
                                get("down_stream"), (-(-tiles // row_tiles), 1, 1), 256,
                                cuda_experts.SHARED_BYTES["down_stream"],
                                (inner, None, arrays[1], None, y, None, out, weight_array, g, count,
                                 n, e, k, m, i, 0, row_tiles),
                            )  # fmt: skip

                share = 2 / 3 if part == "gate_up" else 1 / 3
                self.note(f"  {part} alone", n, n_bytes * share, d.time_us(one, copies, 0.3))
            self.peers(n, x, ids, weights, gate_up, down, n_bytes, copies)
            gate_arrays = [d.of(g) for g in gates]
            for overlap in (False, True):

                def route(overlap: bool = overlap) -> None:
                    g = cuda_experts.new_groups(n, e, k)
                    for gate in gate_arrays:
                        cuda_experts.route(
                            get, ax, gate, bias, config, count, g, arrived, overlap=overlap
                        )

                what = f"router, choice and groups{' overlap' if overlap else ''}"
                self.note(what, n, e * m * 2, d.time_us(route, len(gates), 0.2))

                def scores(overlap: bool = overlap) -> None:
                    for gate in gate_arrays:
                        cuda_experts.router_scores(get, ax, gate, count, overlap=overlap)

                what = f"  router alone{' overlap' if overlap else ''}"
                self.note(what, n, e * m * 2, d.time_us(scores, len(gates), 0.1))

    def peers(
        self, n: int, x: Any, ids: list[Any], weights: Any, gate_up: Any, down: Any, n_bytes: float,
        copies: int,
    ) -> None:  # fmt: skip
        """torch: a loop over touched experts known to the host, and its grouped product."""
        torch, d = self.torch, self.d
        functional, k = torch.nn.functional, ids[0].shape[1]

        def gathered(v: Any) -> tuple[Any, Any, list[tuple[int, Any, Any]]]:
            order = v.flatten().argsort(stable=True)
            ends = torch.bincount(v.flatten(), minlength=len(gate_up)).cumsum(0).int()
            loop = []
            for expert in v.unique().tolist():
                rows, choice = (v == expert).nonzero(as_tuple=True)
                loop.append((expert, rows, weights[rows, choice][:, None].bfloat16()))
            return order, ends, loop

        prepared = [gathered(v) for v in ids]

        def by_loop() -> None:
            for _, _, loop in prepared:
                out = torch.zeros_like(x)
                for expert, rows, weight in loop:
                    gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, -1)
                    y = functional.linear(functional.silu(gate) * up, down[expert])
                    out.index_add_(0, rows, y * weight)

        def by_group() -> None:
            for order, ends, _ in prepared:
                rows = x[order // k]
                gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
                inner = functional.silu(gate) * up
                y = torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)
                y = y * weights.flatten()[order][:, None].bfloat16()
                torch.zeros_like(x).index_add_(0, order // k, y)

        for name, peer in (("torch, loop", by_loop), ("torch, grouped_mm", by_group)):
            try:
                self.note(f"  {name}", n, n_bytes, d.time_us(peer, copies, 0.3))
            except Exception as error:
                print(f"  {name}: {error!r}"[:300], flush=True)

    def run(self) -> None:
        spare = self.torch.empty(1_200_000_000, dtype=self.torch.int8, device="cuda")
        spare.random_()
        for part in (lambda: self.bandwidths(spare), self.linear, self.heads, self.experts):
            try:
                part()
            except Exception:
                import traceback

                traceback.print_exc()


def _table(device: Device, times: Times) -> str:
    lines = [
        "# Projections, router and experts on a GPU",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {device.torch.cuda.get_device_properties(0).name}, torch "
        f"{device.torch.__version__}, CuPy {device.cp.__version__}. Command: "
        "`python benchmarks/kernels/linear.py --time`.",
        "",
        f"Percentages are of {times.bandwidth:.0f} GB/s, what a kernel that only reads reached in "
        "this run on 1 GB; on smaller sizes it reaches what its own rows say. bfloat16, cold L2, "
        "medians over replays of a graph. `overlap`: the launch may begin before the one ahead of "
        "it ends.",
        "",
        "| what | rows | MB | us | GB/s | of reading |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what'].strip()} | {row['n'] or ''} | {row['mb']:.1f} | {row['us']:.2f} "
        f"| {row['gb_per_s']:.0f} | {100 * row['gb_per_s'] / times.bandwidth:.0f} % |"
        for row in times.rows
    ]
    return "\n".join([*lines, "", _NOTES])


_NOTES = """\
What fell short (numbers of an earlier run on an H200): 75 % of reading is reached at 117 MB with
one row and, with overlap, with 17; at 15 and 30 MB not even a kernel that only reads reaches it
in a launch of its own (57 and 72 %). With 65 rows cuBLAS is faster by 1.4 to 2 times: activations
weigh as much as 64 rows of weights, and go through shared memory once for every 64. Asking L2 for
weights before the launch ahead has ended was tried, and cost as much as it gained. One row of
experts reaches 60 %: eight experts are 88 MB in 256 pieces of work, for 396 blocks.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--variants", action="store_true", help="time every kernel that fits")
    parser.add_argument("--out", type=Path, help="every row, as JSON")
    parser.add_argument("--table", type=Path, help="every row, as Markdown")
    options = parser.parse_args()
    device = Device()
    properties = device.torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {device.torch.__version__}, cupy {device.cp.__version__}")
    good = True
    if options.check:
        good = Checks(device).run()
    if options.time:
        times = Times(device, options.variants)
        times.run()
        if options.table:
            options.table.parent.mkdir(parents=True, exist_ok=True)
            options.table.write_text(_table(device, times), encoding="utf-8")
        if options.out:
            options.out.write_text(
                json.dumps({"card": properties.name, "rows": times.rows}, indent=1)
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
