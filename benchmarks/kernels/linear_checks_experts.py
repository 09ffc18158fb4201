"""The checks of linear.py, beside this file, of the router and of experts, against float64."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
from linear_checks import Checks

from kdtr.engine import cuda_experts, cuda_router

# e, m, k, n_group, topk_group, scoring_func, norm_topk_prob
ROUTERS = (
    (384, 7168, 8, 1, 1, "sigmoid", True),
    (256, 512, 8, 8, 4, "sigmoid", True),
    (64, 256, 6, 1, 1, "softmax", False),
    (512, 96, 16, 32, 8, "sigmoid", True),
    (160, 104, 6, 8, 3, "softmax", False),
    (12, 50, 3, 4, 2, "sigmoid", True),
    (6, 33, 2, 6, 2, "softmax", True),
)
# e, k, m, i, s: the last is the shared expert's, 0 if there is none
EXPERTS = (
    (64, 8, 512, 256, 256),
    (16, 3, 264, 40, 72),
    (8, 2, 96, 24, 0),
    (5, 2, 33, 7, 9),
    (40, 8, 7168, 256, 256),
)


def router(checks: Checks) -> None:
    arrived = checks.d.cp.zeros(1, checks.d.cp.int32)
    for dtype in ("f32", "bf16"):
        for e, m, k, n_group, topk_group, scoring, norm in ROUTERS:
            config = types.SimpleNamespace(
                num_experts_per_tok=k, n_group=n_group, topk_group=topk_group,
                norm_topk_prob=norm, routed_scaling_factor=2.5, scoring_func=scoring,
            )  # fmt: skip
            for n in (1, 9, 65):
                for tied in (False, True):
                    routed(checks, dtype, config, n, e, m, tied, arrived)


def routed(
    checks: Checks, dtype: str, config: Any, n: int, e: int, m: int, tied: bool, arrived: Any
) -> None:
    """Scores, choice and groups; tied: an expert has one of two scores, and no bias of its own."""
    torch, d = checks.torch, checks.d
    get, k, scoring = d.getter("router", dtype), config.num_experts_per_tok, config.scoring_func
    label = f"router {dtype} e={e} m={m} k={k} {scoring} n={n} tied={tied}"
    x = checks.random(n, m, dtype=dtype)
    gate = checks.random(e, m, dtype=dtype, scale=m**-0.5)
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
    checks.expect(label, error < 4e-6, f"error {error:.3g}")
    want_ids, want = choose(scores, bias.cpu().numpy(), config)
    checks.expect(label + " ids", np.array_equal(ids, want_ids))
    near = np.allclose(weights, want, rtol=1e-6, atol=0)
    checks.expect(label + " weights", near)
    checks.expect(label + " groups", are_groups(groups.get(), ids, n, e, k))
    alone = cuda_router.route(get, d.of(x[:1]), d.of(gate), d.of(bias), config)
    checks.expect(label + " alone", np.array_equal(alone[0].get(), scores[:1]))


def are_groups(groups: np.ndarray, ids: np.ndarray, n: int, e: int, k: int) -> bool:
    """Whether they are those of `cuda_router` for these ids."""
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
    return bool(good)


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


def experts(checks: Checks) -> None:
    for dtype in ("f32", "bf16"):
        for e, k, m, i, s in EXPERTS:
            gate_up = checks.random(e, 2 * i, m, dtype=dtype, scale=m**-0.5)
            down = checks.random(e, m, i, dtype=dtype, scale=i**-0.5)
            shared = None
            if s:
                shared = (
                    checks.random(2 * s, m, dtype=dtype, scale=m**-0.5),
                    checks.random(m, s, dtype=dtype, scale=s**-0.5),
                )
            few = e // 2 + k // 2
            for n, spread in ((1, e), (9, e), (17, e), (65, e), (65, k), (65, few), (129, k)):
                moe(checks, dtype, n, k, spread, gate_up, down, shared)
            if shared:
                for n in (1, 17, 65):
                    swiglu(checks, dtype, n, *shared)


def limit(dtype: str) -> float:
    """Of an error, in root mean squares of the result."""
    return 4e-5 if dtype == "f32" else 0.05


def moe(
    checks: Checks, dtype: str, n: int, k: int, spread: int, gate_up: Any, down: Any, shared: Any
) -> None:
    """Rows choose among the first `spread` experts."""
    torch, d = checks.torch, checks.d
    get, get_router = d.getter("experts", dtype), d.getter("router", dtype)
    e, m, i = down.shape
    s = shared[1].shape[1] if shared else 0
    label = f"experts {dtype} e={e} k={k} m={m} i={i} s={s} n={n} of {spread}"
    x = checks.random(n, m, dtype=dtype)
    order = torch.rand(n, min(spread, e), device="cuda").argsort(-1)
    ids = order[:, :k].sort(-1).values.contiguous()
    weights = torch.rand(n, k, device="cuda")
    rows = max(1, n - n // 4)
    x[rows:] = float("nan")
    ids[rows:] = -(10**9)
    count = d.of(torch.tensor([rows], device="cuda"))
    arrays = (d.of(gate_up), d.of(down), shared and tuple(map(d.of, shared)))
    chosen = d.of(ids), d.of(weights)
    groups = cuda_router.grouped(get_router, chosen[0], e, count)
    y = d.back(cuda_experts.moe(get, d.of(x), *chosen, *arrays, groups, count), dtype)
    exact = exact_moe(torch, x[:rows], ids[:rows], weights[:rows], gate_up, down, shared)
    error = (y[:rows].double() - exact).abs().max() / exact.square().mean().sqrt()
    checks.expect(label, error.item() < limit(dtype), f"error {error.item():.3g}")
    some = rows // 2
    one = slice(some, some + 1)
    groups = cuda_router.grouped(get_router, d.of(ids[one]), e)
    its = d.of(x[one]), d.of(ids[one]), d.of(weights[one])
    alone = d.back(cuda_experts.moe(get, *its, *arrays, groups), dtype)
    checks.expect(label + " alone", torch.equal(alone[0], y[some]))


def swiglu(checks: Checks, dtype: str, n: int, gate_up: Any, down: Any) -> None:
    d, (m, s) = checks.d, down.shape
    x = checks.random(n, m, dtype=dtype)
    found = cuda_experts.swiglu(
        d.getter("experts", dtype), d.linear(dtype), d.of(x), d.of(gate_up), d.of(down),
        wgmma=d.wgmma(dtype),
    )  # fmt: skip
    exact = exact_swiglu(x, gate_up, down)
    error = (d.back(found, dtype).double() - exact).abs().max() / exact.square().mean().sqrt()
    label = f"swiglu {dtype} {m} {s} {n}"
    checks.expect(label, error.item() < limit(dtype), f"error {error.item():.3g}")


def exact_swiglu(x: Any, gate_up: Any, down: Any) -> Any:
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(x.dtype).double() @ down.double().T


def exact_moe(
    torch: Any, x: Any, ids: Any, weights: Any, gate_up: Any, down: Any, shared: Any
) -> Any:
    """In float64, rounded where the kernels store."""
    out = torch.zeros(len(x), x.shape[1], device="cuda", dtype=torch.float64)
    for expert in ids.unique().tolist():
        rows, choice = (ids == expert).nonzero(as_tuple=True)
        y = exact_swiglu(x[rows], gate_up[expert], down[expert]).to(x.dtype).double()
        out[rows] += weights[rows, choice].double()[:, None] * y
    if shared:
        out = out.to(x.dtype).double()
        out += exact_swiglu(x, *shared).to(x.dtype).double()
    return out.to(x.dtype)
