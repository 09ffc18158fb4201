"""The times of linear.py, beside this file, of router and experts, and beside them torch."""

from __future__ import annotations

import statistics
import types
from typing import Any

from linear_times import ROWS, Times

from kdtr.engine import cuda_experts, cuda_linear, cuda_router
from kdtr.engine.cuda_launch import launch

E, K, M, INNER = 384, 8, 7168, 256  # experts, chosen, hidden and inner size: TP8 of Kimi K2
EACH = 3 * INNER * M * 2  # bytes of an expert


def experts(times: Times) -> None:
    torch = times.torch
    gate_up = torch.empty(E, 2 * INNER, M, device="cuda", dtype=torch.bfloat16)
    down = torch.empty(E, M, INNER, device="cuda", dtype=torch.bfloat16)
    for j in range(E):
        gate_up[j] = torch.randn(2 * INNER, M, device="cuda") * M**-0.5
        down[j] = torch.randn(M, INNER, device="cuda") * INNER**-0.5
    gates = [(torch.randn(E, M, device="cuda") * M**-0.5).bfloat16() for _ in range(32)]
    shared = gate_up[0].clone(), down[0].clone()
    for n in ROWS:
        x = torch.randn(n, M, device="cuda").bfloat16()
        ids = choices(torch, n)
        weights = torch.rand(n, K, device="cuda")
        moe(times, x, ids, weights, gate_up, down, shared)
        peers(times, x, ids, weights, gate_up, down)
        router(times, x, gates)


def choices(torch: Any, n: int) -> list[Any]:
    """Of n rows. With one row, they touch different experts, so that none is in L2."""
    if n == 1:
        eight = torch.arange(K, device="cuda")[None] * (E // K)
        return [(eight + copy * 5).contiguous() for copy in range(8)]
    shuffled = (torch.rand(n, E, device="cuda").argsort(-1) for _ in range(2))
    return [order[:, :K].sort(-1).values.contiguous() for order in shuffled]


def touched(ids: list[Any]) -> float:
    """Experts, a choice."""
    return statistics.mean(len(v.unique()) for v in ids)


def moe(
    times: Times, x: Any, ids: list[Any], weights: Any, gate_up: Any, down: Any, shared: Any
) -> None:
    torch, d = times.torch, times.d
    get, get_router = d.getter("experts", "bf16"), d.getter("router", "bf16")
    n, copies = len(x), len(ids)
    n_bytes = EACH * touched(ids)
    ax, count = d.of(x), d.of(torch.tensor([n], device="cuda"))
    arrays, weight_array = (d.of(gate_up), d.of(down)), d.of(weights)
    id_arrays = [d.of(v) for v in ids]
    groups = [cuda_router.grouped(get_router, v, E, count) for v in id_arrays]
    shared_arrays = d.of(shared[0]), d.of(shared[1])
    for extra, name in ((None, "experts"), (shared_arrays, "experts and shared")):
        for overlap in (False, True):

            def calls(extra: Any = extra, overlap: bool = overlap) -> None:
                for v, g in zip(id_arrays, groups, strict=True):
                    cuda_experts.moe(
                        get, ax, v, weight_array, *arrays, extra, g, count, overlap=overlap
                    )

            time_us = d.time_us(calls, copies, 0.3)
            what = f"{name}, {touched(ids):.0f} touched{' overlap' if overlap else ''}"
            times.note(what, n, n_bytes + (EACH if extra else 0), time_us)

    def gate_up_alone() -> None:
        inner = d.cp.empty((n * K, INNER), d.cp.int16)
        for g in groups:
            cuda_experts._gate_up(
                get, True, ax, arrays[0], None, inner, None, g, count, (n, E, K, M, INNER, 0), False
            )

    def down_alone() -> None:
        inner = d.cp.empty((n * K, INNER), d.cp.int16)
        y, out = d.cp.empty((n * K, M), d.cp.int16), d.cp.empty((n, M), d.cp.int16)
        tiles = M // 16
        row_tiles = -(-tiles // (2 * cuda_linear.multiprocessors()))
        for g in groups:
            launch(
                get("down_stream"), (-(-tiles // row_tiles), 1, 1), 256,
                cuda_experts.SHARED_BYTES["down_stream"],
                (inner, None, arrays[1], None, y, None, out, weight_array, g, count,
                 n, E, K, M, INNER, 0, row_tiles),
            )  # fmt: skip

    for name, part, share in (("gate_up", gate_up_alone, 2 / 3), ("down", down_alone, 1 / 3)):
        times.note(f"  {name} alone", n, n_bytes * share, d.time_us(part, copies, 0.3))


def peers(times: Times, x: Any, ids: list[Any], weights: Any, gate_up: Any, down: Any) -> None:
    """torch: a loop over touched experts known to the host, and its grouped product."""
    torch, d = times.torch, times.d
    functional, n_bytes = torch.nn.functional, EACH * touched(ids)

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
            rows = x[order // K]
            gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
            inner = functional.silu(gate) * up
            y = torch._grouped_mm(inner, down.transpose(1, 2), offs=ends)
            y = y * weights.flatten()[order][:, None].bfloat16()
            torch.zeros_like(x).index_add_(0, order // K, y)

    for name, peer in (("torch, loop", by_loop), ("torch, grouped_mm", by_group)):
        try:
            times.note(f"  {name}", len(x), n_bytes, d.time_us(peer, len(ids), 0.3))
        except Exception as error:
            print(f"  {name}: {error!r}"[:300], flush=True)


def router(times: Times, x: Any, gates: list[Any]) -> None:
    torch, d = times.torch, times.d
    get, n, n_bytes = d.getter("router", "bf16"), len(x), E * M * 2
    config: Any = types.SimpleNamespace(
        num_experts_per_tok=K, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, scoring_func="sigmoid",
    )  # fmt: skip
    bias, arrived = d.of(torch.zeros(E, device="cuda")), d.cp.zeros(1, d.cp.int32)
    ax, count = d.of(x), d.of(torch.tensor([n], device="cuda"))
    arrays = [d.of(gate) for gate in gates]
    for overlap in (False, True):

        def route(overlap: bool = overlap) -> None:
            groups = cuda_router.new_groups(n, E, K)
            for gate in arrays:
                cuda_router.route(
                    get, ax, gate, bias, config, count, groups, arrived, overlap=overlap
                )

        what = f"router, choice and groups{' overlap' if overlap else ''}"
        times.note(what, n, n_bytes, d.time_us(route, len(arrays), 0.2))

        def scores(overlap: bool = overlap) -> None:
            for gate in arrays:
                cuda_router.router_scores(get, ax, gate, count, overlap=overlap)

        what = f"  router alone{' overlap' if overlap else ''}"
        times.note(what, n, n_bytes, d.time_us(scores, len(arrays), 0.1))
