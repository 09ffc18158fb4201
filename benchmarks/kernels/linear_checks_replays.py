"""The check of linear.py, beside this file, of graphs: replays give the same bits.

A chain as in a layer: two projections, the router, experts, a projection.
"""

# Closures over loop variables are called before the loop goes on.
# ruff: noqa: B023

from __future__ import annotations

import types
from typing import Any

from linear_checks import Checks

from kdtr.engine import cuda_experts, cuda_linear, cuda_router


def replays(checks: Checks) -> None:
    """100 replays leave the same bits, with launches that overlap and without."""
    torch, d = checks.torch, checks.d
    e, k, m, i = 64, 8, 1024, 256
    linear, wgmma = d.linear("bf16"), d.wgmma("bf16")
    experts, router = d.getter("experts", "bf16"), d.getter("router", "bf16")
    config: Any = types.SimpleNamespace(
        num_experts_per_tok=k, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, scoring_func="sigmoid",
    )  # fmt: skip
    w = d.of(checks.random(2112, m, dtype="bf16", scale=m**-0.5))
    back = d.of(checks.random(m, 2112, dtype="bf16", scale=2112**-0.5))
    gate = d.of(checks.random(e, m, dtype="bf16", scale=m**-0.5))
    bias = d.of(torch.zeros(e, device="cuda"))
    gate_up = d.of(checks.random(e, 2 * i, m, dtype="bf16", scale=m**-0.5))
    down = d.of(checks.random(e, m, i, dtype="bf16", scale=i**-0.5))
    shared = (gate_up[0].copy(), down[0].copy())
    arrived = d.cp.zeros(1, d.cp.int32)
    for n in (1, 17, 65):
        x = d.of(checks.random(n, m, dtype="bf16"))
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
                torch.cuda.synchronize()
                found = [v[:rows].get().tobytes() for v in kept]
                reference = reference or found
                differ += found != reference
            what = f"replays n={n} overlap={overlap}"
            checks.expect(what, differ == 0, f"{differ} of 100 differ")
