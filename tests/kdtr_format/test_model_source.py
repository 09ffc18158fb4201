from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import BundleError, CheckpointError, ModelConfig, UnsupportedError
from kdtr.kdtr_format import open_model, write_bundle
from kdtr.kdtr_format.model import config_tensors, read_model


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (7, "source is int; "),
        (None, "source is NoneType; "),
        ((1, 2, 3), "source is tuple; "),
        (({}, {}), "source is (dict, dict); "),
        ((ModelConfig.tiny(), [1]), "source is (ModelConfig, list); "),
        ("nowhere/model", "nowhere/model does not exist; "),
    ],
)
def test_nonsense_is_refused(source: Any, text: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        open_model(source)

    assert str(refusal.value).startswith(text + "expected a Hugging Face directory, a .kdtr file")


def test_gguf_is_unsupported_by_name() -> None:
    with pytest.raises(UnsupportedError, match="GGUF is not read by this version"):
        open_model("model.gguf")


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")

    with pytest.raises(CheckpointError, match=r"model\.bin is no directory and no \.kdtr file"):
        open_model(file)


def test_a_foreign_bundle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.kdtr"
    file.write_bytes(b"GGUF" + bytes(200))

    with pytest.raises(BundleError):
        open_model(file)


def test_a_bundle_is_the_same_model(tmp_path: Path) -> None:
    tiny = ModelConfig.tiny()
    weights = seed_tensors(tiny, seed=7)
    file = tmp_path / "model.kdtr"
    tensors = {f"weights/{name}": tensor for name, tensor in weights.items()}
    write_bundle(file, {**config_tensors(tiny), **tensors, "expect/secret": np.zeros(3)}, {})

    opened = open_model(file)

    assert tiny == opened.config
    assert {name: tensor.shape for name, tensor in weights.items()} == opened.shapes
    assert set(weights) == set(opened.tensors)
    for name, tensor in weights.items():
        assert np.array_equal(tensor, opened.tensors[name])


def test_a_damaged_tensor_is_told_with_its_file(tmp_path: Path) -> None:
    tiny, file = ModelConfig.tiny(), tmp_path / "model.kdtr"
    tensors = {f"weights/{name}": array for name, array in seed_tensors(tiny, seed=7).items()}
    write_bundle(file, {**config_tensors(tiny), **tensors}, {})
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    with pytest.raises(BundleError) as refusal:
        open_model(file)

    assert str(refusal.value).startswith(f"{file}: tensor 'weights/model.norm.weight' has checksum")
    assert 1 == str(refusal.value).count("model.kdtr")


def stored(**changes: Any) -> dict[str, np.ndarray]:
    tensors = config_tensors(ModelConfig.kimi_k2())
    tensors |= {"config/" + name.replace("__", "/"): value for name, value in changes.items()}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"scoring_func": np.array(1.0)},
            "config/scoring_func is float64 []; expected one int64, []",
        ),
        ({"scoring_func": np.array(7)}, "config/scoring_func = 7; expected 0 (sigmoid) or 1"),
        ({"scoring_func": np.array(True)}, "config/scoring_func is bool []; expected one int64"),
        ({"n_group": np.array(1, np.uint64)}, "config/n_group is uint64 []; expected one int64"),
        ({"n_group": np.array([1])}, "config/n_group is int64 [1]; expected one int64, []"),
        ({"rms_norm_eps": np.array(1)}, "config/rms_norm_eps is int64 []; expected one float64"),
        ({"rms_norm_eps": np.array(np.nan)}, "config/rms_norm_eps = nan; expected a finite number"),
        ({"norm_topk_prob": np.array(1)}, "config/norm_topk_prob is int64 []; expected one bool"),
        ({"yarn__factor": None}, "the bundle lacks config/yarn/factor"),
        ({"yarn__factor": np.array(2)}, "config/yarn/factor is int64 []; expected one float64"),
        ({"yarn__mscale": np.array(np.inf)}, "config/yarn/mscale = inf; expected a finite number"),
        ({"n_group": None}, "the bundle lacks config/n_group"),
        ({"other": np.array(1)}, "config/other is no field of ModelConfig; remove it"),
    ],
)
def test_a_configuration_of_the_wrong_kind_is_refused_by_name(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(BundleError) as refusal:
        read_model(stored(**changes))

    assert str(refusal.value).startswith(text)


def test_yarn_keys_with_a_default_may_be_absent() -> None:
    tensors = stored(yarn__beta_fast=None, yarn__mscale=None)

    config, _ = read_model(tensors)

    assert config.yarn is not None
    assert (32.0, None) == (config.yarn.beta_fast, config.yarn.mscale)


@pytest.mark.parametrize("suffix", ["", ".kdtr"])
def test_a_path_that_the_system_refuses_is_refused_in_its_words(suffix: str) -> None:
    with pytest.raises((CheckpointError, BundleError), match="cannot be read: File name too long"):
        open_model("a" * 5000 + suffix)


def test_tensors_have_names_and_shapes() -> None:
    with pytest.raises(CheckpointError, match=r"^tensor name 5 is int; expected str"):
        open_model((ModelConfig.tiny(), {5: np.zeros(1)}))  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match=r"^x is no array: "):
        open_model((ModelConfig.tiny(), {"x": [[1], [1, 2]]}))  # type: ignore[dict-item]
