from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import CheckpointError, ModelConfig
from kdtr.engine.checkpoint_weights import prepare_weights
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.weights import ModelWeights, MoeWeights
from kdtr.kdtr_format import open_model

Tensors = dict[str, np.ndarray]
ATTENTION = "model.layers.1.self_attn."


def prepare(config: ModelConfig, tensors: Tensors, dtype: str = "float32") -> ModelWeights:
    kernels = HostKernels() if dtype == "float32" else RoundedKernels(HostKernels(), dtype)
    return prepare_weights(open_model((config, tensors)), kernels)


def per_expert(tensors: Tensors) -> Tensors:
    """The same checkpoint in the spelling of released ones."""
    spelled: Tensors = {}
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for e, gate_up in enumerate(tensor):
                gate, up = np.split(gate_up, 2)
                spelled[f"{prefix}.{e}.gate_proj.weight"] = gate
                spelled[f"{prefix}.{e}.up_proj.weight"] = up
        elif prefix.endswith("experts") and last == "down_proj":
            for e, down in enumerate(tensor):
                spelled[f"{prefix}.{e}.down_proj.weight"] = down
        else:
            spelled[name] = tensor
    return spelled


def test_both_spellings_of_the_experts_are_one_model(
    small: ModelConfig, small_weights: Tensors
) -> None:
    stacked = prepare(small, small_weights).layers[1].mlp
    single = prepare(small, per_expert(small_weights)).layers[1].mlp

    assert isinstance(stacked, MoeWeights)
    assert isinstance(single, MoeWeights)
    assert np.array_equal(stacked.gate_up, single.gate_up)
    assert np.array_equal(stacked.down, single.down)


def test_kv_b_splits_into_key_and_value_projections(
    small: ModelConfig, small_weights: Tensors
) -> None:
    """Head by head d nope rows, then v value rows (MLA-3)."""
    attention = prepare(small, small_weights).layers[1].attention

    rows = small_weights[ATTENTION + "kv_b_proj.weight"]
    for head in range(3):
        nope, value = np.split(rows[head * 12 : head * 12 + 12], [7])
        assert np.array_equal(nope, attention.w_kc[head].T)  # [d, c]
        assert np.array_equal(value, attention.w_vc[head])  # [v, c]


@pytest.mark.parametrize(
    ("interleave", "order"), [(True, [0, 2, 4, 1, 3, 5]), (False, [0, 1, 2, 3, 4, 5])]
)
def test_rope_rows_are_half_split_after_loading(
    small: ModelConfig, small_weights: Tensors, interleave: bool, order: list[int]
) -> None:
    """MLA-7, in every head of the queries and in the one head of the keys."""
    config = small.replace(rope_interleave=interleave)

    attention = prepare(config, small_weights).layers[1].attention

    queries = small_weights[ATTENTION + "q_b_proj.weight"].reshape(3, 13, 11)
    expected = np.concatenate([queries[:, :7], queries[:, 7:][:, order]], axis=1)
    assert np.array_equal(expected.reshape(39, 11), attention.q_b)
    keys = small_weights[ATTENTION + "kv_a_proj_with_mqa.weight"]
    assert np.array_equal(np.concatenate([keys[:10], keys[10:][order]]), attention.qkv_a[11:])


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_every_readable_dtype_becomes_float32(
    small: ModelConfig, small_weights: Tensors, dtype: Any
) -> None:
    stored = {name: tensor.astype(dtype) for name, tensor in small_weights.items()}

    weights = prepare(small, stored)

    assert np.float32 == weights.embedding.dtype
    embedding = stored["model.embed_tokens.weight"].astype(np.float32)
    assert np.array_equal(embedding, weights.embedding)


def test_weights_are_rounded_to_the_storage_dtype(
    small: ModelConfig, small_weights: Tensors
) -> None:
    weights = prepare(small, small_weights, "bfloat16")

    head = small_weights["lm_head.weight"].astype(ml_dtypes.bfloat16)
    assert np.float32 == weights.lm_head.dtype
    assert np.array_equal(head.astype(np.float32), weights.lm_head)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_correction_bias_stays_float32(
    small: ModelConfig, small_weights: Tensors, dtype: str
) -> None:
    moe = prepare(small, small_weights, dtype).layers[1].mlp

    assert isinstance(moe, MoeWeights)
    bias = small_weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert np.array_equal(bias, moe.correction_bias)


def test_a_weight_beyond_float16_is_refused_by_element(
    small: ModelConfig, small_weights: Tensors
) -> None:
    tensor = small_weights["lm_head.weight"].copy()
    tensor[2, 1] = 65520

    with pytest.raises(CheckpointError) as refusal:
        prepare(small, {**small_weights, "lm_head.weight": tensor}, "float16")

    assert (
        "lm_head.weight[2, 1] = 65520.0, one of 1; expected numbers that are finite in float16"
    ) == str(refusal.value)


def test_quantised_weights_are_refused_by_name(small: ModelConfig, small_weights: Tensors) -> None:
    codes = np.zeros((37, 20), np.int8)

    with pytest.raises(CheckpointError) as refusal:
        prepare(small, {**small_weights, "lm_head.weight": codes})

    assert str(refusal.value) == (
        "lm_head.weight has dtype int8; expected one of float64, float32, float16, bfloat16: "
        "convert quantised weights first"
    )


def test_missing_and_extra_tensors_are_refused(small: ModelConfig, small_weights: Tensors) -> None:
    tensors = {**small_weights, "bias": np.zeros(1, np.float32)}
    del tensors["model.norm.weight"]

    with pytest.raises(CheckpointError, match=r"missing: model\.norm\.weight.*extra: bias"):
        prepare(small, tensors)


def test_the_source_may_change_after_loading(small: ModelConfig, small_weights: Tensors) -> None:
    """Arrays of a mapped file go away with it: nothing of the source is kept."""
    tensors = {name: tensor.copy() for name, tensor in small_weights.items()}
    weights = prepare(small, tensors)

    for tensor in tensors.values():
        tensor[...] = np.nan

    assert np.array_equal(small_weights["lm_head.weight"], weights.lm_head)
    assert np.array_equal(small_weights[ATTENTION + "o_proj.weight"], weights.layers[1].attention.o)


@pytest.mark.parametrize(
    ("number", "dtype", "text"),
    [
        (np.nan, np.float32, "nan"),
        (-np.inf, np.float16, "-inf"),
        (1e300, np.float64, "1e+300"),
    ],
)
def test_numbers_that_are_not_finite_in_float32_are_refused_by_element(
    small: ModelConfig, small_weights: Tensors, number: float, dtype: Any, text: str
) -> None:
    tensor = small_weights["lm_head.weight"].astype(dtype)
    tensor[2, 1] = tensor[3, 0] = number

    with pytest.raises(CheckpointError) as refusal:
        prepare(small, {**small_weights, "lm_head.weight": tensor})

    assert (
        f"lm_head.weight[2, 1] = {text}, one of 2; expected numbers that are finite in float32"
    ) == str(refusal.value)
