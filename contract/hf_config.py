"""From a Hugging Face `config.json` to `ModelConfig`: both spellings, every refusal by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kdtr.contract.config import SIGMOID, SOFTMAX, ModelConfig, Yarn
from kdtr.contract.errors import ConfigError, UnsupportedError

_MISSING = object()

# Keys whose only supported value is known. Absent means that value, as in transformers'
# DeepseekV3Config and in the released files.
_FIXED: dict[str, tuple[Any, ...]] = {
    "topk_method": ("noaux_tc",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "layer_types": (None,),
    "index_topk": (None,),  # DeepSeek-V3.2's sparse attention
    "use_mla": (True,),
}
_MODEL_TYPES = ("deepseek_v3", "kimi_k2")
_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "first_k_dense_replace",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "norm_topk_prob",
    "routed_scaling_factor",
    "rms_norm_eps",
    "max_position_embeddings",
)


def read_hf_config(config: Mapping[str, Any]) -> ModelConfig:
    """Translate a parsed `config.json`; a nested `text_config` is the language model's.

    Raises ConfigError (missing, contradictory, impossible) or UnsupportedError (named feature).
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is {type(config).__name__}; expected the mapping of config.json")
    nested = config.get("text_config")
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise ConfigError(f"text_config = {nested!r}; expected a mapping")
        config = nested
    _refuse_unsupported(config)
    missing = [key for key in (*_REQUIRED, "q_lora_rank") if key not in config]
    if missing:
        raise ConfigError(f"config.json lacks {', '.join(missing)}; expected every one of them")
    theta, scaling = _rope(config)
    shared = config.get("n_shared_experts")
    return ModelConfig(
        **{key: config[key] for key in _REQUIRED},
        q_lora_rank=config["q_lora_rank"],
        n_shared_experts=0 if shared is None else shared,
        scoring_func=_scoring_func(config),
        rope_theta=theta,
        rope_interleave=config.get("rope_interleave", True),
        latent_norm_eps=config.get("latent_norm_eps", 1e-6),
        yarn=scaling,
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    model_type = config.get("model_type", _MODEL_TYPES[0])
    if model_type not in _MODEL_TYPES:
        raise UnsupportedError(
            f"model_type = {model_type!r} is not supported; expected {_any_of(_MODEL_TYPES)}"
        )
    for key, supported in _FIXED.items():
        value = config.get(key, supported[0])
        if not any(_same(value, wanted) for wanted in supported):
            raise UnsupportedError(
                f"{key} = {value!r} is not supported; expected {_any_of(supported)}"
            )
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads", heads) != heads:
        raise UnsupportedError(
            f"num_key_value_heads = {config['num_key_value_heads']!r} is not supported; expected "
            f"num_attention_heads = {heads!r}: MLA has one latent for all heads"
        )
    nope, rope = config.get("qk_nope_head_dim"), config.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(rope, int):
        for key, value in (("head_dim", rope), ("qk_head_dim", nope + rope)):
            if config.get(key, value) not in (value, None):
                raise ConfigError(
                    f"{key} = {config[key]!r} contradicts qk_nope_head_dim = {nope} and "
                    f"qk_rope_head_dim = {rope}; expected {value}, or no such key"
                )


def _same(value: object, wanted: object) -> bool:
    """Equal, and of one kind where one of them is a bool: 0 is not false."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _scoring_func(config: Mapping[str, Any]) -> str:
    value = config.get("scoring_func", SIGMOID)
    if value not in (SIGMOID, SOFTMAX):
        raise UnsupportedError(
            f"scoring_func = {value!r} is not supported; expected {_any_of((SIGMOID, SOFTMAX))}"
        )
    return str(value)


def _rope(config: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """rope_theta and YaRN from `rope_parameters` (transformers 5) or `rope_scaling` (released)."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{key} = {value!r}; expected a mapping or null")
    new, old = dict(new or {}), dict(old or {})
    thetas = {
        where: value
        for where, value in (
            ("rope_theta", config.get("rope_theta")),
            ("rope_parameters.rope_theta", new.pop("rope_theta", None)),
            ("rope_scaling.rope_theta", old.pop("rope_theta", None)),
        )
        if value is not None
    }
    for where, theta in thetas.items():
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise ConfigError(f"{where} = {theta!r}; expected a finite number")
    if not thetas:
        raise ConfigError("config.json lacks rope_theta; expected it at the top or in its rope map")
    if len(set(thetas.values())) > 1:
        raise ConfigError(f"rope_theta differs: {_pairs(thetas)}; expected one value")
    new, old = _rope_type("rope_parameters", new), _rope_type("rope_scaling", old)
    if new and old and new != old:
        raise ConfigError(
            f"rope_parameters ({_pairs(new)}) and rope_scaling ({_pairs(old)}) differ; "
            "expected one of them, or the same values"
        )
    return next(iter(thetas.values())), _yarn(new or old, config)


def _rope_type(where: str, rope: dict[str, Any]) -> dict[str, Any]:
    """The map under one spelling of its type; {} when it says nothing."""
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope]
    for kind in kinds:
        if not isinstance(kind, str):
            raise ConfigError(f"{where}: rope_type = {kind!r}; expected a string")
    if len(set(kinds)) > 1:
        raise ConfigError(f"{where}: rope_type and type differ: {_any_of(kinds)}; expected one")
    if rope and not kinds:
        raise ConfigError(f"{where} ({_pairs(rope)}) lacks rope_type; expected it, or type")
    if not kinds:
        return {}
    kind = kinds[0]
    if kind not in ("yarn", "default"):
        raise UnsupportedError(
            f"{where}: rope_type = {kind!r} is not supported; expected 'yarn' or 'default'"
        )
    if kind == "default":
        factor = rope.get("factor")
        if factor is not None and not _same(factor, 1):
            raise ConfigError(
                f"{where}: factor = {factor!r} contradicts rope_type 'default'; "
                "expected no factor, or 1, or rope_type 'yarn'"
            )
        return {"rope_type": kind}
    return {"rope_type": kind, **rope}


def _yarn(rope: dict[str, Any], config: Mapping[str, Any]) -> Yarn | None:
    if not rope or rope["rope_type"] == "default":
        return None
    rope = {key: value for key, value in rope.items() if value is not None and key != "rope_type"}
    if rope.pop("truncate", True) is not True:
        raise UnsupportedError(
            "rope truncate = false is not supported; expected the floor and ceil of MLA-6"
        )
    if rope.pop("partial_rotary_factor", 1) != 1:
        raise UnsupportedError("partial_rotary_factor is not supported; expected 1, or no such key")
    if "factor" not in rope:
        raise ConfigError(f"the yarn map ({_pairs(rope)}) lacks factor; expected it")
    known = set(Yarn.__dataclass_fields__)
    unknown = sorted(set(rope) - known)
    if unknown:
        raise UnsupportedError(
            f"yarn keys {', '.join(unknown)} are not supported; expected {', '.join(sorted(known))}"
        )
    rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return Yarn(**rope)


def _any_of(values: Any) -> str:
    return " or ".join(repr(value) for value in values)


def _pairs(mapping: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value!r}" for key, value in mapping.items())
