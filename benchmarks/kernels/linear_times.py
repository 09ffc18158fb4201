"""The times of linear.py, beside this file, and their table."""

# Closures over loop variables are called before the loop goes on.
# ruff: noqa: B023

from __future__ import annotations

import statistics
import types
from typing import Any

import numpy as np
from linear_device import Device
from table_head import measured_by

from kdtr.engine import cuda_experts, cuda_linear, cuda_router

COLD_BYTES, SPARE_BYTES = 170e6, 1.2e9
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


class Times:
    def __init__(self, device: Device, variants: bool) -> None:
        self.d, self.torch, self.variants = device, device.torch, variants
        self.rows: list[dict[str, Any]] = []
        self.read = device.cp.RawKernel(READ, "read_only", options=("-std=c++17",))
        self.bandwidth = 0.0
        self.spare = self.torch.empty(int(SPARE_BYTES), dtype=self.torch.int8, device="cuda")
        self.spare.random_()
        self._reading: dict[int, float] = {}

    def note(self, what: str, n: int, n_bytes: float, time_us: float) -> None:
        gb = n_bytes / time_us / 1e3
        reading_us = self.reading_us(n_bytes)
        its = {"what": what, "n": n, "mb": n_bytes / 1e6, "us": time_us, "gb_per_s": gb}
        self.rows.append({**its, "reading_us": reading_us})
        print(
            f"{what:44} n={n:3} {n_bytes / 1e6:8.1f} MB {time_us:9.2f} us {gb:7.0f} GB/s "
            f"{100 * gb / self.bandwidth:5.1f} % {100 * reading_us / time_us:5.1f} %",
            flush=True,
        )

    def reading_us(self, n_bytes: float) -> float:
        """What a kernel that only reads takes for so many bytes, in this run."""
        pointer, total = self.spare.data_ptr(), self.spare.numel()
        if n_bytes > total:
            return self.reading_us(1e9) * n_bytes / 1e9
        size = int(n_bytes) // 4096 * 4096
        if size not in self._reading:
            cp, sms = self.d.cp, cuda_linear.multiprocessors()
            copies = min(total // size, max(2, -(-int(COLD_BYTES) // size)))
            to = cp.zeros(1, cp.int32)

            def time_us(blocks: int) -> float:
                def calls() -> None:
                    for c in range(copies):
                        at = np.uint64(pointer + c * size)
                        self.read((blocks * sms,), (512,), (at, np.int64(size // 16), to))

                return self.d.time_us(calls, copies, 0.2)

            self._reading[size] = min(time_us(2), time_us(4)) * n_bytes / size
        return self._reading[size]

    def bandwidths(self) -> None:
        """The highest is what the first percentage refers to."""
        sizes = [mb * 1e6 for mb in (4.7, 14.7, 30.3, 117.4, 1000)]
        self.bandwidth = max(size / self.reading_us(size) / 1e3 for size in sizes)
        print(f"read bandwidth {self.bandwidth:.0f} GB/s")
        for size in sizes:
            self.note("read only", 0, size, self.reading_us(size))

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
                    names += sorted({*cuda_linear.fitting(o, hopper=d.hopper)} - {chosen})
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
        get, router = d.getter("experts", "bf16"), d.getter("router", "bf16")
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
            groups = [cuda_router.grouped(router, v, e, count) for v in id_arrays]
            for extra, name in ((None, "experts"), (shared_arrays, "experts and shared")):
                for overlap in (False, True):

                    def calls(extra: Any = extra, overlap: bool = overlap) -> None:
                        for v, g in zip(id_arrays, groups, strict=True):
                            cuda_experts.moe(
                                get, ax, v, weight_array, *arrays, extra, g, count, overlap=overlap
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
                    g = cuda_router.new_groups(n, e, k)
                    for gate in gate_arrays:
                        cuda_router.route(
                            router, ax, gate, bias, config, count, g, arrived, overlap=overlap
                        )

                what = f"router, choice and groups{' overlap' if overlap else ''}"
                self.note(what, n, e * m * 2, d.time_us(route, len(gates), 0.2))

                def scores(overlap: bool = overlap) -> None:
                    for gate in gate_arrays:
                        cuda_router.router_scores(router, ax, gate, count, overlap=overlap)

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
        for part in (self.bandwidths, self.linear, self.heads, self.experts):
            try:
                part()
            except Exception:
                import traceback

                traceback.print_exc()


def table(times: Times) -> str:
    lines = [
        "# Projections, router and experts on a GPU",
        "",
        *measured_by("linear.py"),
        "",
        f"of 1 GB: of {times.bandwidth:.0f} GB/s, what a kernel that only reads reached in this "
        "run on 1 GB. of its size: of what that kernel reached on as many bytes, launch included. "
        "bfloat16, cold L2, medians over replays of a graph. `overlap`: the launch may begin "
        "before the one ahead of it ends.",
        "",
        "| what | rows | MB | us | GB/s | of 1 GB | of its size |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what'].strip()} | {row['n'] or ''} | {row['mb']:.1f} | {row['us']:.2f} "
        f"| {row['gb_per_s']:.0f} | {100 * row['gb_per_s'] / times.bandwidth:.0f} % "
        f"| {100 * row['reading_us'] / row['us']:.0f} % |"
        for row in times.rows
    ]
    return "\n".join([*lines, "", _NOTES])


_NOTES = """\
## What fell short, and what was tried

Microseconds in this section are of earlier runs on an H200.

* 75 % of reading 1 GB is reached at 117 MB; at 15 and 30 MB not even a kernel that only reads does,
  in a launch of its own (57 and 72 %). Of what reading reaches at its size, one row has 87 %
  at 15 and at 30 MB, launches apart.
* With 65 rows cuBLAS is still faster: by 1.5 times at 15 MB, 1.3 at 30, 1.1 at 117, launches apart.
  By mma.sync, which every architecture has, it was 1.9, 1.4 and 1.3.
* A block of linear_wide had 64 rows of weights, and 32 a warp: a tile of x was read from shared
  memory for every two products, which took as long as the products; a round of 36 of them took 870
  clocks. With 64 rows a warp, and a cluster that adds up through shared memory instead of a last
  block that reads partial results from L2, 117 MB went from 47.7 to 41.1 us.
* One warp on each quarter of an SM waits 350 clocks a round for barriers and fragments, whatever
  its size: a second block on the SM hides that. At 30 MB there is one: 19.5 us.
* A chain of wgmma gives the bits of mma.sync, so Hopper has a kernel of its own from 25 rows on
  (linear_wgmma.cu). The compiler waits for every product whose sums a branch may touch: 900 clocks
  a stage of 64 elements. A loop for every slice took 117 MB from 42.8 to 36.1 us, 30 MB from 21.7
  to 18.6, and two warpgroups a block there to 17.5. Blocks of 256 rows read x a quarter as often
  and were slower at 117 MB (38.7 us): 74 KB of sums a block go through the cluster's shared memory,
  at 14 bytes a clock. What is left at 15 and 30 MB is the first stage (2.5 us: all blocks ask for
  all of their stages at once) and adding up (2 us).
* Asking L2 for weights before the launch ahead has ended was tried, and cost as much as it gained.
* One row of experts reaches 60 %: eight experts are 88 MB in 256 pieces of work, for 396 blocks.
"""
