"""What `Engine.load` takes, opened: the configuration, the tensors by name, and their shapes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.contract import CheckpointError, ModelConfig, ModelSource, UnsupportedError

_EXPECTED = (
    "expected a Hugging Face directory, a .kdtr file with weights, or a pair of ModelConfig and "
    "a mapping from checkpoint names to arrays"
)


@dataclass(frozen=True, slots=True)
class Source:
    """tensors may be lazy; shapes are None where the source cannot tell them without reading."""

    config: ModelConfig
    tensors: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]] | None = None


def open_source(source: ModelSource) -> Source:
    """Raises ConfigError, CheckpointError, BundleError or UnsupportedError."""
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source))
    if not isinstance(source, tuple) or len(source) != 2:
        raise CheckpointError(f"source is {type(source).__name__}; {_EXPECTED}")
    config, tensors = source
    if not isinstance(config, ModelConfig) or not isinstance(tensors, Mapping):
        kinds = f"({type(config).__name__}, {type(tensors).__name__})"
        raise CheckpointError(f"source is {kinds}; {_EXPECTED}")
    return Source(config, tensors)


def _open_path(path: Path) -> Source:
    if path.is_dir():
        from kdtr.kdtr_format import read_checkpoint

        checkpoint = read_checkpoint(path)
        config = ModelConfig.from_hf(checkpoint.config)
        return Source(config, checkpoint.tensors, checkpoint.shapes)
    if path.suffix == ".gguf":
        raise UnsupportedError(
            f"{path}: GGUF is not read by this version; {_EXPECTED}, and convert it to one of them"
        )
    if path.suffix == ".kdtr":
        from kdtr.kdtr_format import Bundle
        from kdtr.kdtr_format.model import read_model

        return Source(*read_model(Bundle.open(path)))
    what = "is no directory and no .kdtr file" if path.exists() else "does not exist"
    raise CheckpointError(f"{path} {what}; {_EXPECTED}")
