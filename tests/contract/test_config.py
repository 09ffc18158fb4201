"""The configuration: its two ready-made models, field by field, and each refusal with its text."""

from dataclasses import FrozenInstanceError, fields

import pytest

from kdtr.contract import ConfigError, ModelConfig, Yarn

TINY = ModelConfig.tiny()


def values(config):
    return {field.name: getattr(config, field.name) for field in fields(config)}


def test_tiny_field_by_field():
    expected = {
        "vocab_size": 512,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "intermediate_size": 320,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 80,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "rms_norm_eps": 2e-5,
        "max_position_embeddings": 1536,
        "rope_theta": 5e4,
        "rope_interleave": True,
        "latent_norm_eps": 1e-6,
        "yarn": None,
    }

    assert expected == values(TINY)


def test_no_two_sizes_of_tiny_are_equal():
    """A swapped size would go unseen where two coincide."""
    sizes = [
        TINY.vocab_size,
        TINY.hidden_size,
        TINY.q_lora_rank,
        TINY.kv_lora_rank,
        TINY.qk_nope_head_dim,
        TINY.qk_rope_head_dim,
        TINY.v_head_dim,
        TINY.intermediate_size,
        TINY.moe_intermediate_size,
        TINY.qk_head_dim,
        TINY.num_attention_heads * TINY.qk_head_dim,
        TINY.n_routed_experts,
        TINY.num_experts_per_tok,
        TINY.n_group,
    ]

    # 96 = 4 * 24 is q_lora_rank and the width of all heads' values: two axes of different tensors
    assert len(sizes) == len(set(sizes))


def test_kimi_k2_field_by_field():
    """config.json of moonshotai/Kimi-K2-Instruct."""
    expected = {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 18432,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "rope_interleave": True,
        "latent_norm_eps": 1e-6,
        "yarn": Yarn(
            factor=32.0,
            original_max_position_embeddings=4096,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    }

    assert expected == values(ModelConfig.kimi_k2())


def test_kimi_k2_with_changes_is_that_model_otherwise():
    whole = values(ModelConfig.kimi_k2())

    short = ModelConfig.kimi_k2(num_hidden_layers=3, yarn=None)

    assert whole | {"num_hidden_layers": 3, "yarn": None} == values(short)


def test_a_head_is_as_wide_as_both_its_parts():
    assert 48 == TINY.qk_head_dim


@pytest.mark.parametrize(("dense", "expected"), [(0, []), (1, [0]), (4, [0, 1, 2, 3])])
def test_layers_below_first_k_are_dense(dense, expected):
    config = TINY.replace(first_k_dense_replace=dense)

    assert expected == [layer for layer in range(4) if config.is_dense(layer)]


def test_a_configuration_is_frozen_hashable_and_equal_by_value():
    with pytest.raises(FrozenInstanceError):
        TINY.vocab_size = 3

    assert {ModelConfig.tiny(): "same"} == {TINY: "same"}


def test_integers_become_floats_where_a_float_is_meant():
    """Or equal models would not be equal, and a hash of the text would differ."""
    config = TINY.replace(rope_theta=50000, routed_scaling_factor=1)

    assert (float, float) == (type(config.rope_theta), type(config.routed_scaling_factor))
    assert float is type(Yarn(factor=3, original_max_position_embeddings=9, mscale=1).mscale)


MODEL_REFUSALS = [
    *(
        ({size: 0}, f"{size} = 0; expected at least 1")
        for size in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "q_lora_rank",
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
    ),
    ({"n_shared_experts": -1}, "n_shared_experts = -1; expected at least 0"),
    ({"vocab_size": 1}, "vocab_size = 1; expected at least 2"),
    (
        {"qk_rope_head_dim": 15},
        "qk_rope_head_dim = 15; expected an even number: rotary embeddings turn pairs",
    ),
    (
        {"first_k_dense_replace": 5},
        "first_k_dense_replace = 5; expected 0..num_hidden_layers = 4",
    ),
    (
        {"first_k_dense_replace": -1},
        "first_k_dense_replace = -1; expected 0..num_hidden_layers = 4",
    ),
    ({"scoring_func": "relu"}, "scoring_func = 'relu'; expected 'sigmoid' or 'softmax'"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0; expected above 0"),
    ({"latent_norm_eps": -1e-6}, "latent_norm_eps = -1e-06; expected above 0"),
    ({"routed_scaling_factor": 0}, "routed_scaling_factor = 0.0; expected above 0"),
    ({"rope_theta": 1}, "rope_theta = 1.0; expected above 1"),
    (
        {"n_group": 3},
        "n_routed_experts = 8 does not divide into n_group = 3 groups; expected a multiple",
    ),
    (
        {"n_group": 8},
        "n_routed_experts = 8 in n_group = 8 groups leaves 1 expert per group; expected at least "
        "2, because a group's score is the sum of its two best (MOE-2)",
    ),
    ({"topk_group": 3}, "topk_group = 3 exceeds n_group = 2; expected 1..2"),
    (
        {"num_experts_per_tok": 5},
        "num_experts_per_tok = 5, but topk_group = 1 groups hold 4 experts; expected 1..4",
    ),
    ({"vocab_size": 512.0}, "vocab_size = 512.0; expected int"),
    ({"vocab_size": True}, "vocab_size = True; expected int"),
    ({"vocab_size": None}, "vocab_size = None; expected int"),
    ({"q_lora_rank": "96"}, "q_lora_rank = '96'; expected int or null"),
    ({"scoring_func": 3}, "scoring_func = 3; expected str"),
    ({"norm_topk_prob": 1}, "norm_topk_prob = 1; expected bool"),
    ({"rope_interleave": None}, "rope_interleave = None; expected bool"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; expected a finite number"),
    ({"rope_theta": float("inf")}, "rope_theta = inf; expected a finite number"),
    ({"rope_theta": True}, "rope_theta = True; expected a finite number"),
    ({"yarn": {"factor": 3}}, "yarn = {'factor': 3}; expected Yarn or null"),
]


@pytest.mark.parametrize(("change", "text"), MODEL_REFUSALS, ids=str)
def test_a_model_that_cannot_be_is_refused_by_name(change, text):
    with pytest.raises(ConfigError) as refusal:
        TINY.replace(**change)

    assert text == str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"q_lora_rank": None},
        {"n_shared_experts": 0},
        {"n_group": 4, "topk_group": 4, "num_experts_per_tok": 8},
        {"first_k_dense_replace": 4},
        {"num_experts_per_tok": 4},
        {"vocab_size": 2},
        {"max_position_embeddings": 1},
    ],
    ids=str,
)
def test_a_model_at_its_bounds_is_legal(change):
    config = TINY.replace(**change)

    assert change == {name: getattr(config, name) for name in change}


