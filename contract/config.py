"""The model's dimensions and switches, under the names of its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from sys import float_info
from typing import Any

from kdtr.contract.errors import ConfigError

SIGMOID, SOFTMAX = "sigmoid", "softmax"
_MOST = 1e6  # of an eps or a scale: a million times the released ones, far from float32's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN scaling of the rotary frequencies (arXiv 2309.00071); keys of `rope_scaling`.

    `mscale`, `mscale_all_dim` and `attention_factor` are None when the key is absent: MLA-4 and
    MLA-5 depend on it.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _type_check(self)
        if self.factor < 1:
            raise ConfigError(f"yarn factor = {self.factor}; expected at least 1")
        _at_least(self, 1, "original_max_position_embeddings")
        for name in ("beta_fast", "beta_slow"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"yarn {name} = {getattr(self, name)}; expected above 0")
        if self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"yarn beta_fast = {self.beta_fast} is below beta_slow = {self.beta_slow}; "
                "beta_fast counts the turns of the fast, unscaled frequencies: swap them"
            )
        for name in ("mscale", "mscale_all_dim"):
            if (getattr(self, name) or 0.0) < 0:
                raise ConfigError(f"yarn {name} = {getattr(self, name)}; expected at least 0")
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ConfigError(f"yarn attention_factor = {self.attention_factor}; expected above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A model of the DeepSeek-V3 / Kimi K2 family: MLA attention, grouped MoE router.

    Sizes are elements, `num_*` are counts, `max_position_embeddings` is tokens. `q_lora_rank` is
    None when queries come from q_proj (MLA-1). `scoring_func` is "sigmoid" or "softmax" (MOE-1).
    `latent_norm_eps` is the eps of the q_a and kv_a norms (NORM-1). `yarn` is None for plain
    rotary embeddings.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    first_k_dense_replace: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    scoring_func: str
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_interleave: bool = True
    latent_norm_eps: float = 1e-6
    yarn: Yarn | None = None

    def __post_init__(self) -> None:
        _type_check(self)
        _at_least(self, 1, *_SIZES)
        _at_least(self, 0, "n_shared_experts")
        if self.q_lora_rank is not None:
            _at_least(self, 1, "q_lora_rank")
        if self.vocab_size < 2:
            raise ConfigError(f"vocab_size = {self.vocab_size}; expected at least 2")
        if self.qk_rope_head_dim % 2:
            raise ConfigError(
                f"qk_rope_head_dim = {self.qk_rope_head_dim}; expected an even number: "
                "rotary embeddings turn pairs"
            )
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ConfigError(
                f"first_k_dense_replace = {self.first_k_dense_replace}; "
                f"expected 0..num_hidden_layers = {self.num_hidden_layers}"
            )
        if self.scoring_func not in (SIGMOID, SOFTMAX):
            raise ConfigError(
                f"scoring_func = {self.scoring_func!r}; expected {SIGMOID!r} or {SOFTMAX!r}"
            )
        for name in ("rms_norm_eps", "latent_norm_eps", "routed_scaling_factor"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; expected above 0")
            if getattr(self, name) > _MOST:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}; expected at most {_MOST:g}: "
                    "what it scales would leave float32"
                )
        if self.rope_theta <= 1:
            raise ConfigError(f"rope_theta = {self.rope_theta}; expected above 1")
        self._check_groups()

    def _check_groups(self) -> None:
        if self.n_routed_experts % self.n_group:
            raise ConfigError(
                f"n_routed_experts = {self.n_routed_experts} does not divide into "
                f"n_group = {self.n_group} groups; expected a multiple"
            )
        per_group = self.n_routed_experts // self.n_group
        if per_group < 2:
            raise ConfigError(
                f"n_routed_experts = {self.n_routed_experts} in n_group = {self.n_group} groups "
                f"leaves {per_group} expert per group; expected at least 2, because a group's "
                "score is the sum of its two best (MOE-2)"
            )
        if self.topk_group > self.n_group:
            raise ConfigError(
                f"topk_group = {self.topk_group} exceeds n_group = {self.n_group}; "
                f"expected 1..{self.n_group}"
            )
        choosable = per_group * self.topk_group
        if self.num_experts_per_tok > choosable:
            raise ConfigError(
                f"num_experts_per_tok = {self.num_experts_per_tok}, but topk_group = "
                f"{self.topk_group} groups hold {choosable} experts; expected 1..{choosable}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key: nope and rope part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_dense(self, layer: int) -> bool:
        """Whether the layer's MLP is dense (MOE-4)."""
        return layer < self.first_k_dense_replace

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a checkpoint's `config.json` (see `contract/hf_config.py`).

        Raises ConfigError for missing, contradictory or impossible values and UnsupportedError
        for what this version does not compute, each naming the key.
        """
        from kdtr.contract.hf_config import read_hf_config

        return read_hf_config(config)

    @classmethod
    def tiny(cls) -> ModelConfig:
        """The seed model: small; only the latent norm is at its published default."""
        return cls(
            vocab_size=512,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            q_lora_rank=96,
            kv_lora_rank=64,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=24,
            intermediate_size=320,
            first_k_dense_replace=1,
            moe_intermediate_size=80,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=3,
            n_group=2,
            topk_group=1,
            scoring_func=SIGMOID,
            norm_topk_prob=True,
            routed_scaling_factor=1.7,
            rms_norm_eps=2e-5,
            max_position_embeddings=1536,
            rope_theta=5e4,
        )

    @classmethod
    def kimi_k2(cls, **changes: Any) -> ModelConfig:
        """Kimi K2 (arXiv 2507.20534); `changes` override fields, for example the layer count.

        Every value is the field of that name in `config.json` of moonshotai/Kimi-K2-Instruct,
        with the exceptions noted beside the line. Kimi-K2-Instruct-0905 differs in two fields:
        `max_position_embeddings` 262144 and the YaRN factor 64.
        """
        k2 = cls(
            vocab_size=163840,
            hidden_size=7168,
            num_hidden_layers=61,
            num_attention_heads=64,
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            intermediate_size=18432,
            first_k_dense_replace=1,
            moe_intermediate_size=2048,
            n_routed_experts=384,
            n_shared_experts=1,
            num_experts_per_tok=8,
            n_group=1,
            topk_group=1,
            scoring_func=SIGMOID,
            norm_topk_prob=True,
            routed_scaling_factor=2.827,
            rms_norm_eps=1e-6,
            max_position_embeddings=131072,
            rope_theta=50000.0,
            rope_interleave=True,  # not a key of the file: modeling_deepseek.py pairs (2i, 2i+1)
            latent_norm_eps=1e-6,  # not a key of the file: the norms' own default in that code
            yarn=Yarn(
                factor=32.0,
                original_max_position_embeddings=4096,
                beta_fast=1.0,
                beta_slow=1.0,
                mscale=1.0,
                mscale_all_dim=1.0,
            ),
        )
        return k2.replace(**changes)


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "max_position_embeddings",
)


def _at_least(config: object, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value < least:
            raise ConfigError(f"{name} = {value}; expected at least {least}")


def _type_check(config: Any) -> None:
    """Hold every field to its annotation: a JSON file may hold anything."""
    for field in fields(config):
        value = getattr(config, field.name)
        kind, _, optional = str(field.type).partition(" | ")
        if value is None and optional == "None":
            continue
        if kind == "int":
            fits = isinstance(value, int) and not isinstance(value, bool)
        elif kind == "float":
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            fits = fits and abs(value) <= float_info.max  # false for NaN and inf too
        elif kind == "bool":
            fits = isinstance(value, bool)
        elif kind == "str":
            fits = isinstance(value, str)
        else:
            fits = isinstance(value, Yarn)
        if not fits:
            wanted = "a finite number" if kind == "float" else kind
            raise ConfigError(
                f"{field.name} = {value!r}; expected {wanted}{' or null' if optional else ''}"
            )
        if kind == "float":
            object.__setattr__(config, field.name, float(value))
