"""A model's weights as the kernels want them: absorbed, stacked, where they compute.

Under a lower precision the host holds float32 arrays of its numbers; the correction bias and the
last three of `ModelWeights` are exempt (`rounded_kernels.py`).

Letters beyond those of the kernel set: q q_lora_rank, i an MLP's inner width, e routed experts.
Linear weights are [out, in], as in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdtr.contract import Array


@dataclass(frozen=True, slots=True)
class SwiGluWeights:
    """One dense or shared SwiGLU (MOE-4): gate rows first, then up rows, for one product."""

    gate_up: Array  # [2i, m]
    down: Array  # [m, i]


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router, routed experts and the shared expert, if there is one (MOE-1 to MOE-4)."""

    gate: Array  # [e, m]
    correction_bias: Array  # [e]   chooses, never weighs
    gate_up: Array  # [e, 2i, m]
    down: Array  # [e, m, i]
    shared: SwiGluWeights | None  # its i is moe_intermediate_size * n_shared_experts


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """MLA with kv_b_proj split into the absorbed w_kc and w_vc (MLA-1 to MLA-3).

    Rows of `qkv_a`: q_a_proj's, none when q_lora_rank is null, then kv_a_proj_with_mqa's with its
    rope rows in half-split order (MLA-7). Rows of `q_b`: per head d nope rows, then r rope rows in
    half-split order.
    """

    qkv_a: Array  # [q + c + r, m]
    q_norm: Array | None  # [q]; None when q_lora_rank is null
    q_b: Array  # [h (d + r), q], or [h (d + r), m] without q_lora_rank
    kv_norm: Array  # [c]
    w_kc: Array  # [h, c, d]
    w_vc: Array  # [h, v, c]
    o: Array  # [m, h v]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; the MLP is dense below first_k_dense_replace (MOE-4)."""

    input_norm: Array  # [m]
    attention: AttentionWeights
    post_attention_norm: Array  # [m]
    mlp: SwiGluWeights | MoeWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything the forward reads; the last three are derived from the configuration."""

    embedding: Array  # [w, m]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [m]
    lm_head: Array  # [w, m]
    inverse_frequencies: Array  # [r/2] float64
    rotary_factor: float  # cos and sin are multiplied by it (MLA-5)
    softmax_scale: float  # scores are multiplied by it (MLA-4)
