"""Models that GGUF's deepseek2 cannot say, as models that it can and that compute the same.

latent_norm_eps   one eps serves all norms. RMSNorm(s x, s^2 eps) = RMSNorm(x, eps), so q_a_proj and
                  the latent rows of kv_a_proj are multiplied by
                  s = sqrt(rms_norm_eps / latent_norm_eps)
n_shared_experts  0 cannot be: one shared expert of zeros adds nothing
mscale keys       with equal ones cos and sin are plain, and scores are scaled by mscale_all_dim.
                  So mscale is made equal to it (where it is absent, so small that the scale is 1),
                  and the amplitude of cos and sin (MLA-5) goes into the rows that are rotated

Each factor is applied in float64 and the product rounded to float32 once: as far as a weight
stored in float32 is from what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from kdtr.contract import ModelConfig, Yarn
from kdtr.kdtr_format import OpenModel

# For no mscale_all_dim: 0 is read as absent, and 1 + 0.1 _NONE ln(factor) is 1 in any precision.
_NONE = 1e-30


def expressible(model: OpenModel) -> tuple[ModelConfig, Mapping[str, np.ndarray]]:
    """The model itself where GGUF can say it."""
    config = model.config
    latent = math.sqrt(config.rms_norm_eps / config.latent_norm_eps)
    amplitude = 1.0 if config.yarn is None else _amplitude(config.yarn)
    changed: dict[str, np.ndarray] = {}
    if latent != 1 or amplitude != 1:
        changed.update(_scaled(model, latent, amplitude))
    if config.n_shared_experts == 0 and config.first_k_dense_replace < config.num_hidden_layers:
        changed.update(_zero_experts(config))
        config = config.replace(n_shared_experts=1)
    config = config.replace(latent_norm_eps=config.rms_norm_eps)
    if config.yarn is not None:
        config = config.replace(yarn=_equal_mscales(config.yarn))
    return config, Changed(model.tensors, changed)


def _amplitude(yarn: Yarn) -> float:
    """What cos and sin are multiplied by (MLA-5)."""
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def _equal_mscales(yarn: Yarn) -> Yarn:
    mscale = yarn.mscale_all_dim or _NONE
    return replace(yarn, mscale=mscale, mscale_all_dim=mscale, attention_factor=None)


def _scaled(model: OpenModel, latent: float, amplitude: float) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of both: rows of latents times `latent`, rotated rows times `amplitude`."""
    config = model.config
    d, c = config.qk_nope_head_dim, config.kv_lora_rank
    for layer in range(config.num_hidden_layers):
        attention = f"model.layers.{layer}.self_attn."
        query = "q_proj" if config.q_lora_rank is None else "q_b_proj"
        rows = _wide(model, f"{attention}{query}.weight")  # [h (d + r), in]
        rows.reshape(config.num_attention_heads, config.qk_head_dim, -1)[:, d:] *= amplitude
        yield f"{attention}{query}.weight", rows.astype(np.float32)
        rows = _wide(model, f"{attention}kv_a_proj_with_mqa.weight")  # [c + r, m]
        rows[:c] *= latent
        rows[c:] *= amplitude
        yield f"{attention}kv_a_proj_with_mqa.weight", rows.astype(np.float32)
        if config.q_lora_rank is not None:
            name = f"{attention}q_a_proj.weight"
            yield name, (_wide(model, name) * latent).astype(np.float32)


def _wide(model: OpenModel, name: str) -> np.ndarray:
    return np.array(model.tensors[name]).astype(np.float64)


def _zero_experts(config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    inner, m = config.moe_intermediate_size, config.hidden_size
    for layer in range(config.first_k_dense_replace, config.num_hidden_layers):
        for part, shape in (("gate", (inner, m)), ("up", (inner, m)), ("down", (m, inner))):
            name = f"model.layers.{layer}.mlp.shared_experts.{part}_proj.weight"
            yield name, np.zeros(shape, np.float32)


class Changed(Mapping[str, np.ndarray]):
    """Tensors with some replaced or added; the others are still read when they are asked for."""

    def __init__(self, given: Mapping[str, np.ndarray], changed: dict[str, np.ndarray]) -> None:
        self._given, self._changed = given, changed

    def __getitem__(self, name: str) -> np.ndarray:
        return self._changed[name] if name in self._changed else self._given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._given, *self._changed]))

    def __len__(self) -> int:
        return len({*self._given, *self._changed})
