"""MOEG: scores, choice and weights of experts."""

from __future__ import annotations

from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import wrap

MOE_GATE = MutantClass("MoE gate")


@MOE_GATE.mutant("M102", "MOEG-1", breaks="MOE-3", first_seen_at="expert_weights", needs="core")
def weights_from_biased(engine: Any) -> None:
    """The correction bias is in the weights."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        ids, _ = original(scores, bias, config)
        weights = np.take_along_axis(scores + bias, ids, axis=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids, weights * np.float32(config.routed_scaling_factor)

    wrap(engine, choose_experts=choose_experts)


@MOE_GATE.mutant("M104", "MOEG-3", breaks="MOE-2", first_seen_at="expert_ids", needs="core")
def groups_masked_with_zero(engine: Any) -> None:
    """Dropped groups compete with 0, not -inf. Only negative biased scores show it."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        n, e = scores.shape
        grouped = (scores + bias).reshape(n, config.n_group, -1)
        best = np.argsort(-np.sort(grouped)[..., -2:].sum(-1), kind="stable")
        kept = np.zeros((n, config.n_group, 1), bool)
        np.put_along_axis(kept[..., 0], best[:, : config.topk_group], True, axis=1)
        eligible = np.where(kept, grouped, 0).reshape(n, e)
        ids = np.argsort(-eligible, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
        ids.sort(axis=-1)
        return ids, original(scores, bias, config)[1]

    wrap(engine, choose_experts=choose_experts)


@MOE_GATE.mutant("M106", "MOEG-5", breaks="MOE-3", first_seen_at="expert_weights", needs="core")
def not_scaled(engine: Any) -> None:
    """routed_scaling_factor is left out."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        return original(scores, bias, config.replace(routed_scaling_factor=1.0))

    wrap(engine, choose_experts=choose_experts)


@MOE_GATE.mutant("M108", "MOEG-7", breaks="MOE-1", first_seen_at="router_scores", needs="core")
def softmax_router(engine: Any) -> None:
    """Softmax where the model scores with sigmoid."""

    def router_scores(original: Any, x: Any, gate: Any, _: str) -> Any:
        return original(x, gate, "softmax")

    wrap(engine, router_scores=router_scores)


@MOE_GATE.mutant("M110", "MOEG-9", breaks="MOE-2", first_seen_at="expert_ids", needs="core")
def highest_tie(engine: Any) -> None:
    """Of experts that tie the highest id is chosen."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        last = scores.shape[-1] - 1
        ids, weights = original(scores[:, ::-1], bias[::-1], config)
        return last - ids[:, ::-1], weights[:, ::-1]

    wrap(engine, choose_experts=choose_experts)
