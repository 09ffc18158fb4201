"""A checkpoint in any spelling and precision gives the same equations; a wrong one is named."""

from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import CheckpointError
from kdtr.kdtr_format import write_checkpoint
from kdtr.reference import make_engine
from kdtr.reference.weights import read_weights

PREFIX = "the tensors do not fit the configuration; "


def hf_config(config):
    values = asdict(config)
    assert values.pop("yarn") is None
    return {"model_type": "deepseek_v3", **values}


def stacked(config, tensors):
    """transformers 5: gate rows, then up rows, of all experts in one tensor."""
    merged = dict(tensors)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        if config.is_dense(layer):
            continue
        parts = {
            part: np.stack(
                [
                    merged.pop(f"{prefix}{e}.{part}_proj.weight")
                    for e in range(config.n_routed_experts)
                ]
            )
            for part in ("gate", "up", "down")
        }
        merged[prefix + "gate_up_proj"] = np.concatenate([parts["gate"], parts["up"]], axis=1)
        merged[prefix + "down_proj"] = parts["down"]
    return merged


def logits(source, tokens=(3, 1, 4, 1, 5, 9)):
    session = make_engine().load(source).open(max_len=16)
    n = len(tokens)
    return session.forward_tokens(tokens, np.arange(n), np.tri(n, dtype=bool))


def test_stacked_and_per_expert_spellings_give_the_same_bits(small, draw_tensors):
    tensors = draw_tensors(small, 1)

    apart, together = logits((small, tensors)), logits((small, stacked(small, tensors)))

    np.testing.assert_array_equal(apart, together)


@pytest.mark.parametrize("low_rank", [None, 14])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_directory_gives_the_bits_of_its_tensors_in_float64(
    low_rank, dtype, tmp_path, small, draw_tensors
):
    config = small.replace(q_lora_rank=low_rank)
    tensors = {name: x.astype(dtype) for name, x in draw_tensors(config, 2).items()}
    write_checkpoint(tmp_path, hf_config(config), tensors)

    model = make_engine().load(tmp_path)

    wide = {name: x.astype(np.float64) for name, x in tensors.items()}
    assert config == model.config
    np.testing.assert_array_equal(logits((config, wide)), logits(tmp_path))
    assert np.float64 == model.weights.embedding.dtype


def test_shards_give_the_bits_of_one_file(tmp_path, small, draw_tensors):
    tensors = stacked(small, draw_tensors(small, 3))
    write_checkpoint(tmp_path, hf_config(small), tensors, max_shard_bytes=4000)

    found = logits(tmp_path)

    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    np.testing.assert_array_equal(logits((small, tensors)), found)


def test_kv_b_rows_are_keys_then_values_in_each_head(small, draw_tensors):
    """Row 1 of head 2: a key row comes out in w_kc, the row after all keys in w_vc."""
    tensors = draw_tensors(small, 4)
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    d, v = small.qk_nope_head_dim, small.v_head_dim

    attention = make_engine().load((small, tensors)).weights.layers[0].attention

    head = tensors[name][2 * (d + v) : 3 * (d + v)]
    np.testing.assert_array_equal(attention.w_kc[2, 1], head[1])
    np.testing.assert_array_equal(attention.w_vc[2, :, 0], head[d])
    assert (3, 6, 10) == attention.w_kc.shape
    assert (3, 10, 5) == attention.w_vc.shape


def test_no_shared_expert_is_none(small, draw_tensors):
    config = small.replace(n_shared_experts=0)

    weights = make_engine().load((config, draw_tensors(config, 5))).weights

    assert weights.layers[1].mlp.shared is None


def test_tokens_prediction_layers_and_rotary_buffers_are_ignored(small, draw_tensors):
    tensors = draw_tensors(small, 6)
    more = tensors | {
        "model.layers.2.eh_proj.weight": np.zeros((2, 3)),  # the first layer past the last
        "model.layers.61.mlp.gate.weight": np.full((4, 4), np.nan),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(7),
    }

    np.testing.assert_array_equal(logits((small, tensors)), logits((small, more)))


def without(name):
    return lambda tensors: tensors.pop(name)


def with_(name, shape):
    return lambda tensors: tensors.update({name: np.zeros(shape)})


FAULTS = {
    "missing": (
        without("model.layers.1.self_attn.q_a_layernorm.weight"),
        "1 missing: model.layers.1.self_attn.q_a_layernorm.weight [14]",
    ),
    "extra": (
        with_("model.layers.1.mlp.gate.bias", (12,)),
        "1 extra: model.layers.1.mlp.gate.bias [12]",
    ),
    "extra at the top": (with_("lm_head.bias", (23,)), "1 extra: lm_head.bias [23]"),
    "misshapen": (
        with_("model.embed_tokens.weight", (20, 23)),
        "1 misshapen: model.embed_tokens.weight is [20, 23], expected [23, 20]",
    ),
    "a buffer of a layer's own name": (
        with_("model.layers.0.self_attn.inv_freq", (2,)),
        "1 extra: model.layers.0.self_attn.inv_freq [2]",
    ),
    "q_proj beside the low rank": (
        with_("model.layers.0.self_attn.q_proj.weight", (30, 20)),
        "1 extra: model.layers.0.self_attn.q_proj.weight [30, 20]",
    ),
    "all three": (
        lambda tensors: (
            tensors.pop("model.norm.weight"),
            tensors.pop("lm_head.weight"),
            tensors.update(
                {"a": np.zeros(()), "model.layers.0.input_layernorm.weight": np.zeros(3)}
            ),
        ),
        "2 missing: model.norm.weight [20], lm_head.weight [23, 20]; 1 extra: a []; "
        "1 misshapen: model.layers.0.input_layernorm.weight is [3], expected [20]",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named(name, small, draw_tensors):
    break_, text = FAULTS[name]
    tensors = draw_tensors(small, 7)
    break_(tensors)

    with pytest.raises(CheckpointError) as refusal:
        make_engine().load((small, tensors))

    assert PREFIX + text == str(refusal.value)


def test_more_than_twenty_faults_are_counted(small, draw_tensors):
    tensors = draw_tensors(small, 8)
    dropped = [name for name in tensors if ".experts." in name]
    for name in dropped:
        del tensors[name]

    with pytest.raises(CheckpointError) as refusal:
        make_engine().load((small, tensors))

    shown = ", ".join(f"{name} {[20, 7] if 'down' in name else [7, 20]}" for name in dropped[:20])
    assert 36 == len(dropped)
    assert f"{PREFIX}36 missing: {shown} and 16 more" == str(refusal.value)


def test_faults_of_a_directory_are_named_before_a_tensor_is_read(tmp_path, small, draw_tensors):
    tensors = draw_tensors(small, 9)
    del tensors["model.norm.weight"]
    write_checkpoint(tmp_path, hf_config(small), tensors)

    with pytest.raises(CheckpointError) as refusal:
        make_engine().load(tmp_path)

    assert f"{PREFIX}1 missing: model.norm.weight [20]" == str(refusal.value)


def test_the_shapes_are_checked_before_a_tensor_is_read(small):
    class Unreadable(dict):
        def __getitem__(self, name):
            raise AssertionError(f"{name} was read")

    with pytest.raises(CheckpointError):
        read_weights(small, Unreadable(), {"model.norm.weight": (20,)})
