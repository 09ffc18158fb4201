"""An exported GGUF file holds the model: read back alone, it computes the same bits.

The way back is written here, from llama.cpp's side: what its graph of deepseek2 does with a tensor
says what the tensor must be in ours. It shares nothing with the export.
"""

from __future__ import annotations

import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import CheckpointError, ModelConfig, UnsupportedError, Yarn
from kdtr.kdtr_format import export_checkpoint, export_gguf
from kdtr.kdtr_format.gguf_losses import LOSSES, gguf_losses
from kdtr.reference import make_engine

BF16 = np.dtype(ml_dtypes.bfloat16)
YARN = Yarn(factor=4.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
# No two sizes are equal; eps is one for all norms, as GGUF has it.
SMALL = ModelConfig(
    vocab_size=37,
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=11,
    kv_lora_rank=10,
    qk_nope_head_dim=7,
    qk_rope_head_dim=8,
    v_head_dim=5,
    intermediate_size=24,
    first_k_dense_replace=1,
    moe_intermediate_size=9,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    rms_norm_eps=3e-5,
    max_position_embeddings=60,
    rope_theta=500.0,
    latent_norm_eps=3e-5,
)
MODELS = {
    "plain": SMALL,
    "yarn": SMALL.replace(yarn=YARN),
    "yarn of factor 1": SMALL.replace(yarn=Yarn(factor=1.0, original_max_position_embeddings=9)),
    "no q_lora": SMALL.replace(q_lora_rank=None),
    "half-split": SMALL.replace(rope_interleave=False),
    "half-split, no q_lora": SMALL.replace(rope_interleave=False, q_lora_rank=None, yarn=YARN),
    "softmax": SMALL.replace(scoring_func="softmax", norm_topk_prob=False),
    "all groups": SMALL.replace(topk_group=4),
    "all dense": SMALL.replace(first_k_dense_replace=2),
    "no dense": SMALL.replace(first_k_dense_replace=0),
}
TOKENS = [5, 0, 36, 5, 17, 2]


def weights(config: ModelConfig = SMALL, dtype: Any = BF16) -> dict[str, np.ndarray]:
    return {name: array.astype(dtype) for name, array in seed_tensors(config, 5).items()}


class File:
    """A GGUF file's keys and tensors, the latter as [out, in] in their own dtype."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys = {name: field.contents() for name, field in reader.fields.items()}
        self.tensors = {}
        for tensor in reader.tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            data = np.array(tensor.data)
            if tensor.tensor_type == gguf.GGMLQuantizationType.BF16:
                data = data.view(BF16)
            assert shape == data.shape
            self.tensors[tensor.name] = data

    def __getitem__(self, key: str) -> Any:
        return self.keys["deepseek2." + key]

    def number(self, key: str) -> float:
        """A float32 key as the shortest decimal that names it."""
        return float(str(np.float32(self[key])))

    def config(self) -> ModelConfig:
        """What llama.cpp would compute, in our fields; always pairs (2i, 2i+1)."""
        yarn = None
        rope = "rope.scaling."
        if self[rope + "type"] == "yarn":
            log_mul = self.keys.get(f"deepseek2.{rope}yarn_log_multiplier")
            m = None if log_mul is None else float(10 * Decimal(str(np.float32(log_mul))))
            yarn = Yarn(
                factor=self.number(rope + "factor"),
                original_max_position_embeddings=self[rope + "original_context_length"],
                mscale=m,
                mscale_all_dim=m,
            )
        else:
            assert "none" == self[rope + "type"]
        r = self["rope.dimension_count"]
        assert 1 == self["attention.head_count_kv"]
        assert self["attention.kv_lora_rank"] == self["attention.value_length"]
        assert self["attention.kv_lora_rank"] + r == self["attention.key_length"]
        return ModelConfig(
            vocab_size=self["vocab_size"],
            hidden_size=self["embedding_length"],
            num_hidden_layers=self["block_count"],
            num_attention_heads=self["attention.head_count"],
            q_lora_rank=self["attention.q_lora_rank"] or None,
            kv_lora_rank=self["attention.kv_lora_rank"],
            qk_nope_head_dim=self["attention.key_length_mla"] - r,
            qk_rope_head_dim=r,
            v_head_dim=self["attention.value_length_mla"],
            intermediate_size=self["feed_forward_length"],
            first_k_dense_replace=self["leading_dense_block_count"],
            moe_intermediate_size=self["expert_feed_forward_length"],
            n_routed_experts=self["expert_count"],
            n_shared_experts=self["expert_shared_count"],
            num_experts_per_tok=self["expert_used_count"],
            n_group=self["expert_group_count"],
            topk_group=self["expert_group_used_count"],
            scoring_func={1: "softmax", 2: "sigmoid"}[self["expert_gating_func"]],
            norm_topk_prob=self["expert_weights_norm"],
            routed_scaling_factor=self.number("expert_weights_scale"),
            rms_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            latent_norm_eps=self.number("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=self["context_length"],
            rope_theta=self.number("rope.freq_base"),
            rope_interleave=True,
            yarn=yarn,
        )

    def checkpoint(self) -> dict[str, np.ndarray]:
        """The tensors under our names; every one of the file's is used."""
        waiting = dict(self.tensors)
        found = {
            "model.embed_tokens.weight": waiting.pop("token_embd.weight"),
            "model.norm.weight": waiting.pop("output_norm.weight"),
            "lm_head.weight": waiting.pop("output.weight"),
        }
        for name in list(waiting):
            block, layer, part = name.split(".", 2)
            assert "blk" == block
            found |= self._layer(f"model.layers.{layer}.", part, waiting.pop(name), layer)
        assert not waiting
        return found

    def _layer(self, ours: str, part: str, w: np.ndarray, layer: str) -> dict[str, np.ndarray]:
        attention, mlp = ours + "self_attn.", ours + "mlp."
        if part.endswith("_exps.weight"):
            projection = part.split("_")[1]
            return {f"{mlp}experts.{e}.{projection}_proj.weight": w[e] for e in range(len(w))}
        if part == "attn_k_b.weight":  # scores: k_b takes q_nope [h, d] to the latent [h, c]
            v_b = self.tensors[f"blk.{layer}.attn_v_b.weight"]
            rows = [row for h in range(len(w)) for row in (w[h].T, v_b[h])]
            return {attention + "kv_b_proj.weight": np.concatenate(rows)}
        if part == "attn_v_b.weight":
            return {}
        name = {
            "attn_norm": ours + "input_layernorm",
            "ffn_norm": ours + "post_attention_layernorm",
            "attn_q": attention + "q_proj",
            "attn_q_a": attention + "q_a_proj",
            "attn_q_a_norm": attention + "q_a_layernorm",
            "attn_q_b": attention + "q_b_proj",
            "attn_kv_a_mqa": attention + "kv_a_proj_with_mqa",
            "attn_kv_a_norm": attention + "kv_a_layernorm",
            "attn_output": attention + "o_proj",
            "ffn_gate_inp": mlp + "gate",
            "exp_probs_b": mlp + "gate.e_score_correction_bias",
            "ffn_gate": mlp + "gate_proj",
            "ffn_up": mlp + "up_proj",
            "ffn_down": mlp + "down_proj",
            "ffn_gate_shexp": mlp + "shared_experts.gate_proj",
            "ffn_up_shexp": mlp + "shared_experts.up_proj",
            "ffn_down_shexp": mlp + "shared_experts.down_proj",
        }[part.rpartition(".")[0]]
        if part == "exp_probs_b.bias":
            return {name: w}
        return {name + ".weight": w}


def logits(config: ModelConfig, tensors: dict[str, np.ndarray]) -> np.ndarray:
    session = make_engine().load((config, tensors)).open(max_len=16)
    n = len(TOKENS)
    return np.array(session.forward_tokens(TOKENS, np.arange(n), np.tri(n, dtype=bool)))


@pytest.mark.parametrize("name", MODELS)
def test_the_file_alone_computes_the_same_bits(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    tensors = weights(config)

    notes = export_gguf((config, tensors), tmp_path / "m.gguf")

    file = File(tmp_path / "m.gguf")
    assert [] == notes
    back = file.config()
    changed = {"rope_interleave": True}
    if config.topk_group == config.n_group:
        changed |= {"n_group": 1, "topk_group": 1}
    if name == "yarn of factor 1":
        assert config.replace(yarn=None, **changed) == back.replace(yarn=None)
    else:
        assert config.replace(**changed) == back
    expected = logits(config, tensors)
    assert expected.tobytes() == logits(back, file.checkpoint()).tobytes()
    assert len(set(expected.argmax(axis=-1).tolist())) > 1


def test_interleaved_rows_are_the_models_own_bits(tmp_path: Path) -> None:
    tensors = weights()

    export_gguf((SMALL, tensors), tmp_path / "m.gguf")

    back = File(tmp_path / "m.gguf").checkpoint()
    assert sorted(tensors) == sorted(back)
    for name, array in tensors.items():
        kept = array.astype(back[name].dtype)
        assert kept.tobytes() == back[name].tobytes(), name


def test_half_split_rows_alternate(tmp_path: Path) -> None:
    config = SMALL.replace(rope_interleave=False)
    tensors = weights(config)

    export_gguf((config, tensors), tmp_path / "m.gguf")

    rows = tensors["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"]
    order = [*range(10), 10, 14, 11, 15, 12, 16, 13, 17]
    written = File(tmp_path / "m.gguf").tensors["blk.0.attn_kv_a_mqa.weight"]
    assert rows[order].tobytes() == written.tobytes()
    rows = tensors["model.layers.0.self_attn.q_b_proj.weight"][15:30]  # the second head
    order = [*range(7), 7, 11, 8, 12, 9, 13, 10, 14]
    written = File(tmp_path / "m.gguf").tensors["blk.0.attn_q_b.weight"][15:30]
    assert rows[order].tobytes() == written.tobytes()


def test_keys_and_shapes_that_the_way_back_does_not_need(tmp_path: Path) -> None:
    config = SMALL.replace(yarn=YARN)

    export_gguf((config, weights(config)), tmp_path / "m.gguf")

    file = File(tmp_path / "m.gguf")
    assert "deepseek2" == file.keys["general.architecture"]
    assert "model" == file.keys["general.type"]
    assert "none" == file.keys["tokenizer.ggml.model"]
    assert gguf.LlamaFileType.MOSTLY_BF16 == file.keys["general.file_type"]
    assert np.float32(0.1 * 0.707) == np.float32(file["rope.scaling.yarn_log_multiplier"])
    assert (32.0, 1.0) == (file["rope.scaling.yarn_beta_fast"], file["rope.scaling.yarn_beta_slow"])
    assert (3, 10, 7) == file.tensors["blk.0.attn_k_b.weight"].shape
    assert (3, 5, 10) == file.tensors["blk.0.attn_v_b.weight"].shape
    assert (8, 9, 20) == file.tensors["blk.1.ffn_gate_exps.weight"].shape
    assert (8, 20, 9) == file.tensors["blk.1.ffn_down_exps.weight"].shape
    assert (18, 20) == file.tensors["blk.1.ffn_up_shexp.weight"].shape


@pytest.mark.parametrize("name", ["plain", "no q_lora"])
def test_every_tensor_is_one_that_the_package_knows_for_deepseek2(
    name: str, tmp_path: Path
) -> None:
    known = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.DEEPSEEK2]}

    export_gguf((MODELS[name], weights(MODELS[name])), tmp_path / "m.gguf")

    written = {tensor.rpartition(".")[0] for tensor in File(tmp_path / "m.gguf").tensors}
    assert written <= {form.format(bid=layer) for form in known for layer in range(2)}


