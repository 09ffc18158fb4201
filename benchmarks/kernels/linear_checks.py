"""The checks of linear.py, beside this file: projections, router and experts against float64."""

# Closures over loop variables are called before the loop goes on.
# ruff: noqa: B023

from __future__ import annotations

import time
import types
from typing import Any

import numpy as np
from linear_device import Device

from kdtr.engine import cuda_experts, cuda_linear, cuda_router


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
                    names |= set(cuda_linear.fitting(o, hopper=d.hopper))
                same = None
                for name in sorted(names):
                    out = torch.full((n, o), 7.0, device="cuda").to(w.dtype)
                    cuda_linear.run(get, name, ax, d.of(w), d.of(out), count)
                    label = f"{name} {dtype} n={n} o={o} i={i}"
                    self.close(label, out[:rows], exact, size, dtype)
                    self.expect(label + " padding", bool((out[rows:] == 7).all()))
                    same = out[:rows] if same is None else same
                    self.expect(label + " same bits", torch.equal(same, out[:rows]))
                y = d.back(cuda_linear.linear(get, ax, d.of(w), count, wgmma=d.wgmma(dtype)), dtype)
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
            get = d.getter("router", dtype)
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
                        groups = cuda_router.new_groups(n, e, k)
                        scores, ids, weights = (
                            v[:rows].get()
                            for v in cuda_router.route(
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
                        alone = cuda_router.route(get, d.of(x[:1]), d.of(gate), d.of(bias), config)
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
            get, router = d.getter("experts", dtype), d.getter("router", dtype)
            get_linear, wgmma = d.linear(dtype), d.wgmma(dtype)
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
                    pairs = cuda_router.grouped(router, routed[0], e, count)
                    y = d.back(
                        cuda_experts.moe(get, d.of(x), *routed, *arrays, pairs, count), dtype
                    )
                    exact = self.exact_moe(
                        x[:rows], ids[:rows], weights[:rows], gate_up, down, shared
                    )
                    error = (y[:rows].double() - exact).abs().max() / exact.square().mean().sqrt()
                    self.expect(label, error.item() < limit, f"error {error.item():.3g}")
                    some = rows // 2
                    one = slice(some, some + 1)
                    pairs = cuda_router.grouped(router, d.of(ids[one]), e)
                    its = d.of(x[one]), d.of(ids[one]), d.of(weights[one])
                    alone = d.back(cuda_experts.moe(get, *its, *arrays, pairs), dtype)
                    self.expect(label + " alone", torch.equal(alone[0], y[some]))
                if shared:
                    for n in (1, 17, 65):
                        x = self.random(n, m, dtype=dtype)
                        arrays = d.of(x), *map(d.of, shared)
                        y = d.back(
                            cuda_experts.swiglu(get, get_linear, *arrays, wgmma=wgmma), dtype
                        )
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
        linear, wgmma = d.linear("bf16"), d.wgmma("bf16")
        experts, router = d.getter("experts", "bf16"), d.getter("router", "bf16")
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
                    h = cuda_linear.linear(linear, x, w, count, wgmma=wgmma, overlap=overlap)
                    h = cuda_linear.linear(linear, h, back, count, wgmma=wgmma, overlap=overlap)
                    groups = cuda_router.new_groups(n, e, k)
                    scores, ids, weights = cuda_router.route(
                        router, h, gate, bias, config, count, groups, arrived, overlap=overlap
                    )
                    y = cuda_experts.moe(
                        experts, h, ids, weights, gate_up, down, shared, groups, count,
                        overlap=overlap,
                    )  # fmt: skip
                    last = cuda_linear.linear(linear, y, w, count, wgmma=wgmma, overlap=overlap)
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
