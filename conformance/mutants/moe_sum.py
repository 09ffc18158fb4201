"""MOEA: the sum of routed and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import every_shared, on_load, wrap

MOE_SUM = MutantClass("MoE sum")


@MOE_SUM.mutant("M111", "MOEA-1", breaks="MOE-4", first_seen_at="mlp_out", needs="core")
def shared_times_four(engine: Any) -> None:
    """The shared experts are added by each of four ranks."""
    on_load(engine, lambda weights: every_shared(weights, _times(4.0)))


@MOE_SUM.mutant("M113", "MOEA-3", breaks="MOE-2", first_seen_at="expert_ids", needs="core")
def one_more_for_shared(engine: Any) -> None:
    """One more expert is routed to, in place of the shared one."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        more = config.num_experts_per_tok + (config.n_shared_experts > 0)
        return original(scores, bias, config.replace(num_experts_per_tok=more))

    wrap(engine, choose_experts=choose_experts)
    on_load(engine, lambda weights: every_shared(weights, lambda shared: None))


@MOE_SUM.mutant("M115", "MOEA-5", breaks="MOE-3", first_seen_at="mlp_out", needs="core")
def first_weight_for_all(engine: Any) -> None:
    """Every chosen expert gets the first one's weight."""

    def experts(original: Any, x: Any, ids: Any, weights: Any, *rest: Any) -> Any:
        return original(x, ids, np.broadcast_to(weights[:, :1], weights.shape), *rest)

    wrap(engine, experts=experts)


@MOE_SUM.mutant("M117", "MOEA-7", breaks="MOE-4", first_seen_at="mlp_out", needs="core")
def shared_by_four(engine: Any) -> None:
    """The shared experts are divided by the number of ranks, and added by one of four."""
    on_load(engine, lambda weights: every_shared(weights, _times(0.25)))


def _times(factor: float) -> Any:
    return lambda shared: replace(shared, down=shared.down * np.float32(factor))
