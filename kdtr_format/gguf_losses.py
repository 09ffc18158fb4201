"""What GGUF's `deepseek2`, as llama.cpp reads it, computes otherwise than the configuration says.

Every difference has a name; an export refuses it unless it was accepted by that name. The facts
are llama.cpp's: its loader and graph of `deepseek2`, its RoPE and its context set-up.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from math import ceil, floor, isfinite, log, pi

import numpy as np

from kdtr.contract import ModelConfig, UnsupportedError, Yarn

LOSSES = (
    "latent_norm_eps",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "yarn_ramp",
    "num_hidden_layers",
    "n_shared_experts",
)
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_LITE_LAYERS = (26, 27)  # taken for DeepSeek-V2-Lite, whatever the keys say
_LITE_LAYERS_AND_VOCAB = (48, 128256)  # taken for another small model without q_lora_rank
_MAX_UINT32 = 2**32 - 1


def gguf_losses(config: ModelConfig) -> dict[str, str]:
    """Name of LOSSES -> what the value is, what llama.cpp does, what to change."""
    losses = {}
    if config.latent_norm_eps != config.rms_norm_eps:
        losses["latent_norm_eps"] = (
            f"latent_norm_eps = {config.latent_norm_eps}, but one eps serves all norms, "
            f"rms_norm_eps = {config.rms_norm_eps}; expected equal values"
        )
    if config.yarn is not None:
        losses.update(_yarn_losses(config, config.yarn))
    layers = config.num_hidden_layers
    if layers in _LITE_LAYERS or (layers, config.vocab_size) == _LITE_LAYERS_AND_VOCAB:
        losses["num_hidden_layers"] = (
            f"num_hidden_layers = {layers} (vocab_size = {config.vocab_size}) is taken for a model "
            f"without q_lora_rank; expected another number of layers"
        )
    if config.n_shared_experts == 0 and config.first_k_dense_replace < layers:
        losses["n_shared_experts"] = (
            "n_shared_experts = 0, but layers with experts must have shared ones; expected at "
            "least 1, with weights of zero"
        )
    return losses


def refuse_losses(config: ModelConfig, accepted: Collection[str]) -> list[str]:
    """Raise UnsupportedError for what is not accepted; returns the sentences of what is."""
    unknown = sorted(set(accepted) - set(LOSSES))
    if unknown:
        raise UnsupportedError(
            f"{', '.join(map(repr, unknown))} cannot be accepted as a loss; "
            f"expected names of {', '.join(LOSSES)}"
        )
    losses = gguf_losses(config)
    refused = {name: text for name, text in losses.items() if name not in accepted}
    if refused:
        sentences = "; ".join(refused.values())
        options = " ".join(f"--accept-loss {name}" for name in refused)
        raise UnsupportedError(
            f"GGUF (deepseek2 of llama.cpp) cannot say this model. {sentences}. "
            f"To write it all the same: {options}"
        )
    _refuse_out_of_range(config)
    return [f"accepted loss: {text}" for text in losses.values()]


def _yarn_losses(config: ModelConfig, yarn: Yarn) -> dict[str, str]:
    losses = {}
    if yarn.factor > 1:  # at 1 the frequencies are plain and every mscale is 1
        for name, fixed in _BETAS.items():
            value = getattr(yarn, name)
            if value != fixed:
                option = name.replace("_", "-")
                losses[name] = (
                    f"{name} = {value} is written, but not read: {fixed} is used; start llama.cpp "
                    f"with --yarn-{option} {value:g}"
                )
        ends = _ramp_ends(config, yarn)
        if ends[0] > ends[1]:
            losses["yarn_ramp"] = (
                f"the ramp of MLA-6 runs backwards, from {ends[0]} to {ends[1]}, and is read as a "
                f"step; expected original_max_position_embeddings and rope_theta that order it"
            )
    losses.update(_amplitude_losses(yarn))
    return losses


def _amplitude_losses(yarn: Yarn) -> dict[str, str]:
    """MLA-4 and MLA-5: llama.cpp knows mscale_all_dim alone, and cos and sin as they are."""
    if yarn.attention_factor not in (None, 1.0):
        return {
            "attention_factor": f"attention_factor = {yarn.attention_factor}, but cos and sin are "
            f"not scaled; expected 1, or no such key"
        }
    if yarn.factor == 1:
        return {}
    if not yarn.mscale_all_dim:
        return {
            "mscale_all_dim": f"mscale_all_dim = {yarn.mscale_all_dim}, but without it scores are "
            f"scaled by mscale(factor, 1) squared; expected a value above 0, equal to mscale"
        }
    if yarn.attention_factor is None and yarn.mscale != yarn.mscale_all_dim:
        return {
            "mscale": f"mscale = {yarn.mscale}, mscale_all_dim = {yarn.mscale_all_dim}, but cos "
            f"and sin are not scaled; expected equal values"
        }
    return {}


def _ramp_ends(config: ModelConfig, yarn: Yarn) -> tuple[int, int]:
    """The first and last pair of MLA-6's ramp, before equal ends are spread."""
    r = config.qk_rope_head_dim

    def pair_that_turns(turns: float) -> float:
        ratio = yarn.original_max_position_embeddings / (turns * 2 * pi)
        return r * log(ratio) / (2 * log(config.rope_theta))

    low, high = floor(pair_that_turns(yarn.beta_fast)), ceil(pair_that_turns(yarn.beta_slow))
    return max(low, 0), min(high, r - 1)


def _refuse_out_of_range(config: ModelConfig) -> None:
    """GGUF's keys are uint32 and float32; rounding to float32 is what every reader computes in."""
    for holder in (config, config.yarn):
        for field in fields(holder) if holder is not None else ():
            value = getattr(holder, field.name)
            if isinstance(value, int) and value > _MAX_UINT32:
                raise UnsupportedError(
                    f"{field.name} = {value} does not fit GGUF's uint32; "
                    f"expected at most {_MAX_UINT32}"
                )
            if isinstance(value, float) and value:
                with np.errstate(over="ignore", under="ignore"):
                    stored = float(np.float32(value))
                if not stored or not isfinite(stored):
                    raise UnsupportedError(
                        f"{field.name} = {value} is {stored} in GGUF's float32; "
                        f"expected a value between 1.2e-38 and 3.4e+38"
                    )
