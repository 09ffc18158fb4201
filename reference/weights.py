"""A checkpoint's tensors as the equations use them: float64, [in, out], split per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kdtr.contract import CheckpointError, ModelConfig, check_tensors, has_stacked_experts

READABLE = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWeights:
    """q_a [m, q_lora_rank] and q_a_norm, or None; q [q_lora_rank or m, h (d+r)];
    kv_a [m, c+r]; kv_a_norm [c]; w_kc [h, d, c]; w_vc [h, c, v]; o [h v, m]."""

    q_a: np.ndarray | None
    q_a_norm: np.ndarray | None
    q: np.ndarray
    kv_a: np.ndarray
    kv_a_norm: np.ndarray
    w_kc: np.ndarray
    w_vc: np.ndarray
    o: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SwigluWeights:
    """gate [m, i]; up [m, i]; down [i, m]."""

    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class MoeWeights:
    """router [m, e]; bias [e]; one SwiGLU per expert; the shared experts as one, or None."""

    router: np.ndarray
    bias: np.ndarray
    experts: tuple[SwigluWeights, ...]
    shared: SwigluWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Norms [m], attention, and the MLP: dense below first_k_dense_replace (MOE-4)."""

    input_norm: np.ndarray
    attention: AttentionWeights
    post_attention_norm: np.ndarray
    mlp: SwigluWeights | MoeWeights


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """embedding [w, m]; the layers; norm [m]; lm_head [m, w]."""

    embedding: np.ndarray
    layers: tuple[LayerWeights, ...]
    norm: np.ndarray
    lm_head: np.ndarray


def read_weights(
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
) -> ModelWeights:
    """Interpret a checkpoint's tensors, of the dtypes READABLE; `shapes` are theirs, by name.

    Raises CheckpointError naming every missing, extra and misshapen tensor, before any is read.
    """
    check_tensors(config, shapes)
    reader = _Reader(config, tensors)
    return ModelWeights(
        embedding=reader.array("model.embed_tokens.weight"),
        layers=tuple(reader.layer(i) for i in range(config.num_hidden_layers)),
        norm=reader.array("model.norm.weight"),
        lm_head=reader.linear("lm_head.weight"),
    )


class _Reader:
    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
        self._config = config
        self._tensors = tensors
        self._stacked = has_stacked_experts(tensors)

    def array(self, name: str) -> np.ndarray:
        stored = np.asarray(self._tensors[name])
        if stored.dtype.name not in READABLE:
            raise CheckpointError(
                f"{name} is {stored.dtype}; expected floating-point numbers: {', '.join(READABLE)}"
            )
        array = np.ascontiguousarray(stored, dtype=np.float64)
        bad = np.argwhere(~np.isfinite(array))
        if len(bad):
            index = bad[0].tolist()
            raise CheckpointError(
                f"{name}{index} = {array[tuple(index)]}, one of {len(bad)}; expected finite numbers"
            )
        return array

    def linear(self, name: str) -> np.ndarray:
        """A linear weight, [out, in] in the file, as [in, out]."""
        return _transposed(self.array(name))

    def layer(self, i: int) -> LayerWeights:
        prefix = f"model.layers.{i}."
        dense = self._config.is_dense(i)
        return LayerWeights(
            input_norm=self.array(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn."),
            post_attention_norm=self.array(prefix + "post_attention_layernorm.weight"),
            mlp=self._swiglu(prefix + "mlp.") if dense else self._moe(prefix + "mlp."),
        )

    def _attention(self, prefix: str) -> AttentionWeights:
        c = self._config
        low_rank = c.q_lora_rank is not None
        # Rows of kv_b are per head: d rows that make keys, then v rows that make values.
        kv_b = self.array(prefix + "kv_b_proj.weight").reshape(
            c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank
        )
        w_kc, w_v = np.split(kv_b, [c.qk_nope_head_dim], axis=1)  # [h, d, c], [h, v, c]
        return AttentionWeights(
            q_a=self.linear(prefix + "q_a_proj.weight") if low_rank else None,
            q_a_norm=self.array(prefix + "q_a_layernorm.weight") if low_rank else None,
            q=self.linear(prefix + ("q_b_proj.weight" if low_rank else "q_proj.weight")),
            kv_a=self.linear(prefix + "kv_a_proj_with_mqa.weight"),
            kv_a_norm=self.array(prefix + "kv_a_layernorm.weight"),
            w_kc=np.ascontiguousarray(w_kc),
            w_vc=np.ascontiguousarray(w_v.transpose(0, 2, 1)),
            o=self.linear(prefix + "o_proj.weight"),
        )

    def _swiglu(self, prefix: str) -> SwigluWeights:
        return SwigluWeights(
            gate=self.linear(prefix + "gate_proj.weight"),
            up=self.linear(prefix + "up_proj.weight"),
            down=self.linear(prefix + "down_proj.weight"),
        )

    def _moe(self, prefix: str) -> MoeWeights:
        c = self._config
        if self._stacked:
            experts = self._stacked_experts(prefix + "experts.")
        else:
            experts = tuple(
                self._swiglu(f"{prefix}experts.{e}.") for e in range(c.n_routed_experts)
            )
        return MoeWeights(
            router=self.linear(prefix + "gate.weight"),
            bias=self.array(prefix + "gate.e_score_correction_bias"),
            experts=experts,
            shared=self._swiglu(prefix + "shared_experts.") if c.n_shared_experts else None,
        )

    def _stacked_experts(self, prefix: str) -> tuple[SwigluWeights, ...]:
        gate_up = self.array(prefix + "gate_up_proj")  # [e, 2i, m]: gate rows, then up rows
        down = self.array(prefix + "down_proj")  # [e, m, i]
        i = self._config.moe_intermediate_size
        return tuple(
            SwigluWeights(
                gate=_transposed(gate_up[e, :i]),
                up=_transposed(gate_up[e, i:]),
                down=_transposed(down[e]),
            )
            for e in range(self._config.n_routed_experts)
        )


def _transposed(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.T)
