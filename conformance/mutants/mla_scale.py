"""MLAS: the softmax scale and YaRN's factors."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.conformance.mutants.planting import kv_a, on_load, on_load_with

MLA_SCALE = MutantClass("softmax scale and YaRN factors")


def _head_width(weights: Any) -> float:
    """qk_nope_head_dim + qk_rope_head_dim."""
    attention = weights.layers[0].attention
    return float(attention.w_kc.shape[-1] + len(kv_a(attention)) - len(attention.kv_norm))


@MLA_SCALE.mutant("M075", "MLAS-1", breaks="MLA-4", first_seen_at="scores", needs="core")
def no_mscale(engine: Any) -> None:
    """The softmax scale without YaRN's factor."""
    on_load(engine, lambda weights: replace(weights, softmax_scale=_head_width(weights) ** -0.5))


@MLA_SCALE.mutant("M077", "MLAS-3", breaks="MLA-4", first_seen_at="scores", needs="core")
def scale_is_a_root(engine: Any) -> None:
    """Scores are multiplied by the root of the head's width, not divided."""
    on_load(engine, lambda weights: replace(weights, softmax_scale=_head_width(weights) ** 0.5))


@MLA_SCALE.mutant("M079", "MLAS-5", breaks="MLA-5", first_seen_at="q_pe", needs="core")
def amplitude_of_all_dim(engine: Any) -> None:
    """Cos and sin are multiplied by mscale(factor, mscale_all_dim), not by the ratio."""

    def change(weights: Any, config: Any) -> Any:
        yarn = config.yarn
        if yarn is None or not (yarn.mscale and yarn.mscale_all_dim):
            return weights
        return replace(weights, rotary_factor=0.1 * yarn.mscale_all_dim * log(yarn.factor) + 1.0)

    on_load_with(engine, change)
