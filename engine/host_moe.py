"""Host kernels of the experts: router scores, grouped choice, routed SwiGLU (MOE-1 to MOE-4)."""

# NumPy types the operators of a plain ndarray as Any.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kdtr.contract import SOFTMAX, ModelConfig
from kdtr.engine.host_dense import linear, sigmoid

Swiglu = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def router_scores(x: np.ndarray, gate: np.ndarray, scoring_func: str) -> np.ndarray:
    """x [n, m], gate [e, m] -> [n, e], without the correction bias (MOE-1)."""
    raw = linear(x, gate)  # [n, e]
    if scoring_func == SOFTMAX:
        p = np.exp(raw - raw.max(axis=-1, keepdims=True))  # [n, e]
        return p / p.sum(axis=-1, keepdims=True)
    return sigmoid(raw)


def choose_experts(
    scores: np.ndarray, correction_bias: np.ndarray, config: ModelConfig
) -> tuple[np.ndarray, np.ndarray]:
    """scores [n, e], correction_bias [e] -> ids [n, k] ascending, weights [n, k]."""
    n, e = scores.shape
    biased = scores + correction_bias  # [n, e]   chooses; the weights below are unbiased
    grouped = biased.reshape(n, config.n_group, -1)  # [n, groups, experts of a group]
    group_score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)  # [n, groups]   its two best
    kept_groups = _largest(group_score, config.topk_group)  # [n, topk_group]
    kept = np.zeros((n, config.n_group), bool)
    np.put_along_axis(kept, kept_groups, True, axis=-1)
    # -inf, not 0: biased scores may be negative, and a dropped group must lose to every kept one.
    eligible = np.where(kept[..., None], grouped, -np.inf).reshape(n, e)  # [n, e]
    ids = np.sort(_largest(eligible, config.num_experts_per_tok), axis=-1)  # [n, k]
    weights = np.take_along_axis(scores, ids, axis=-1)  # [n, k]
    if config.norm_topk_prob:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return ids, weights * np.float32(config.routed_scaling_factor)


def experts(
    x: np.ndarray,
    expert_ids: np.ndarray,
    expert_weights: np.ndarray,
    gate_up: np.ndarray,
    down: np.ndarray,
    swiglu: Swiglu,
) -> np.ndarray:
    """x [n, m], expert_ids and expert_weights [n, k], gate_up [e, 2i, m], down [e, m, i] -> [n, m].

    swiglu  of the kernel set: x, one expert's gate_up and down -> [n, m]

    Experts ascend, so a row adds its own in the order of expert_ids whatever the other rows chose.
    """
    out = np.zeros_like(x)
    for expert in np.unique(expert_ids):
        rows, choice = np.nonzero(expert_ids == expert)  # [rows of the expert] each
        weight = expert_weights[rows, choice][:, None]
        out[rows] += weight * swiglu(x[rows], gate_up[expert], down[expert])
    return out


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """values [n, e] -> indices [n, count], largest first; stable, so ties go to the lowest id."""
    return np.argsort(-values, axis=-1, kind="stable")[:, :count]
