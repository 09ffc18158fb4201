"""config.json in both spellings becomes the same model; what cannot be read is named."""

import pytest

from kdtr.contract import ConfigError, ModelConfig, UnsupportedError, Yarn

EXPECTED = ModelConfig(
    vocab_size=129,
    hidden_size=60,
    num_hidden_layers=5,
    num_attention_heads=6,
    q_lora_rank=26,
    kv_lora_rank=34,
    qk_nope_head_dim=14,
    qk_rope_head_dim=8,
    v_head_dim=18,
    intermediate_size=98,
    first_k_dense_replace=2,
    moe_intermediate_size=30,
    n_routed_experts=12,
    n_shared_experts=3,
    num_experts_per_tok=4,
    n_group=3,
    topk_group=2,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.25,
    rms_norm_eps=3e-6,
    max_position_embeddings=7000,
    rope_theta=30000.0,
    rope_interleave=False,
    latent_norm_eps=1e-6,
    yarn=Yarn(
        factor=20.0,
        original_max_position_embeddings=350,
        beta_fast=31.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=0.9,
    ),
)
YARN_TEXT = (
    "factor = 20.0, original_max_position_embeddings = 350, beta_fast = 31.0, beta_slow = 2.0, "
    "mscale = 0.7, mscale_all_dim = 0.9"
)


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_the_spelling_of_transformers_5(new):
    assert EXPECTED == ModelConfig.from_hf(new)


def test_the_spelling_of_the_released_files(old):
    assert EXPECTED == ModelConfig.from_hf(old)


def test_both_spellings_at_once_if_they_say_the_same(new, old):
    assert EXPECTED == ModelConfig.from_hf(old | new)


def test_a_nested_text_config_is_the_language_model(new):
    outer = {"model_type": "kimi_k25", "vocab_size": 3, "text_config": new}

    assert EXPECTED == ModelConfig.from_hf(outer)


def test_a_null_text_config_is_none(new):
    assert EXPECTED == ModelConfig.from_hf(new | {"text_config": None})


def test_reading_leaves_the_mapping_as_it_was(new, old):
    kept = repr((new, old))

    ModelConfig.from_hf(new)
    ModelConfig.from_hf(old)

    assert kept == repr((new, old))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"q_lora_rank": None}, {"q_lora_rank": None}),
        ({"n_shared_experts": None}, {"n_shared_experts": 0}),
        ({"n_shared_experts": 0}, {"n_shared_experts": 0}),
        ({"scoring_func": "softmax"}, {"scoring_func": "softmax"}),
        ({"norm_topk_prob": False}, {"norm_topk_prob": False}),
        ({"rope_interleave": True}, {"rope_interleave": True}),
        ({"latent_norm_eps": 1e-5}, {"latent_norm_eps": 1e-5}),
        ({"model_type": "kimi_k2"}, {}),
        ({"tie_word_embeddings": False, "use_mla": True, "sliding_window": None}, {}),
    ],
    ids=str,
)
def test_a_key_is_read(change, expected, new):
    assert EXPECTED.replace(**expected) == ModelConfig.from_hf(new | change)


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("n_shared_experts", {"n_shared_experts": 0}),
        ("rope_interleave", {"rope_interleave": True}),
        ("model_type", {}),
        ("num_key_value_heads", {}),
        ("head_dim", {}),
        ("qk_head_dim", {}),
        ("attention_bias", {}),
        ("hidden_act", {}),
        ("tie_word_embeddings", {}),
    ],
)
def test_a_key_that_may_be_absent(key, default, new):
    assert EXPECTED.replace(**default) == ModelConfig.from_hf(without(new, key))


def rope(config, **changes):
    """rope_parameters with some keys changed, or dropped where the value is ..."""
    merged = {**config["rope_parameters"], **changes}
    kept = {key: value for key, value in merged.items() if value is not ...}
    return config | {"rope_parameters": kept}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_factor": 1.3}, {"attention_factor": 1.3}),
        ({"attention_factor": None}, {}),
        ({"mscale": None}, {"mscale": None}),
        ({"mscale": ..., "mscale_all_dim": ...}, {"mscale": None, "mscale_all_dim": None}),
        ({"mscale": 0}, {"mscale": 0.0}),
        ({"beta_fast": ..., "beta_slow": ...}, {"beta_fast": 32.0, "beta_slow": 1.0}),
        (
            {"original_max_position_embeddings": ...},
            {"original_max_position_embeddings": 7000},
        ),
        ({"truncate": True, "partial_rotary_factor": 1.0}, {}),
        ({"type": "yarn"}, {}),
    ],
    ids=str,
)
def test_a_key_of_the_yarn_map(changes, expected, new):
    found = ModelConfig.from_hf(rope(new, **changes)).yarn

    named = {name: getattr(EXPECTED.yarn, name) for name in Yarn.__dataclass_fields__}
    assert Yarn(**{**named, **expected}) == found


