"""`kdtr export`: what it writes, what it says, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kdtr.conformance.seed_model import seed_tensors
from kdtr.conformance.tiny_corpus import TINY_SEED
from kdtr.contract import ModelConfig
from kdtr.kdtr_format import open_model

Kdtr = Callable[..., SimpleNamespace]


def test_the_seed_model_as_a_directory(kdtr: Kdtr, tmp_path: Path) -> None:
    answer = kdtr("export", "--tiny", "--to", tmp_path / "tiny")

    assert (0, f"{tmp_path}/tiny\n", "") == (answer.code, answer.out, answer.err)
    model = open_model(tmp_path / "tiny")
    assert ModelConfig.tiny() == model.config
    for name, array in seed_tensors(model.config, TINY_SEED).items():
        np.testing.assert_array_equal(array, model.tensors[name].astype(np.float32))


def test_the_seed_model_as_gguf_needs_its_eps_accepted(kdtr: Kdtr, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"

    refused = kdtr("export", "--tiny", "--to", path)
    written = kdtr("export", "--tiny", "--to", path, "--accept-loss", "latent_norm_eps")

    assert 2 == refused.code
    assert refused.err.startswith("kdtr: UnsupportedError: GGUF (deepseek2 of llama.cpp) cannot")
    assert "--accept-loss latent_norm_eps" in refused.err
    assert (0, f"{path}\n") == (written.code, written.out)
    assert (
        "kdtr: note: accepted loss: latent_norm_eps = 1e-06, but one eps serves all norms, "
        "rms_norm_eps = 2e-05; expected equal values\n"
    ) == written.err
    assert b"GGUF" == path.read_bytes()[:4]


def test_a_bundle_and_a_directory_as_sources(
    kdtr: Kdtr, small: Path, small_model: SimpleNamespace, tmp_path: Path
) -> None:
    first = kdtr("export", small, "--to", tmp_path / "one", "--stacked")
    second = kdtr("export", tmp_path / "one", "--to", tmp_path / "two")

    note = "kdtr: note: only kdtr reads latent_norm_eps = 0.002; transformers always uses 1e-06\n"
    assert (0, note) == (first.code, first.err)
    assert (0, note) == (second.code, second.err)
    model = open_model(tmp_path / "two")
    assert small_model.config == model.config
    for name, array in small_model.weights.items():
        assert array.tobytes() == model.tensors[name].tobytes(), name


def test_a_dtype_is_converted_and_rounded_only_with_permission(kdtr: Kdtr, tmp_path: Path) -> None:
    source = tmp_path / "one"
    kdtr("export", "--tiny", "--to", source, "--dtype", "float32")
    assert np.float32 == open_model(source).tensors["model.norm.weight"].dtype

    exact = kdtr("export", source, "--to", tmp_path / "two", "--dtype", "float16")

    assert 0 == exact.code
    assert np.float16 == open_model(tmp_path / "two").tensors["model.norm.weight"].dtype


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["model.gguf", "--to", "c"], "model.gguf: GGUF is not read by this version"),
        (["nowhere", "--to", "c"], "nowhere does not exist; expected a Hugging Face directory"),
        (
            ["--tiny", "--to", "m.safetensors"],
            "--to m.safetensors: .safetensors files are not written; expected a directory, or a "
            "path ending in .gguf",
        ),
        (
            ["--tiny", "--to", "m.gguf", "--stacked"],
            "--stacked is for directories; GGUF always stacks the experts",
        ),
        (
            ["--tiny", "--to", "c", "--accept-loss", "mscale"],
            "--accept-loss is for GGUF; a directory loses nothing",
        ),
        (["--to", "c"], "one of the arguments --tiny SOURCE is required"),
        (["x", "--tiny", "--to", "c"], "argument --tiny: not allowed with argument SOURCE"),
        (["--tiny"], "the following arguments are required: --to"),
        (["--tiny", "--to", "c", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_refusals(
    kdtr: Kdtr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)

    answer = kdtr("export", *words)

    assert (2, "") == (answer.code, answer.out)
    assert text in answer.err
    assert [] == list(tmp_path.iterdir())
