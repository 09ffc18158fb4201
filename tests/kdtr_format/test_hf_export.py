"""An exported directory is the model: the same tensors, bit for bit, and the same configuration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import CheckpointError, ModelConfig, Yarn, tensor_shapes
from kdtr.contract.hf_config_writer import unknown_to_transformers, write_hf_config
from kdtr.kdtr_format import (
    config_tensors,
    export_checkpoint,
    open_model,
    read_checkpoint,
    write_bundle,
)

SMALL = ModelConfig.kimi_k2(
    vocab_size=19,
    hidden_size=12,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=7,
    kv_lora_rank=6,
    qk_nope_head_dim=4,
    qk_rope_head_dim=8,
    v_head_dim=5,
    intermediate_size=9,
    moe_intermediate_size=3,
    n_routed_experts=4,
    num_experts_per_tok=2,
)
YARN = SMALL.yarn
assert YARN is not None
YARNS = [
    Yarn(factor=f, original_max_position_embeddings=64, **keys)
    for f in (1.0, 2.5)
    for keys in (
        {},
        {"mscale": 0.707},
        {"mscale_all_dim": 0.707},
        {"mscale": 1.0, "mscale_all_dim": 0.707},
        {"mscale": 0.0, "mscale_all_dim": 0.0},
        {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 0.3},
        {"beta_fast": 17.5, "beta_slow": 0.3},
    )
]
CONFIGS = [
    ModelConfig.tiny(),
    ModelConfig.kimi_k2(),
    SMALL,
    SMALL.replace(yarn=None, q_lora_rank=None),
    SMALL.replace(rope_interleave=False, scoring_func="softmax", norm_topk_prob=False),
    SMALL.replace(latent_norm_eps=3.3e-5, n_shared_experts=0, first_k_dense_replace=0),
    *(SMALL.replace(yarn=yarn) for yarn in YARNS),
]


def weights(config: ModelConfig = SMALL, dtype: type = ml_dtypes.bfloat16) -> dict:
    return {name: a.astype(dtype) for name, a in seed_tensors(config, 3).items()}


def same(expected: dict, found: dict) -> None:
    assert sorted(expected) == sorted(found)
    for name, array in expected.items():
        assert array.dtype == found[name].dtype, name
        assert array.shape == found[name].shape, name
        assert array.tobytes() == found[name].tobytes(), name


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("config", CONFIGS)
def test_a_configuration_comes_back_exactly_through_json(config: ModelConfig) -> None:
    written = json.loads(json.dumps(write_hf_config(config), allow_nan=False))

    assert config == ModelConfig.from_hf(written)


def test_the_spelling_is_the_one_of_released_files() -> None:
    written = write_hf_config(SMALL)

    assert "deepseek_v3" == written["model_type"]
    assert ["DeepseekV3ForCausalLM"] == written["architectures"]
    assert 50000.0 == written["rope_theta"]
    assert 3 == written["num_key_value_heads"]
    assert {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    } == written["rope_scaling"]
    assert "yarn" not in written


def test_what_transformers_does_not_know_is_named() -> None:
    odd = SMALL.replace(scoring_func="softmax", latent_norm_eps=1e-5, n_shared_experts=0)

    assert {} == unknown_to_transformers(SMALL)
    assert {
        "scoring_func": "scoring_func = 'softmax'; transformers always uses 'sigmoid'",
        "latent_norm_eps": "latent_norm_eps = 1e-05; transformers always uses 1e-06",
        "n_shared_experts": "n_shared_experts = 0; transformers makes shared experts of width 0, "
        "whose tensors no checkpoint holds",
    } == unknown_to_transformers(odd)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_are_bit_identical_for_both_readers(tmp_path: Path, dtype: type) -> None:
    tensors = weights(dtype=dtype)
    tensors["model.norm.weight"] = np.array([np.nan, -0.0, np.inf, *range(9)]).astype(dtype)

    assert [] == export_checkpoint((SMALL, tensors), tmp_path / "new")

    same(tensors, load_file(tmp_path / "new" / "model.safetensors"))
    same(tensors, dict(read_checkpoint(tmp_path / "new").tensors))
    assert SMALL == open_model(tmp_path / "new").config


def test_equal_models_give_equal_bytes_in_any_order_and_from_any_source(tmp_path: Path) -> None:
    tensors = weights()
    bundle = tmp_path / "model.kdtr"
    stored = {f"weights/{name}": tensor for name, tensor in tensors.items()}
    write_bundle(bundle, {**config_tensors(SMALL), **stored}, {})

    export_checkpoint((SMALL, dict(reversed(tensors.items()))), tmp_path / "1")
    export_checkpoint(bundle, tmp_path / "2")
    export_checkpoint(tmp_path / "1", tmp_path / "3")

    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "3")
    header = (tmp_path / "1" / "model.safetensors").read_bytes()[8:40]
    assert b"__metadata__" not in header


def test_experts_are_stacked_and_unstacked_without_a_change(tmp_path: Path) -> None:
    tensors = weights()

    export_checkpoint((SMALL, tensors), tmp_path / "stacked", stacked=True)
    export_checkpoint(tmp_path / "stacked", tmp_path / "again", stacked=True)
    export_checkpoint(tmp_path / "stacked", tmp_path / "single")

    stacked = read_checkpoint(tmp_path / "stacked")
    assert tensor_shapes(SMALL, stacked_experts=True) == dict(stacked.shapes)
    experts = "model.layers.1.mlp.experts."
    gate_up = stacked.tensors[experts + "gate_up_proj"]
    np.testing.assert_array_equal(tensors[experts + "2.gate_proj.weight"], gate_up[2, :3])
    np.testing.assert_array_equal(tensors[experts + "2.up_proj.weight"], gate_up[2, 3:])
    same(tensors, dict(read_checkpoint(tmp_path / "single").tensors))
    assert contents(tmp_path / "stacked") == contents(tmp_path / "again")


def test_a_conversion_that_is_exact_needs_no_permission(tmp_path: Path) -> None:
    export_checkpoint((SMALL, weights()), tmp_path / "f32", dtype="float32")
    export_checkpoint(tmp_path / "f32", tmp_path / "bf16", dtype="bfloat16")

    same(weights(dtype=np.float32), dict(read_checkpoint(tmp_path / "f32").tensors))
    same(weights(), dict(read_checkpoint(tmp_path / "bf16").tensors))


def test_a_conversion_that_rounds_needs_permission(tmp_path: Path) -> None:
    tensors = weights(dtype=np.float32)
    tensors["model.norm.weight"][2:4] = 1.001, np.nan

    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint((SMALL, tensors), tmp_path / "bf16", dtype="bfloat16")
    refused = list(tmp_path.iterdir())
    export_checkpoint((SMALL, tensors), tmp_path / "bf16", dtype="bfloat16", rounding=True)

    assert (
        "tensor 'model.norm.weight': 1 of 12 values are not exact in bfloat16, "
        "at [2] 1.0010000467300415 -> 1.0; choose another dtype, or allow rounding (--round)"
    ) == str(refusal.value)
    assert [] == refused
    rounded = read_checkpoint(tmp_path / "bf16").tensors["model.norm.weight"]
    assert 1.0 == float(rounded[2])
    assert np.isnan(float(rounded[3]))


def test_overflow_is_no_rounding(tmp_path: Path) -> None:
    tensors = weights(dtype=np.float32)
    tensors["model.norm.weight"][1] = 1e6

    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint((SMALL, tensors), tmp_path / "f16", dtype="float16", rounding=True)

    assert (
        "tensor 'model.norm.weight': at [1] 1000000.0 -> inf exceeds float16; "
        "expected another dtype"
    ) == str(refusal.value)


def test_what_no_forward_uses_is_left_out_and_said(tmp_path: Path) -> None:
    extra = {
        f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32) for n in range(2)
    }
    extra |= {f"model.layers.2.{name}": np.zeros(1, np.float32) for name in ("eh_proj", "enorm")}

    notes = export_checkpoint((SMALL, {**weights(), **extra}), tmp_path / "c")

    assert sorted(weights()) == sorted(read_checkpoint(tmp_path / "c").shapes)
    assert [
        "left out, no forward uses them: 4 tensors "
        "(model.layers.0.self_attn.rotary_emb.inv_freq, "
        "model.layers.1.self_attn.rotary_emb.inv_freq, model.layers.2.eh_proj, ...)"
    ] == notes


def test_notes_name_what_only_kdtr_reads(tmp_path: Path) -> None:
    odd = SMALL.replace(scoring_func="softmax")

    notes = export_checkpoint((odd, weights()), tmp_path / "c")

    assert ["only kdtr reads scoring_func = 'softmax'; transformers always uses 'sigmoid'"] == notes
    assert odd == open_model(tmp_path / "c").config


def test_a_large_model_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdtr.kdtr_format.hf_export._SHARD_BYTES", 2000)

    export_checkpoint((SMALL, weights()), tmp_path / "c")

    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    same(weights(), dict(read_checkpoint(tmp_path / "c").tensors))


def test_a_checkpoint_replaces_a_checkpoint_of_any_layout_and_an_empty_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with monkeypatch.context() as small_shards:
        small_shards.setattr("kdtr.kdtr_format.hf_export._SHARD_BYTES", 2000)
        export_checkpoint((SMALL, weights()), tmp_path / "c")

    export_checkpoint(tmp_path / "c", tmp_path / "link", dtype="float32")

    assert ["config.json", "model.safetensors"] == sorted(contents(tmp_path / "c"))
    same(weights(dtype=np.float32), dict(read_checkpoint(tmp_path / "c").tensors))
    assert ["c", "link"] == sorted(path.name for path in tmp_path.iterdir())
    modes = {path.stat().st_mode for path in (tmp_path / "c").iterdir()}
    assert 1 == len(modes)


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    export_checkpoint((SMALL, weights()), tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").write_text("{}")
    before = contents(tmp_path / "c")

    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint((SMALL, weights(dtype=np.float32)), tmp_path / "c")

    assert (
        f"{tmp_path}/c holds tokenizer.json, which this export would not replace; "
        "remove them or choose another directory"
    ) == str(refusal.value)
    assert before == contents(tmp_path / "c")
    assert ["c"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model.norm.weight": None}, "the tensors do not fit the configuration; 1 missing"),
        (
            {"model.norm.weight": np.zeros(12)},
            "tensor 'model.norm.weight' has dtype float64; expected float32, bfloat16, float16: "
            "convert it first",
        ),
    ],
)
def test_a_wrong_source_is_refused_and_nothing_is_written(
    tmp_path: Path, change: dict, text: str
) -> None:
    tensors = {name: a for name, a in {**weights(), **change}.items() if a is not None}

    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint((SMALL, tensors), tmp_path / "c")

    assert str(refusal.value).startswith(text)
    assert [] == list(tmp_path.iterdir())


def test_a_failure_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    export_checkpoint((SMALL, weights()), tmp_path / "c")
    before = contents(tmp_path / "c")

    class Failing(dict):
        asked = 0

        def __getitem__(self, name):
            self.asked += 1
            if self.asked > 2 * len(self) + 5:
                raise RuntimeError("disk on fire")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="disk on fire"):
        export_checkpoint((SMALL, Failing(weights(dtype=np.float32))), tmp_path / "c")

    assert before == contents(tmp_path / "c")
    assert ["c"] == [path.name for path in tmp_path.iterdir()]


def test_a_failed_rename_puts_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_checkpoint((SMALL, weights()), tmp_path / "c")
    before = contents(tmp_path / "c")
    rename, renamed = Path.replace, []

    def failing(path: Path, target: Path) -> Path:
        # the first rename of a directory puts the old one aside, the second is the new one's
        renamed.extend([path] if path.is_dir() else [])
        if path.is_dir() and len(renamed) == 2:
            raise OSError("no space")
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(CheckpointError, match="c cannot be written: no space"):
        export_checkpoint((SMALL, weights(dtype=np.float32)), tmp_path / "c")

    assert before == contents(tmp_path / "c")
    assert ["c"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("file", "file is a file; expected a directory, or a path ending in .gguf"),
        ("file/c", "file/c cannot be written: "),
        ("nowhere/c", "nowhere/c cannot be written: "),
        ("a\0b", "a\\x00b' is no path: "),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, target: str, text: str) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(CheckpointError) as refusal:
        export_checkpoint((SMALL, weights()), f"{tmp_path}/{target}")

    assert text in str(refusal.value)
    assert "mine" == (tmp_path / "file").read_text()


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="dtype 'int8'; expected float32, bfloat16, float16"):
        export_checkpoint((SMALL, weights()), tmp_path / "c", dtype="int8")


def test_the_layout_of_replaced_yarn_fields_is_complete() -> None:
    """Every field of Yarn, set, is a key: one that is added later cannot be forgotten."""
    full = replace(YARN, attention_factor=0.5)

    written = write_hf_config(SMALL.replace(yarn=full))["rope_scaling"]

    assert set(Yarn.__dataclass_fields__) == set(written) - {"type", "rope_type"}