@pytest.mark.parametrize(
    "plain",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}},
        {"rope_parameters": {"rope_theta": 30000.0}},
        {"rope_parameters": None, "rope_theta": 30000},
        {"rope_parameters": {}, "rope_scaling": None, "rope_theta": 30000.0},
        {"rope_parameters": {"rope_type": "default", "factor": 1.0}, "rope_theta": 30000.0},
    ],
    ids=str,
)
def test_plain_rotary_embeddings_in_every_spelling(plain, new):
    assert EXPECTED.replace(yarn=None) == ModelConfig.from_hf(new | plain)


def test_a_rope_map_without_a_type_beside_a_yarn_map_says_nothing(old):
    config = old | {"rope_parameters": {"rope_theta": 30000.0}}

    assert EXPECTED == ModelConfig.from_hf(config)


def test_a_default_rope_map_beside_a_yarn_map_contradicts_it(old):
    config = old | {"rope_parameters": {"rope_type": "default", "rope_theta": 30000.0}}

    with pytest.raises(ConfigError, match=r"^rope_parameters \(rope_type = 'default'\) and rope_"):
        ModelConfig.from_hf(config)


def test_a_default_rope_map_with_a_factor_contradicts_itself(new):
    config = new | {"rope_parameters": {"rope_type": "default", "factor": 3.0}, "rope_theta": 3e4}

    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(config)

    assert (
        "rope_parameters: factor = 3.0 contradicts rope_type 'default'; "
        "expected no factor, or 1, or rope_type 'yarn'"
    ) == str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", 0), ("mlp_bias", 0.0), ("use_mla", 1), ("moe_layer_freq", True)],
)
def test_a_number_is_no_bool_and_a_bool_no_number(key, value, new):
    with pytest.raises(UnsupportedError, match=f"^{key} = {value!r} is not supported; expected "):
        ModelConfig.from_hf(new | {key: value})


@pytest.mark.parametrize("key", ["rms_norm_eps", "latent_norm_eps", "routed_scaling_factor"])
def test_a_scale_far_above_any_model_is_refused(key, new):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(new | {key: 1e308})

    assert (f"{key} = 1e+308; expected at most 1e+06: what it scales would leave float32") == str(
        refusal.value
    )


FIXED = [
    ("topk_method", "greedy", "'noaux_tc'"),
    ("hidden_act", "gelu", "'silu'"),
    ("attention_bias", True, "False"),
    ("mlp_bias", True, "False"),
    ("moe_layer_freq", 2, "1"),
    ("tie_word_embeddings", True, "False"),
    ("partial_rotary_factor", 0.5, "1 or None"),
    ("sliding_window", 4096, "None"),
    ("layer_types", ["full_attention"], "None"),
    ("index_topk", 2048, "None"),
    ("use_mla", False, "True"),
    ("scoring_func", "relu", "'sigmoid' or 'softmax'"),
    ("model_type", "deepseek_v2", "'deepseek_v3' or 'kimi_k2'"),
]


@pytest.mark.parametrize(("key", "value", "supported"), FIXED)
def test_an_unsupported_feature_is_named(key, value, supported, new):
    with pytest.raises(UnsupportedError) as refusal:
        ModelConfig.from_hf(new | {key: value})

    assert f"{key} = {value!r} is not supported; expected {supported}" == str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"truncate": False},
            "rope truncate = false is not supported; expected the floor and ceil of MLA-6",
        ),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is not supported; expected 1, or no such key",
        ),
        (
            {"rope_type": "linear"},
            "rope_parameters: rope_type = 'linear' is not supported; expected 'yarn' or 'default'",
        ),
        (
            {"short_factor": [1], "long_factor": [2]},
            "yarn keys long_factor, short_factor are not supported; expected attention_factor, "
            "beta_fast, beta_slow, factor, mscale, mscale_all_dim, "
            "original_max_position_embeddings",
        ),
    ],
    ids=str,
)
def test_an_unsupported_rope_is_named(changes, text, new):
    with pytest.raises(UnsupportedError) as refusal:
        ModelConfig.from_hf(rope(new, **changes))

    assert text == str(refusal.value)


