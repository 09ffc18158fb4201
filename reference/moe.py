"""The MLP of a layer: SwiGLU, dense or as routed and shared experts (DeepSeek-V3, 2.1.2)."""

from __future__ import annotations

import numpy as np

from kdtr.contract import SIGMOID, ModelConfig
from kdtr.reference.arithmetic import Arithmetic, sigmoid
from kdtr.reference.weights import MoeWeights, SwigluWeights


def swiglu(arithmetic: Arithmetic, weights: SwigluWeights, x: np.ndarray) -> np.ndarray:
    """down(silu(gate x) * up x) of x [n, m] (MOE-4)."""
    gate = arithmetic.contract("nm,mi->ni", x, weights.gate)
    up = arithmetic.contract("nm,mi->ni", x, weights.up)
    silu = gate * sigmoid(arithmetic, gate)
    return arithmetic.contract("ni,im->nm", silu * up, weights.down)


def router_scores(
    arithmetic: Arithmetic, config: ModelConfig, weights: MoeWeights, x: np.ndarray
) -> np.ndarray:
    """MOE-1: unbiased scores [n, e] of x [n, m]."""
    logits = arithmetic.contract("nm,me->ne", x, weights.router)
    if config.scoring_func == SIGMOID:
        return sigmoid(arithmetic, logits)
    e = arithmetic.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / arithmetic.sum(e)[:, None]


def choose_experts(config: ModelConfig, scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """MOE-2: ids [n, k], ascending, by biased score within the best groups; ties to the lowest."""
    _, allowed = _group_limited(config, scores, bias)
    return np.sort(_best(allowed, config.num_experts_per_tok), axis=1)


def choice_gap(config: ModelConfig, scores: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """How far each row [n] is from another choice of experts, in units of one score's error.

    The choice cannot change while every score moves by less than this: between two experts two
    scores can move, between two groups four. inf where there is nothing to choose.
    """
    group_scores, allowed = _group_limited(config, scores, bias)
    return np.minimum(
        _gap_after(group_scores, config.topk_group) / 4,
        _gap_after(allowed, config.num_experts_per_tok) / 2,
    )


def expert_weights(
    arithmetic: Arithmetic, config: ModelConfig, scores: np.ndarray, ids: np.ndarray
) -> np.ndarray:
    """MOE-3: weights [n, k] of the chosen experts, from the unbiased scores [n, e]."""
    weights = np.take_along_axis(scores, ids, axis=1)
    if config.norm_topk_prob:
        weights = weights / (arithmetic.sum(weights) + 1e-20)[:, None]
    return weights * config.routed_scaling_factor


def mix_experts(
    arithmetic: Arithmetic, moe: MoeWeights, x: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """MOE-4: weighted sum of the chosen experts in ascending id, then the shared expert: [n, m].

    x [n, m]   ids [n, k]   weights [n, k]
    """
    total = np.zeros_like(x)
    for expert in np.unique(ids):
        rows, place = np.nonzero(ids == expert)
        out = swiglu(arithmetic, moe.experts[expert], x[rows])
        total[rows] = total[rows] + weights[rows, place][:, None] * out
    if moe.shared is not None:
        total = total + swiglu(arithmetic, moe.shared, x)
    return total


def _group_limited(
    config: ModelConfig, scores: np.ndarray, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Group scores [n, group], and biased scores [n, e] with the other groups at -inf."""
    biased = scores + bias  # [n, e]
    n = len(biased)
    grouped = biased.reshape(n, config.n_group, -1)  # [n, group, e / group]
    two_best = np.sort(grouped, axis=-1)[..., -2:]
    group_scores = two_best.sum(axis=-1)  # [n, group]: two terms have one order
    in_group = np.zeros(group_scores.shape, dtype=bool)
    np.put_along_axis(in_group, _best(group_scores, config.topk_group), True, axis=1)
    # -inf and not 0: every biased score of a chosen group may be negative.
    return group_scores, np.where(in_group[..., None], grouped, -np.inf).reshape(n, -1)


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids of the k highest of each row; ties to the lowest id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def _gap_after(scores: np.ndarray, k: int) -> np.ndarray:
    """Between the k-th and the next highest of each row; inf when there is no next."""
    if k == scores.shape[-1]:
        return np.full(len(scores), np.inf)
    ordered = -np.sort(-scores, axis=-1)
    return ordered[:, k - 1] - ordered[:, k]