@pytest.mark.parametrize(
    ("dtype", "matrix", "file_type"),
    [(None, BF16, 32), ("float32", np.float32, 0), ("float16", np.float16, 1)],
)
def test_matrices_get_the_dtype_and_the_rest_is_float32(
    tmp_path: Path, dtype: str | None, matrix: Any, file_type: int
) -> None:
    tensors = weights()

    export_gguf((SMALL, tensors), tmp_path / "m.gguf", dtype=dtype)

    file = File(tmp_path / "m.gguf")
    assert file_type == file.keys["general.file_type"]
    for name, array in file.tensors.items():
        kept = array.ndim == 1 or "gate_inp" in name
        assert (np.float32 if kept else matrix) == array.dtype, name
    assert logits(SMALL, tensors).tobytes() == logits(SMALL, file.checkpoint()).tobytes()


def test_rounding_needs_permission_and_never_touches_the_router(tmp_path: Path) -> None:
    tensors = weights(dtype=np.float32)
    tensors["model.layers.1.mlp.gate.weight"][0, 0] = 1.001
    export_gguf((SMALL, tensors), tmp_path / "exact.gguf", dtype="bfloat16")
    tensors["lm_head.weight"][3, 1] = 1.001

    with pytest.raises(CheckpointError) as refusal:
        export_gguf((SMALL, tensors), tmp_path / "m.gguf", dtype="bfloat16")
    left = sorted(path.name for path in tmp_path.iterdir())
    export_gguf((SMALL, tensors), tmp_path / "m.gguf", dtype="bfloat16", rounding=True)

    assert (
        "tensor 'output.weight': 1 of 740 values are not exact in bfloat16, at [3, 1] "
        "1.0010000467300415 -> 1.0; choose another dtype, or allow rounding (--round)"
    ) == str(refusal.value)
    assert ["exact.gguf"] == left
    router = File(tmp_path / "m.gguf").tensors["blk.1.ffn_gate_inp.weight"]
    assert np.float32(1.001) == router[0, 0]


