"""From `ModelConfig` to a Hugging Face `config.json`: what `from_hf` reads back exactly.

The spelling is the one of released files (`rope_theta` beside `rope_scaling`), which transformers'
`DeepseekV3Config` reads too, in versions 4 and 5.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kdtr.contract.config import SIGMOID, ModelConfig, Yarn

_DEFAULT_LATENT_EPS = 1e-6  # of the norms' own class in transformers; no key changes it


def write_hf_config(config: ModelConfig) -> dict[str, Any]:
    """A mapping for `config.json`; `ModelConfig.from_hf` of it equals `config`.

    `scoring_func` and `latent_norm_eps` are always written: transformers ignores them
    (`unknown_to_transformers` names the values that this matters for), our reader does not.
    """
    values = {field.name: getattr(config, field.name) for field in fields(ModelConfig)}
    del values["yarn"]
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **values,
        "num_key_value_heads": config.num_attention_heads,
        "rope_scaling": None if config.yarn is None else _rope_scaling(config.yarn),
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }


def unknown_to_transformers(config: ModelConfig) -> dict[str, str]:
    """What `DeepseekV3ForCausalLM` would compute otherwise: field name -> a sentence."""
    unknown = {}
    if config.scoring_func != SIGMOID:
        unknown["scoring_func"] = (
            f"scoring_func = {config.scoring_func!r}; transformers always uses {SIGMOID!r}"
        )
    if config.latent_norm_eps != _DEFAULT_LATENT_EPS:
        unknown["latent_norm_eps"] = (
            f"latent_norm_eps = {config.latent_norm_eps}; transformers always uses "
            f"{_DEFAULT_LATENT_EPS}"
        )
    if config.n_shared_experts == 0 and config.first_k_dense_replace < config.num_hidden_layers:
        unknown["n_shared_experts"] = (
            "n_shared_experts = 0; transformers makes shared experts of width 0, whose tensors "
            "no checkpoint holds"
        )
    return unknown


def _rope_scaling(yarn: Yarn) -> dict[str, Any]:
    # `type` for the code that came with released checkpoints, `rope_type` for transformers
    keys = {field.name: getattr(yarn, field.name) for field in fields(Yarn)}
    given = {key: value for key, value in keys.items() if value is not None}
    return {"type": "yarn", "rope_type": "yarn", **given}
