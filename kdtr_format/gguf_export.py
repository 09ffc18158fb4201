"""A model as GGUF of the architecture `deepseek2`, for llama.cpp; equal input, equal bytes.

Matrices keep their dtype or get the asked one; norms, the router and its correction bias are
float32. The package `gguf` is imported when a file is written and not before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from kdtr.contract import SOFTMAX, ModelConfig, ModelSource, UnsupportedError
from kdtr.kdtr_format.export_target import replaced_file
from kdtr.kdtr_format.export_tensors import ExportTensors, converted, export_dtype
from kdtr.kdtr_format.gguf_losses import refuse_losses
from kdtr.kdtr_format.hf_export import dropped_note
from kdtr.kdtr_format.model_source import open_model

if TYPE_CHECKING:
    from gguf import GGUFWriter

ARCHITECTURE = "deepseek2"
_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Below blk.N and model.layers.N: tensors that keep their rows.
_PLAIN = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q_a.weight": "self_attn.q_a_proj.weight",
    "attn_q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attn_kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_experts.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_experts.down_proj.weight",
}
_ALWAYS_FLOAT32 = ("norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One of the file's; read() gives [out, in] as everywhere, GGUF lists shapes reversed."""

    name: str
    read: Callable[[], np.ndarray]


def export_gguf(
    source: ModelSource,
    path: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    rounding: bool = False,
    accept_loss: Collection[str] = (),
) -> list[str]:
    """Write `path`; returns what a reader of it does not see, one sentence each.

    source       what open_model reads
    dtype        of matrices: float32, bfloat16 or float16; None keeps each one's own
    rounding     allow a conversion that is not exact
    accept_loss  names of gguf_losses.LOSSES that may differ in llama.cpp

    A file that is there is replaced when it is GGUF. Raises ConfigError, CheckpointError,
    BundleError or UnsupportedError; then nothing has changed.
    """
    wanted = export_dtype(dtype)
    gguf = _package()
    model = open_model(source)
    notes = refuse_losses(model.config, accept_loss)
    stored = ExportTensors(model, stacked=False)

    def load(tensor: _Tensor) -> np.ndarray:
        array = tensor.read()
        chosen = _FLOAT32 if tensor.name.endswith(_ALWAYS_FLOAT32) else wanted
        chosen = chosen or array.dtype.newbyteorder("=")
        return np.ascontiguousarray(converted(tensor.name, array, chosen, rounding))

    tensors = list(_tensors(model.config, stored))
    with replaced_file(path) as sibling:
        writer = gguf.GGUFWriter(sibling, ARCHITECTURE)
        try:
            n_elements: dict[np.dtype, int] = {}
            for tensor in tensors:
                array = load(tensor)
                _announce(writer, tensor.name, array)
                n_elements[array.dtype] = n_elements.get(array.dtype, 0) + array.size
            _add_keys(writer, model.config)
            writer.add_file_type(_file_type(n_elements))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(_raw(load(tensor)))
        finally:
            writer.close()
    return notes + dropped_note(stored.dropped)


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise UnsupportedError(
            f"writing GGUF needs the package gguf, which cannot be imported ({error}); "
            f"expected it: pip install 'kdtr[gguf]'"
        ) from error
    return gguf


def _announce(writer: GGUFWriter, name: str, array: np.ndarray) -> None:
    from gguf import GGMLQuantizationType

    raw = _raw(array)
    kind = GGMLQuantizationType.BF16 if array.dtype == _BFLOAT16 else None
    writer.add_tensor_info(name, array.shape, raw.dtype, raw.nbytes, raw_dtype=kind)


def _raw(array: np.ndarray) -> np.ndarray:
    """bfloat16 as its bits: the package knows NumPy's own dtypes."""
    return array.view(np.uint16) if array.dtype == _BFLOAT16 else array


def _file_type(n_elements: dict[np.dtype, int]) -> int:
    """The dtype that most elements have, by llama.cpp's number for such a file."""
    from gguf import LlamaFileType

    numbers = {
        _FLOAT32: LlamaFileType.ALL_F32,
        np.dtype(np.float16): LlamaFileType.MOSTLY_F16,
        _BFLOAT16: LlamaFileType.MOSTLY_BF16,
    }
    most = max(n_elements, key=lambda dtype: (n_elements[dtype], dtype.name))
    return int(numbers[most])