def test_equal_models_give_equal_bytes_from_any_source_and_place(tmp_path: Path) -> None:
    tensors = weights()
    export_checkpoint((SMALL, tensors), tmp_path / "single")
    export_checkpoint((SMALL, tensors), tmp_path / "stacked", stacked=True)
    (tmp_path / "elsewhere").mkdir()

    export_gguf((SMALL, dict(reversed(tensors.items()))), tmp_path / "1.gguf")
    export_gguf(tmp_path / "single", tmp_path / "elsewhere" / "2.gguf")
    export_gguf(tmp_path / "stacked", tmp_path / "3.gguf")

    first = (tmp_path / "1.gguf").read_bytes()
    assert first == (tmp_path / "elsewhere" / "2.gguf").read_bytes()
    assert first == (tmp_path / "3.gguf").read_bytes()
    assert str(tmp_path).encode() not in first


def yarn(**changes: Any) -> ModelConfig:
    fields = {name: getattr(YARN, name) for name in Yarn.__dataclass_fields__}
    return SMALL.replace(yarn=Yarn(**{**fields, **changes}))


REFUSED = [
    (
        "latent_norm_eps",
        SMALL.replace(latent_norm_eps=1e-6),
        "latent_norm_eps = 1e-06, but one eps serves all norms, rms_norm_eps = 3e-05; "
        "expected equal values",
    ),
    (
        "attention_factor",
        yarn(attention_factor=0.9),
        "attention_factor = 0.9, but cos and sin are not scaled; expected 1, or no such key",
    ),
    (
        "mscale",
        yarn(mscale=1.0),
        "mscale = 1.0, mscale_all_dim = 0.707, but cos and sin are not scaled; "
        "expected equal values",
    ),
    (
        "mscale",
        yarn(mscale=None),
        "mscale = None, mscale_all_dim = 0.707, but cos and sin are not scaled; "
        "expected equal values",
    ),
    (
        "mscale_all_dim",
        yarn(mscale_all_dim=None),
        "mscale_all_dim = None, but without it scores are scaled by mscale(factor, 1) squared; "
        "expected a value above 0, equal to mscale",
    ),
    (
        "beta_fast",
        yarn(beta_fast=4.0),
        "beta_fast = 4.0 is written, but not read: 32.0 is used; start llama.cpp with "
        "--yarn-beta-fast 4",
    ),
    (
        "beta_slow",
        yarn(beta_slow=1.5),
        "beta_slow = 1.5 is written, but not read: 1.0 is used; start llama.cpp with "
        "--yarn-beta-slow 1.5",
    ),
    (
        "yarn_ramp",
        yarn(original_max_position_embeddings=1),
        "the ramp of MLA-6 runs backwards, from 0 to -1, and is read as a step; expected "
        "original_max_position_embeddings and rope_theta that order it",
    ),
    (
        "num_hidden_layers",
        SMALL.replace(num_hidden_layers=27),
        "num_hidden_layers = 27 (vocab_size = 37) is taken for a model without q_lora_rank; "
        "expected another number of layers",
    ),
    (
        "num_hidden_layers",
        SMALL.replace(num_hidden_layers=48, vocab_size=128256),
        "num_hidden_layers = 48 (vocab_size = 128256) is taken for a model without q_lora_rank; "
        "expected another number of layers",
    ),
    (
        "n_shared_experts",
        SMALL.replace(n_shared_experts=0),
        "n_shared_experts = 0, but layers with experts must have shared ones; expected at least "
        "1, with weights of zero",
    ),
]


