"""A model that GGUF can say computes what the given one does: asked of the reference, in float64.

The factors here are powers of two, so that no weight is rounded: both models are one function.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kdtr.adapters.llamacpp_express import expressible
from kdtr.conformance import load_engine
from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import ModelConfig, Yarn
from kdtr.kdtr_format import open_model
from kdtr.kdtr_format.gguf_losses import gguf_losses

BASE = ModelConfig.tiny().replace(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    intermediate_size=24,
    moe_intermediate_size=16,
    rms_norm_eps=4e-3,
    latent_norm_eps=4e-3,
)
YARN: dict[str, Any] = {"factor": 6.0, "original_max_position_embeddings": 100}
# Sums of some ten contractions in float64: measured 1e-14 of the largest logit.
TOLERANCE = 1e-12
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def logits(config: ModelConfig, tensors: Any) -> np.ndarray:
    session = load_engine("reference").load((config, tensors)).open(max_len=8)
    mask = np.tri(8, dtype=bool)
    return np.array(session.forward_tokens(PROMPT, np.arange(8), mask))


@pytest.mark.parametrize(
    "changes",
    [
        {"latent_norm_eps": 1e-3},  # s = 2
        {"latent_norm_eps": 16e-3, "q_lora_rank": None},  # s = 1/2
        {"n_shared_experts": 0},
        {"yarn": Yarn(**YARN, attention_factor=0.5)},
        {"yarn": Yarn(**YARN, attention_factor=2.0, mscale_all_dim=1.2), "rope_interleave": False},
        {"yarn": Yarn(**YARN, attention_factor=0.5, mscale=0.8), "latent_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_the_expressible_model_is_the_same_function(changes: dict[str, Any]) -> None:
    config = BASE.replace(**changes)
    tensors = seed_tensors(config, seed=5)

    other, changed = expressible(open_model((config, tensors)))

    assert set() == set(gguf_losses(other)) - {"beta_fast", "beta_slow"}
    expected, actual = logits(config, tensors), logits(other, changed)
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()
    # What changes is needed: GGUF's reading of the given model is another function.
    assert other != config


@pytest.mark.parametrize(
    "keys",
    [{}, {"mscale": 0.8}, {"mscale_all_dim": 1.2}, {"mscale": 0.8, "mscale_all_dim": 1.2}],
    ids=str,
)
def test_amplitudes_that_round_stay_within_the_rounding_of_a_weight(keys: dict[str, float]) -> None:
    config = BASE.replace(yarn=Yarn(**YARN, **keys))
    tensors = seed_tensors(config, seed=5)

    other, changed = expressible(open_model((config, tensors)))

    assert {} == gguf_losses(other)
    expected, actual = logits(config, tensors), logits(other, changed)
    # 2^-24 per weight, over two layers that each hold two such matrices: measured 1e-7.
    assert np.abs(actual - expected).max() <= 2**-20 * np.abs(expected).max()


def test_a_model_that_gguf_can_say_keeps_its_tensors() -> None:
    tensors = seed_tensors(BASE, seed=5)

    config, same = expressible(open_model((BASE, tensors)))

    assert BASE == config
    assert all(same[name] is tensors[name] for name in tensors)
    assert set(tensors) == set(same)
