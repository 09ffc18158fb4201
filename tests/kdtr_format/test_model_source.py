from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import BundleError, CheckpointError, ModelConfig, UnsupportedError
from kdtr.kdtr_format import open_model, write_bundle
from kdtr.kdtr_format.model import config_tensors


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
