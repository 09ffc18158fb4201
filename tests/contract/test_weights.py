"""The tensors of a model: names, shapes, their order, and every fault of a source at once."""

import pytest

from kdtr.contract import (
    CheckpointError,
    ModelConfig,
    check_tensors,
    has_stacked_experts,
    tensor_shapes,
)

# No two letters alike: w 11, m 12, h 3, q_lora 7, c 9, d 4, r 2, v 5, i 13, e 4 x 8.
CONFIG = ModelConfig.tiny().replace(
    vocab_size=11,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=7,
    kv_lora_rank=9,
    qk_nope_head_dim=4,
    qk_rope_head_dim=2,
    v_head_dim=5,
    intermediate_size=13,
    moe_intermediate_size=8,
    n_routed_experts=4,
    n_shared_experts=3,
    num_experts_per_tok=2,
)
ATTENTION = {
    "input_layernorm.weight": (12,),
    "self_attn.q_a_proj.weight": (7, 12),
    "self_attn.q_a_layernorm.weight": (7,),
    "self_attn.q_b_proj.weight": (18, 7),
    "self_attn.kv_a_proj_with_mqa.weight": (11, 12),
    "self_attn.kv_a_layernorm.weight": (9,),
    "self_attn.kv_b_proj.weight": (27, 9),
    "self_attn.o_proj.weight": (12, 15),
    "post_attention_layernorm.weight": (12,),
}
DENSE = {
    "mlp.gate_proj.weight": (13, 12),
    "mlp.up_proj.weight": (13, 12),
    "mlp.down_proj.weight": (12, 13),
}
ROUTER = {"mlp.gate.weight": (4, 12), "mlp.gate.e_score_correction_bias": (4,)}
EXPERTS = {
    f"mlp.experts.{e}.{name}.weight": shape
    for e in range(4)
    for name, shape in (("gate_proj", (8, 12)), ("up_proj", (8, 12)), ("down_proj", (12, 8)))
}
STACKED = {"mlp.experts.gate_up_proj": (4, 16, 12), "mlp.experts.down_proj": (4, 12, 8)}
SHARED = {
    "mlp.shared_experts.gate_proj.weight": (24, 12),
    "mlp.shared_experts.up_proj.weight": (24, 12),
    "mlp.shared_experts.down_proj.weight": (12, 24),
}


def layer(i, *parts):
    return {f"model.layers.{i}.{name}": shape for part in parts for name, shape in part.items()}


def model(experts):
    return {
        "model.embed_tokens.weight": (11, 12),
        **layer(0, ATTENTION, DENSE),
        **layer(1, ATTENTION, ROUTER, experts, SHARED),
        "model.norm.weight": (12,),
        "lm_head.weight": (11, 12),
    }


@pytest.mark.parametrize(("stacked", "experts"), [(False, EXPERTS), (True, STACKED)])
def test_every_tensor_with_its_shape_in_the_order_of_the_forward(stacked, experts):
    shapes = tensor_shapes(CONFIG, stacked_experts=stacked)

    assert list(model(experts).items()) == list(shapes.items())


def test_without_a_low_rank_the_queries_are_one_projection():
    shapes = tensor_shapes(CONFIG.replace(q_lora_rank=None))

    names = [name.split("self_attn.")[1] for name in shapes if "layers.1.self_attn.q" in name]
    assert ["q_proj.weight"] == names
    assert (18, 12) == shapes["model.layers.0.self_attn.q_proj.weight"]


def test_without_shared_experts_there_is_no_tensor_of_theirs():
    shapes = tensor_shapes(CONFIG.replace(n_shared_experts=0))

    assert [] == [name for name in shapes if "shared" in name]


@pytest.mark.parametrize("stacked", [False, True])
def test_the_spelling_of_the_experts_is_recognised(stacked):
    assert stacked == has_stacked_experts(tensor_shapes(CONFIG, stacked_experts=stacked))


@pytest.mark.parametrize("experts", [EXPERTS, STACKED], ids=["apart", "stacked"])
def test_a_source_that_fits_is_accepted(experts):
    shapes = {name: list(shape) for name, shape in model(experts).items()}  # as JSON holds them

    check_tensors(CONFIG, shapes)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.norm.weight",
        "model.layers.10.mlp.experts.0.up_proj.weight",
    ],
)
def test_what_the_forward_does_not_use_is_ignored(name):
    check_tensors(CONFIG, model(EXPERTS) | {name: (1, 2, 3)})


def refused(shapes):
    with pytest.raises(CheckpointError) as refusal:
        check_tensors(CONFIG, shapes)
    text = str(refusal.value)
    prefix = "the tensors do not fit the configuration; "
    assert text.startswith(prefix)
    return text.removeprefix(prefix)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.extra", "model.rotary_emb.inv_freq", "model.layers.1.self_attn.inv_freq"],
)
def test_what_nobody_knows_is_extra(name):
    assert f"1 extra: {name} [2]" == refused(model(EXPERTS) | {name: (2,)})


def test_missing_extra_and_misshapen_are_named_together():
    shapes = model(EXPERTS) | {"lm_head.bias": (11,), "model.norm.weight": (11,)}
    del shapes["model.layers.0.input_layernorm.weight"]

    expected = (
        "1 missing: model.layers.0.input_layernorm.weight [12]; 1 extra: lm_head.bias [11]; "
        "1 misshapen: model.norm.weight is [11], expected [12]"
    )
    assert expected == refused(shapes)


def test_an_empty_source_names_twenty_and_counts_the_rest():
    text = refused({})

    names = [f"{name} {list(shape)}" for name, shape in model(EXPERTS).items()]
    assert f"{len(names)} missing: {', '.join(names[:20])} and {len(names) - 20} more" == text


def test_exactly_twenty_are_all_named():
    shapes = dict(list(model(EXPERTS).items())[20:])

    text = refused(shapes)

    assert text.startswith("20 missing: ")
    assert " more" not in text


def test_a_spelling_that_changes_between_layers_is_named():
    """Stacked in one layer: then the others are expected to be."""
    config = CONFIG.replace(first_k_dense_replace=0)
    apart, together = tensor_shapes(config), tensor_shapes(config, stacked_experts=True)
    mixed = {
        name: shape
        for shapes, i in ((apart, 0), (together, 1))
        for name, shape in shapes.items()
        if f"layers.{1 - i}." not in name
    }

    with pytest.raises(CheckpointError) as refusal:
        check_tensors(config, mixed)

    text = str(refusal.value)
    missing = "2 missing: model.layers.0.mlp.experts.gate_up_proj [4, 16, 12], "
    assert missing in text
    assert "12 extra: model.layers.0.mlp.experts.0.gate_proj.weight [8, 12]" in text


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"n_routed_experts": 10**9}])
def test_counts_that_no_source_holds_are_refused_before_names_are_listed(changes):
    config = ModelConfig.tiny()

    with pytest.raises(CheckpointError, match=r"asks for at least \d+ tensors .*, the source hold"):
        check_tensors(config.replace(**changes), tensor_shapes(config))
