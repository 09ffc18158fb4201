"""The generated checkpoints: exact in every dtype, of sizes that engines take, and far-sighted."""

from __future__ import annotations

import numpy as np
import pytest

from kdtr.conformance.xray import XrayModel, xray_models
from kdtr.conformance.xray_fit import Precision
from kdtr.conformance.xray_models import RESERVED, START, AttentionXray, attention_models
from kdtr.conformance.xray_optics import Lenses, rule_optics
from kdtr.conformance.xray_sessions import scripts
from kdtr.conformance.xray_words import distance_range
from kdtr.contract import ModelConfig, tensor_shapes
from kdtr.contract.hf_config import read_hf_config
from kdtr.contract.hf_config_writer import write_hf_config

MODELS = {model.name: model for model in xray_models()}
ATTENTION = {model.name: model for model in attention_models()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_weight_is_exact_in_every_dtype(model: XrayModel) -> None:
    weights = model.tensors("float32")

    for dtype in ("bfloat16", "float16"):
        stored = model.tensors(dtype)
        for name, array in weights.items():
            assert np.array_equal(array, stored[name].astype(np.float32)), f"{name} in {dtype}"


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_checkpoint_is_complete_and_says_what_it_is(model: XrayModel) -> None:
    weights = model.tensors()

    assert tensor_shapes(model.config) == {name: array.shape for name, array in weights.items()}
    assert model.config == read_hf_config(write_hf_config(model.config))


@pytest.mark.parametrize("model", ATTENTION.values(), ids=ATTENTION)
def test_every_embedding_has_the_mean_square_1(model: AttentionXray) -> None:
    """So that the norms change nothing, and query, key and latent start from powers of two."""
    embedding = model.tensors()["model.embed_tokens.weight"].astype(np.float64)

    assert {1.0} == set((embedding[:128] ** 2).mean(axis=1))


def test_k2_has_the_head_sizes_that_kernels_are_built_for() -> None:
    k2 = ModelConfig.kimi_k2()
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "yarn")

    for name in names:
        assert getattr(k2, name) == getattr(ATTENTION["k2"].config, name)


def test_no_session_feeds_a_token_twice_but_the_filler() -> None:
    """Except that the bonus is fed again as the root."""
    for script in scripts():
        prompt = [token for chunk in script.chunks for token in chunk if token != 124]
        drafts = [token for step in script.steps for token in step.tree.tokens[1:]]
        roots = [step.tree.tokens[0] for step in script.steps]
        fed = [*prompt, *drafts, *roots]
        assert len(fed) == len(set(fed)), script.name
        assert roots[0] == START
        assert RESERVED not in fed


@pytest.mark.parametrize(
    ("name", "bfloat16", "float16"),
    [("attention", 199, 600), ("half-split", 435, 600), ("layers", 26, 101), ("k2", 506, 600)],
)
def test_distances_are_told_apart_as_far_as_this(name: str, bfloat16: int, float16: int) -> None:
    """By the bound of the dtype; 600 is as far as was looked. Longest session: 53 rows."""
    model = ATTENTION[name]
    lenses = Lenses(model, rule_optics(model.config))

    def ranges(dtype: str) -> int:
        return distance_range(model, lenses, Precision(dtype))

    assert (600, bfloat16, float16) == tuple(map(ranges, ("float32", "bfloat16", "float16")))
