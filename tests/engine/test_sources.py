from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.contract import BundleError, CheckpointError, ModelConfig, UnsupportedError
from kdtr.engine import make_engine
from kdtr.engine.sources import open_source
from kdtr.kdtr_format import write_bundle
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
        make_engine().load(source)

    assert str(refusal.value).startswith(text + "expected a Hugging Face directory, a .kdtr file")


def test_gguf_is_unsupported_by_name() -> None:
    with pytest.raises(UnsupportedError, match="GGUF is not read by this version"):
        make_engine().load("model.gguf")


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")

    with pytest.raises(CheckpointError, match=r"model\.bin is no directory and no \.kdtr file"):
        make_engine().load(file)


def test_a_foreign_bundle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.kdtr"
    file.write_bytes(b"GGUF" + bytes(200))

    with pytest.raises(BundleError):
        make_engine().load(file)


def test_a_bundle_is_the_same_model(
    tmp_path: Path, small: ModelConfig, small_weights: dict[str, np.ndarray]
) -> None:
    file = tmp_path / "model.kdtr"
    weights = {f"weights/{name}": tensor for name, tensor in small_weights.items()}
    write_bundle(file, {**config_tensors(small), **weights}, {})

    opened = open_source(file)
    from_bundle = make_engine().load(file).open(max_len=9)
    from_pair = make_engine().load((small, small_weights)).open(max_len=9)

    assert small == opened.config
    assert from_pair.prefill([1, 2, 3]) == from_bundle.prefill([1, 2, 3])
    assert np.array_equal(from_pair.snapshot().c_kv, from_bundle.snapshot().c_kv)