YARN_REFUSALS = [
    ({"factor": 0.5}, "yarn factor = 0.5; expected at least 1"),
    (
        {"original_max_position_embeddings": 0},
        "original_max_position_embeddings = 0; expected at least 1",
    ),
    ({"beta_fast": 0}, "yarn beta_fast = 0.0; expected above 0"),
    ({"beta_slow": -1.0}, "yarn beta_slow = -1.0; expected above 0"),
    (
        {"beta_fast": 1.0, "beta_slow": 2.0},
        "yarn beta_fast = 1.0 is below beta_slow = 2.0; beta_fast counts the turns of the fast, "
        "unscaled frequencies: swap them",
    ),
    ({"mscale": -0.1}, "yarn mscale = -0.1; expected at least 0"),
    ({"mscale_all_dim": -2}, "yarn mscale_all_dim = -2.0; expected at least 0"),
    ({"attention_factor": 0.0}, "yarn attention_factor = 0.0; expected above 0"),
    ({"factor": "40"}, "factor = '40'; expected a finite number"),
    ({"mscale": "1"}, "mscale = '1'; expected a finite number or null"),
    (
        {"original_max_position_embeddings": 4096.0},
        "original_max_position_embeddings = 4096.0; expected int",
    ),
]


@pytest.mark.parametrize(("change", "text"), YARN_REFUSALS, ids=str)
def test_a_yarn_map_that_cannot_be_is_refused_by_name(change, text):
    with pytest.raises(ConfigError) as refusal:
        Yarn(**{"factor": 4.0, "original_max_position_embeddings": 64, **change})

    assert text == str(refusal.value)


def test_yarn_defaults_are_those_of_the_paper_and_no_mscale():
    yarn = Yarn(factor=1, original_max_position_embeddings=1)

    assert (32.0, 1.0) == (yarn.beta_fast, yarn.beta_slow)
    assert (None, None, None) == (yarn.mscale, yarn.mscale_all_dim, yarn.attention_factor)