@pytest.mark.parametrize(("name", "config", "text"), REFUSED)
def test_what_gguf_cannot_say_is_refused_by_name(
    name: str, config: ModelConfig, text: str, tmp_path: Path
) -> None:
    tensors = weights(config) if config.vocab_size < 100 else {}

    assert {name: text} == gguf_losses(config)
    if tensors:
        with pytest.raises(UnsupportedError) as refusal:
            export_gguf((config, tensors), tmp_path / "m.gguf")
        assert (
            f"GGUF (deepseek2 of llama.cpp) cannot say this model. {text}. "
            f"To write it all the same: --accept-loss {name}"
        ) == str(refusal.value)
        assert [] == list(tmp_path.iterdir())
        notes = export_gguf((config, tensors), tmp_path / "m.gguf", accept_loss=[name])
        assert [f"accepted loss: {text}"] == notes


def test_every_loss_has_a_case() -> None:
    assert set(LOSSES) == {name for name, _, _ in REFUSED}


def test_layer_counts_of_small_models_are_refused_whatever_their_queries() -> None:
    for layers in (26, 27):
        for rank in (None, 11):
            config = SMALL.replace(num_hidden_layers=layers, q_lora_rank=rank)
            assert ["num_hidden_layers"] == list(gguf_losses(config))
    assert {} == gguf_losses(SMALL.replace(num_hidden_layers=28))
    assert {} == gguf_losses(SMALL.replace(num_hidden_layers=48))