def test_more_key_heads_than_one_latent_are_not_supported(new):
    with pytest.raises(UnsupportedError) as refusal:
        ModelConfig.from_hf(new | {"num_key_value_heads": 2})

    expected = (
        "num_key_value_heads = 2 is not supported; expected num_attention_heads = 6: "
        "MLA has one latent for all heads"
    )
    assert expected == str(refusal.value)


@pytest.mark.parametrize(("key", "good"), [("head_dim", 8), ("qk_head_dim", 22)])
def test_a_head_width_that_contradicts_its_parts(key, good, new):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(new | {key: 64})

    expected = (
        f"{key} = 64 contradicts qk_nope_head_dim = 14 and qk_rope_head_dim = 8; "
        f"expected {good}, or no such key"
    )
    assert expected == str(refusal.value)


REQUIRED = (
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
    "q_lora_rank",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key, new):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(without(new, key, "num_key_value_heads"))

    assert f"config.json lacks {key}; expected every one of them" == str(refusal.value)


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf({})

    expected = f"config.json lacks {', '.join(REQUIRED)}; expected every one of them"
    assert expected == str(refusal.value)


REFUSALS = {
    "no mapping": (lambda new, old: [new], "config is list; expected the mapping of config.json"),
    "text_config": (
        lambda new, old: {"text_config": "llama"},
        "text_config = 'llama'; expected a mapping",
    ),
    "rope_parameters": (
        lambda new, old: new | {"rope_parameters": "yarn"},
        "rope_parameters = 'yarn'; expected a mapping or null",
    ),
    "rope_scaling": (
        lambda new, old: old | {"rope_scaling": [40]},
        "rope_scaling = [40]; expected a mapping or null",
    ),
    "no theta": (
        lambda new, old: without(old, "rope_theta"),
        "config.json lacks rope_theta; expected it at the top or in its rope map",
    ),
    "two thetas": (
        lambda new, old: new | {"rope_theta": 10000.0},
        "rope_theta differs: rope_theta = 10000.0, rope_parameters.rope_theta = 30000.0; "
        "expected one value",
    ),
    "three thetas": (
        lambda new, old: old | new | {"rope_scaling": {**old["rope_scaling"], "rope_theta": 1e6}},
        "rope_theta differs: rope_theta = 30000.0, rope_parameters.rope_theta = 30000.0, "
        "rope_scaling.rope_theta = 1000000.0; expected one value",
    ),
    "two maps": (
        lambda new, old: (
            old | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 3e4, "factor": 2.0}}
        ),
        "rope_parameters (rope_type = 'yarn', factor = 2.0) and rope_scaling "
        f"(rope_type = 'yarn', {YARN_TEXT}) differ; expected one of them, or the same values",
    ),
    "two types": (
        lambda new, old: rope(new, type="linear"),
        "rope_parameters: rope_type and type differ: 'yarn' or 'linear'; expected one",
    ),
    "no type": (
        lambda new, old: rope(new, rope_type=...),
        f"rope_parameters ({YARN_TEXT}) lacks rope_type; expected it, or type",
    ),
    "no factor": (
        lambda new, old: old | {"rope_scaling": {"type": "yarn", "mscale": 1.0, "factor": None}},
        "the yarn map (mscale = 1.0) lacks factor; expected it",
    ),
    "an impossible value": (
        lambda new, old: new | {"topk_group": 4},
        "topk_group = 4 exceeds n_group = 3; expected 1..3",
    ),
    "an impossible yarn value": (
        lambda new, old: rope(new, factor=0.5),
        "yarn factor = 0.5; expected at least 1",
    ),
    "a wrong type": (
        lambda new, old: new | {"rope_theta": "30000", "rope_parameters": None},
        "rope_theta = '30000'; expected a finite number",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_configuration_that_cannot_be_read_is_refused_by_name(name, new, old):
    change, text = REFUSALS[name]

    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(change(new, old))

    assert text == str(refusal.value)
