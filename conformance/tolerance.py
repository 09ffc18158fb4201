"""How far a correct engine may be from the truth, per row (NUM-3).

An engine of unit roundoff u rounds what it stores and what it sums. A sum of K products of
independent rounding errors drifts by about sqrt(K) u of its size; the stages before it have
drifted already, and a residual network adds their relative errors. After the work of `depth`
sums, a row is off by about

    u_store * sqrt(depth)  +  u_sum * sqrt(K) * depth      of the row's scale,

where the first term is rounding at rest (random signs) and the second takes all sums to drift
the same way. SAFETY covers what the formula does not see: cancellation inside a row, and the
slope of softmax, sigmoid and norm. A wrong index moves a row by its own size, which is hundreds
of times more than this in float32.
"""

from __future__ import annotations

import numpy as np

from kdtr.contract import ModelConfig, NumericProfile, Stage

SAFETY = 8.0

# Half the distance from 1 to the next number.
UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}

# How many sums lie between the layer's input and the stage.
_SUMS_WITHIN_LAYER = {
    "q_nope": 4,
    "q_pe": 4,
    "c_kv": 3,
    "k_pe": 2,
    "scores": 6,
    "out_latent": 8,
    "attn_out": 10,
    "router_scores": 12,
    "expert_weights": 13,
    "mlp_out": 15,
    "hidden": 15,
}
_SUMS_PER_LAYER = 15


def row_bound(
    stage: Stage,
    layer: int | None,
    expected: np.ndarray,
    config: ModelConfig,
    profile: NumericProfile,
) -> np.ndarray:
    """The largest honest error of each row; shape of `expected` with its last axes reduced to 1.

    A row is the first axis, or the first two of a cache stage [l, t, ...]; the bound broadcasts
    against `expected`. The scale of a row is its largest finite magnitude, but not less than the
    stage's root mean square: a row of few elements may be small by chance. A row of zeros is
    exactly zero: nothing reached it, and nothing may.
    """
    relative = relative_bound(stage, layer, config, profile)
    within_row = tuple(range(stage.row_axes, expected.ndim))
    finite = np.where(np.isfinite(expected), np.abs(expected), 0.0)
    scale = finite.max(axis=within_row, keepdims=True, initial=0.0)
    rms = float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
    return relative * np.where(scale > 0, np.maximum(scale, rms), 0.0)


def relative_bound(
    stage: Stage, layer: int | None, config: ModelConfig, profile: NumericProfile
) -> float:
    """The bound as a fraction of the row's scale.

    A cache stage has no single layer: it is given the last one's.
    """
    depth = _sums_before(stage, layer, config)
    longest = max(
        config.hidden_size,
        config.intermediate_size,
        config.moe_intermediate_size * max(config.n_shared_experts, 1),
        config.num_attention_heads * config.v_head_dim,
    )
    store = max(UNIT_ROUNDOFF[name] for name in _storage(profile))
    total = UNIT_ROUNDOFF[profile.accumulation]
    return SAFETY * float(store * np.sqrt(depth) + total * np.sqrt(longest) * depth)


def _storage(profile: NumericProfile) -> tuple[str, ...]:
    return (
        profile.weights,
        profile.activations,
        profile.latents,
        profile.scores,
        profile.logits,
    )


def _sums_before(stage: Stage, layer: int | None, config: ModelConfig) -> int:
    if stage.name == "embedding":
        return 1
    if layer is not None:
        return layer * _SUMS_PER_LAYER + _SUMS_WITHIN_LAYER[stage.name]
    return config.num_hidden_layers * _SUMS_PER_LAYER + 2  # final norm, head, caches
