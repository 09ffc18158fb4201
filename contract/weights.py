"""The tensors that a checkpoint of this family holds: names, shapes, and the check of a source.

Names and layouts are those of `DeepseekV3ForCausalLM`. Linear weights are [out, in]. Routed
experts come per expert, as in released checkpoints, or stacked, as transformers 5 writes them.
What the rows mean (nope before rope, gate before up) is each reader's own business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kdtr.contract.config import ModelConfig
from kdtr.contract.errors import CheckpointError

Shape = tuple[int, ...]

_SHOWN = 20  # names per kind of fault in one message: a wrong directory has thousands
_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d{1,18})\.")
# Names that are listed one by one whatever the source holds; the largest released model has 10**5.
_LISTED = 10**6


def tensor_shapes(config: ModelConfig, *, stacked_experts: bool = False) -> dict[str, Shape]:
    """Every tensor of the model and its shape, in the order of the forward."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size)
    }
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (config.hidden_size,)
        for name, shape in _attention_shapes(config).items():
            shapes[f"{prefix}self_attn.{name}"] = shape
        shapes[prefix + "post_attention_layernorm.weight"] = (config.hidden_size,)
        mlp = _mlp_shapes(config, layer, stacked_experts)
        shapes.update({f"{prefix}mlp.{name}": shape for name, shape in mlp.items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def has_stacked_experts(names: Mapping[str, object]) -> bool:
    """Whether the routed experts are one tensor per layer (transformers 5)."""
    return any(name.endswith(".mlp.experts.gate_up_proj") for name in names)


def check_tensors(config: ModelConfig, shapes: Mapping[str, Shape]) -> None:
    """Hold a source's tensors against the configuration.

    Ignored, because the forward does not use them: `rotary_emb.inv_freq` buffers and layers
    from num_hidden_layers on (the multi-token-prediction layers of released checkpoints).
    Raises CheckpointError naming every missing, extra and misshapen tensor.
    """
    stacked = has_stacked_experts(shapes)
    _check_count(config, len(shapes), stacked)
    wanted = tensor_shapes(config, stacked_experts=stacked)
    missing = [f"{name} {list(shape)}" for name, shape in wanted.items() if name not in shapes]
    extra = [
        f"{name} {list(shape)}"
        for name, shape in shapes.items()
        if name not in wanted and not _unused(config, name)
    ]
    misshapen = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in shapes and tuple(shapes[name]) != shape
    ]
    faults = [
        f"{len(names)} {kind}: {_list(names)}"
        for kind, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if faults:
        raise CheckpointError("the tensors do not fit the configuration; " + "; ".join(faults))


def _check_count(config: ModelConfig, n_tensors: int, stacked: bool) -> None:
    """Refuse counts far above what the source holds before a list of their names is built."""
    dense = config.first_k_dense_replace
    per_moe_layer = 2 if stacked else 3 * config.n_routed_experts
    least = 3 * dense + (config.num_hidden_layers - dense) * per_moe_layer
    if least > max(n_tensors, _LISTED):
        raise CheckpointError(
            f"the configuration asks for at least {least} tensors (num_hidden_layers = "
            f"{config.num_hidden_layers}, n_routed_experts = {config.n_routed_experts}), "
            f"the source holds {n_tensors}; expected the configuration of these weights"
        )


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    m, h = config.hidden_size, config.num_attention_heads
    q = h * config.qk_head_dim
    if config.q_lora_rank is None:
        queries: dict[str, Shape] = {"q_proj.weight": (q, m)}
    else:
        queries = {
            "q_a_proj.weight": (config.q_lora_rank, m),
            "q_a_layernorm.weight": (config.q_lora_rank,),
            "q_b_proj.weight": (q, config.q_lora_rank),
        }
    c, kv = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
    return {
        **queries,
        "kv_a_proj_with_mqa.weight": (c + config.qk_rope_head_dim, m),
        "kv_a_layernorm.weight": (c,),
        "kv_b_proj.weight": (h * kv, c),
        "o_proj.weight": (m, h * config.v_head_dim),
    }


def _mlp_shapes(config: ModelConfig, layer: int, stacked_experts: bool) -> dict[str, Shape]:
    m, e, i = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    if config.is_dense(layer):
        return _swiglu_shapes("", m, config.intermediate_size)
    shapes: dict[str, Shape] = {"gate.weight": (e, m), "gate.e_score_correction_bias": (e,)}
    if stacked_experts:
        shapes["experts.gate_up_proj"] = (e, 2 * i, m)
        shapes["experts.down_proj"] = (e, m, i)
    else:
        for expert in range(e):
            shapes.update(_swiglu_shapes(f"experts.{expert}.", m, i))
    if config.n_shared_experts:
        shapes.update(_swiglu_shapes("shared_experts.", m, i * config.n_shared_experts))
    return shapes


def _swiglu_shapes(prefix: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }


def _unused(config: ModelConfig, name: str) -> bool:
    if _BUFFER.fullmatch(name):
        return True
    layer = _LAYER.match(name)
    return layer is not None and int(layer.group(1)) >= config.num_hidden_layers


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