def _add_keys(writer: GGUFWriter, config: ModelConfig) -> None:
    from gguf import ExpertGatingFuncType

    c = config
    softmax = c.scoring_func == SOFTMAX
    # All groups chosen is no grouping, and llama.cpp wants fewer than all.
    n_group, topk_group = (c.n_group, c.topk_group) if c.topk_group < c.n_group else (1, 1)
    writer.add_type("model")
    writer.add_vocab_size(c.vocab_size)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(1)  # absorbed: one latent for all heads
    writer.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    writer.add_value_length(c.kv_lora_rank)
    writer.add_key_length_mla(c.qk_head_dim)
    writer.add_value_length_mla(c.v_head_dim)
    writer.add_q_lora_rank(c.q_lora_rank or 0)  # required; 0 is read as queries from attn_q
    writer.add_kv_lora_rank(c.kv_lora_rank)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    writer.add_expert_count(c.n_routed_experts)
    writer.add_expert_used_count(c.num_experts_per_tok)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_expert_group_count(n_group)
    writer.add_expert_group_used_count(topk_group)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_weights_norm(c.norm_topk_prob)
    gating = ExpertGatingFuncType.SOFTMAX if softmax else ExpertGatingFuncType.SIGMOID
    writer.add_expert_gating_func(gating)
    _add_rope(writer, c)
    writer.add_tokenizer_model("none")


def _add_rope(writer: GGUFWriter, config: ModelConfig) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    yarn = config.yarn
    if yarn is None:
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        return
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(yarn.factor)
    writer.add_rope_scaling_orig_ctx_len(yarn.original_max_position_embeddings)
    writer.add_rope_scaling_yarn_beta_fast(yarn.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(yarn.beta_slow)
    if yarn.mscale_all_dim:
        writer.add_rope_scaling_yarn_log_mul(0.1 * yarn.mscale_all_dim)


def _tensors(config: ModelConfig, stored: ExportTensors) -> Iterator[_Tensor]:
    """The file's tensors, in the order of the forward."""

    def plain(name: str, source: str) -> _Tensor:
        return _Tensor(name, lambda: stored[source])

    yield plain("token_embd.weight", "model.embed_tokens.weight")
    for layer in range(config.num_hidden_layers):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, source in _PLAIN.items():
            if ours + source in stored.shapes:
                yield plain(theirs + name, ours + source)
        yield from _attention(config, stored, ours + "self_attn.", theirs)
        if not config.is_dense(layer):
            for part in ("gate", "up", "down"):
                yield _experts(config, stored, ours, theirs, part)
    yield plain("output_norm.weight", "model.norm.weight")
    yield plain("output.weight", "lm_head.weight")


def _attention(
    config: ModelConfig, stored: ExportTensors, ours: str, theirs: str
) -> Iterator[_Tensor]:
    """The tensors whose rows change: rotated rows in pairs, kv_b in two."""
    h, d, v, c = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
    )
    query, source = ("attn_q", "q_proj") if config.q_lora_rank is None else ("attn_q_b", "q_b_proj")

    def queries() -> np.ndarray:
        rows = stored[f"{ours}{source}.weight"]  # [h (d+r), in]
        heads = rows.reshape(h, config.qk_head_dim, -1)
        return _interleaved(config, heads, start=d).reshape(rows.shape)

    def keys() -> np.ndarray:
        rows = stored[f"{ours}kv_a_proj_with_mqa.weight"]  # [c + r, m]
        return _interleaved(config, rows[None], start=c)[0]

    def kv_b() -> np.ndarray:
        return stored[f"{ours}kv_b_proj.weight"].reshape(h, d + v, c)

    yield _Tensor(f"{theirs}{query}.weight", queries)
    yield _Tensor(f"{theirs}attn_kv_a_mqa.weight", keys)
    yield _Tensor(f"{theirs}attn_k_b.weight", lambda: kv_b()[:, :d].swapaxes(1, 2))  # [h, c, d]
    yield _Tensor(f"{theirs}attn_v_b.weight", lambda: kv_b()[:, d:])  # [h, v, c]


def _interleaved(config: ModelConfig, heads: np.ndarray, *, start: int) -> np.ndarray:
    """[h, rows, in]: rows from `start` on ordered for the rotation of pairs (2i, 2i+1), MLA-7."""
    if config.rope_interleave:
        return heads
    first, second = np.split(heads[:, start:], 2, axis=1)
    pairs = np.stack([first, second], axis=2).reshape(heads[:, start:].shape)
    return np.concatenate([heads[:, :start], pairs], axis=1)


def _experts(
    config: ModelConfig, stored: ExportTensors, ours: str, theirs: str, part: str
) -> _Tensor:
    """All routed experts of one projection, [e, out, in]."""
    names = [
        f"{ours}mlp.experts.{expert}.{part}_proj.weight"
        for expert in range(config.n_routed_experts)
    ]
    return _Tensor(
        f"{theirs}ffn_{part}_exps.weight", lambda: np.stack([stored[name] for name in names])
    )