@pytest.mark.parametrize(
    "config",
    [
        yarn(attention_factor=1.0, mscale=None),
        yarn(factor=1.0, mscale=None, beta_fast=4.0),
        SMALL.replace(n_shared_experts=0, first_k_dense_replace=2),
    ],
)
def test_what_comes_to_the_same_is_no_loss(config: ModelConfig) -> None:
    assert {} == gguf_losses(config)


def test_kimi_k2_needs_one_loss_accepted() -> None:
    assert ["beta_fast"] == list(gguf_losses(ModelConfig.kimi_k2()))


def test_all_losses_are_named_at_once(tmp_path: Path) -> None:
    config = yarn(mscale=1.0, beta_fast=4.0).replace(latent_norm_eps=1e-6)

    with pytest.raises(UnsupportedError) as refusal:
        export_gguf((config, weights(config)), tmp_path / "m.gguf", accept_loss=["mscale"])

    assert str(refusal.value).endswith(
        "To write it all the same: --accept-loss latent_norm_eps --accept-loss beta_fast"
    )


def test_an_unknown_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        export_gguf((SMALL, weights()), tmp_path / "m.gguf", accept_loss=["eps"])

    assert "'eps' cannot be accepted as a loss; expected names of latent_norm_eps, " in str(
        refusal.value
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"max_position_embeddings": 2**32},
            "max_position_embeddings = 4294967296 does not fit GGUF's uint32; "
            "expected at most 4294967295",
        ),
        (
            {"rope_theta": 1e39},
            "rope_theta = 1e+39 is inf in GGUF's float32; "
            "expected a value between 1.2e-38 and 3.4e+38",
        ),
        (
            {"routed_scaling_factor": 1e-50},
            "routed_scaling_factor = 1e-50 is 0.0 in GGUF's float32; "
            "expected a value between 1.2e-38 and 3.4e+38",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(change: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        export_gguf((SMALL.replace(**change), weights()), tmp_path / "m.gguf")

    assert text == str(refusal.value)
    assert [] == list(tmp_path.iterdir())


def test_gguf_replaces_gguf_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF of somebody")
    export_gguf((SMALL, weights()), path)
    assert 37 == File(path)["vocab_size"]
    path.write_bytes(b"my thesis")

    with pytest.raises(CheckpointError) as refusal:
        export_gguf((SMALL, weights()), path)

    assert f"{path} is there and is not GGUF; remove it or choose another path" == str(
        refusal.value
    )
    assert b"my thesis" == path.read_bytes()
    assert ["m.gguf"] == [file.name for file in tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("", " is a directory; expected the path of a file"),
        ("nowhere/m.gguf", "nowhere/m.gguf cannot be written: "),
    ],
)
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, target: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        export_gguf((SMALL, weights()), tmp_path / target)


def test_a_failure_half_way_leaves_what_was_there(tmp_path: Path) -> None:
    export_gguf((SMALL, weights()), tmp_path / "m.gguf")
    before = (tmp_path / "m.gguf").read_bytes()

    class Failing(dict):
        asked = 0

        def __getitem__(self, name):
            self.asked += 1
            if self.asked > 2 * len(self) + 5:
                raise RuntimeError("disk on fire")
            return super().__getitem__(name)

    with pytest.raises(RuntimeError, match="disk on fire"):
        export_gguf((SMALL, Failing(weights(dtype=np.float32))), tmp_path / "m.gguf")

    assert before == (tmp_path / "m.gguf").read_bytes()
    assert ["m.gguf"] == [file.name for file in tmp_path.iterdir()]


def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(UnsupportedError) as refusal:
        export_gguf((SMALL, weights()), tmp_path / "m.gguf")

    assert str(refusal.value).startswith("writing GGUF needs the package gguf, which cannot be")
    assert str(refusal.value).endswith("expected it: pip install 'kdtr[gguf]'")


def test_the_package_is_imported_only_to_write() -> None:
    code = "import sys, kdtr.kdtr_format, kdtr.conformance.cli; sys.exit('gguf' in sys.modules)"

    assert 0 == subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode
