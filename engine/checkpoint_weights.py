"""From a checkpoint's tensors to `ModelWeights`: what their rows mean, and the absorb split."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from kdtr.contract import (
    Array,
    CheckpointError,
    ModelConfig,
    check_tensors,
    has_stacked_experts,
)
from kdtr.engine.kernel_set import KernelSet
from kdtr.engine.rotary import (
    attention_factor,
    half_split_order,
    inverse_frequencies,
    softmax_scale,
)
from kdtr.engine.rounding import rounded
from kdtr.engine.weights import (
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    SwiGluWeights,
)
from kdtr.kdtr_format import OpenModel

_READABLE = tuple(
    np.dtype(dtype).name for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
)


def prepare_weights(model: OpenModel, kernels: KernelSet) -> ModelWeights:
    """Check names and shapes, then read every tensor once and store it on the set's device.

    Each is rounded to the weight dtype of the set's profile. The router's correction bias is read
    in float32 whatever the dtype, as DeepSeek's checkpoints store it.
    Raises CheckpointError for missing, extra, misshapen or unreadable tensors, and for numbers
    that are not finite in what they are rounded to.
    """
    config, stacked = model.config, has_stacked_experts(model.shapes)
    check_tensors(config, model.shapes)
    reader = _Reader(config, model.tensors, kernels, stacked_experts=stacked)
    return ModelWeights(
        embedding=reader.upload_tensor("model.embed_tokens.weight"),
        layers=tuple(reader.layer(layer) for layer in range(config.num_hidden_layers)),
        final_norm=reader.upload_tensor("model.norm.weight"),
        lm_head=reader.upload_tensor("lm_head.weight"),
        inverse_frequencies=kernels.upload(inverse_frequencies(config)),
        rotary_factor=attention_factor(config),
        softmax_scale=softmax_scale(config),
    )


class _Reader:
    """Reads tensors by name; one layer's worth of host copies at a time."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, np.ndarray],
        kernels: KernelSet,
        *,
        stacked_experts: bool,
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._kernels = kernels
        self._upload = kernels.upload_weight
        self._dtype = kernels.profile.weights
        self._stacked_experts = stacked_experts
        self._half_split = half_split_order(config)  # [r]

    def layer(self, layer: int) -> LayerWeights:
        prefix = f"model.layers.{layer}."
        return LayerWeights(
            input_norm=self.upload_tensor(prefix + "input_layernorm.weight"),
            attention=self._attention(prefix + "self_attn."),
            post_attention_norm=self.upload_tensor(prefix + "post_attention_layernorm.weight"),
            mlp=(
                self._swiglu(prefix + "mlp.")
                if self._config.is_dense(layer)
                else self._moe(prefix + "mlp.")
            ),
        )

    def upload_tensor(self, name: str) -> Array:
        return self._upload(self._weight(name))

    def _weight(self, name: str) -> np.ndarray:
        return self._read(name, self._dtype)

    def _read(self, name: str, dtype: str) -> np.ndarray:
        """A C-contiguous float32 copy of numbers of `dtype`; the source may be a mapped file."""
        tensor = np.asarray(self._tensors[name])
        if tensor.dtype.name not in _READABLE:
            raise CheckpointError(
                f"{name} has dtype {tensor.dtype}; expected one of {', '.join(_READABLE)}: "
                "convert quantised weights first"
            )
        with np.errstate(over="ignore"):  # inf, and refused as what it was
            copy = rounded(tensor, dtype)
        finite = np.isfinite(copy)
        if not finite.all():
            bad = np.argwhere(~finite)
            at = bad[0].tolist()
            raise CheckpointError(
                f"{name}{at} = {tensor[tuple(at)]}, one of {len(bad)}; "
                f"expected numbers that are finite in {dtype}"
            )
        return copy

    def _attention(self, prefix: str) -> AttentionWeights:
        config = self._config
        h, d, c = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
        kv_b = self._weight(prefix + "kv_b_proj.weight")  # [h (d + v), c]
        kv_b = kv_b.reshape(h, d + config.v_head_dim, c)  # [h, d + v, c]   nope rows, then value's
        kv_a = self._weight(prefix + "kv_a_proj_with_mqa.weight")  # [c + r, m]
        qkv_a = [kv_a[:c], kv_a[c:][self._half_split]]
        if config.q_lora_rank is None:
            q_norm, q_b = None, self._query_rows(prefix + "q_proj.weight")
        else:
            qkv_a.insert(0, self._weight(prefix + "q_a_proj.weight"))  # [q, m]
            q_norm = self.upload_tensor(prefix + "q_a_layernorm.weight")
            q_b = self._query_rows(prefix + "q_b_proj.weight")
        return AttentionWeights(
            qkv_a=self._upload(np.concatenate(qkv_a)),
            q_norm=q_norm,
            q_b=q_b,
            kv_norm=self.upload_tensor(prefix + "kv_a_layernorm.weight"),
            w_kc=self._upload(np.ascontiguousarray(kv_b[:, :d].transpose(0, 2, 1))),  # [h, c, d]
            w_vc=self._upload(np.ascontiguousarray(kv_b[:, d:])),  # [h, v, c]
            o=self.upload_tensor(prefix + "o_proj.weight"),
        )

    def _query_rows(self, name: str) -> Array:
        """[h (d + r), in]: within each head the rope rows in half-split order."""
        config = self._config
        d = config.qk_nope_head_dim
        rows = self._weight(name)  # [h (d + r), in]
        heads = rows.reshape(config.num_attention_heads, config.qk_head_dim, -1)  # [h, d + r, in]
        nope, rope = heads[:, :d], heads[:, d:][:, self._half_split]
        return self._upload(np.concatenate([nope, rope], axis=1).reshape(rows.shape))

    def _swiglu(self, prefix: str) -> SwiGluWeights:
        gate_up = [self._weight(f"{prefix}{part}_proj.weight") for part in ("gate", "up")]
        return SwiGluWeights(
            gate_up=self._upload(np.concatenate(gate_up)),  # [2i, m]
            down=self.upload_tensor(prefix + "down_proj.weight"),  # [m, i]
        )

    def _moe(self, prefix: str) -> MoeWeights:
        gate_up, down = self._experts(prefix + "experts.")
        return MoeWeights(
            gate=self.upload_tensor(prefix + "gate.weight"),
            correction_bias=self._kernels.upload(
                self._read(prefix + "gate.e_score_correction_bias", "float32")
            ),
            gate_up=self._upload(gate_up),
            down=self._upload(down),
            shared=(
                self._swiglu(prefix + "shared_experts.") if self._config.n_shared_experts else None
            ),
        )

    def _experts(self, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """gate_up [e, 2i, m] and down [e, m, i], from either spelling."""
        if self._stacked_experts:
            return self._weight(prefix + "gate_up_proj"), self._weight(prefix + "down_proj")
        config = self._config
        e, i, m = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        gate_up = np.empty((e, 2 * i, m), np.float32)
        down = np.empty((e, m, i), np.float32)
        for expert in range(e):
            gate_up[expert, :i] = self._weight(f"{prefix}{expert}.gate_proj.weight")
            gate_up[expert, i:] = self._weight(f"{prefix}{expert}.up_proj.weight")
            down[expert] = self._weight(f"{prefix}{expert}.down_proj.weight")
        return gate_up, down
