"""What `Engine.load` takes, opened: the configuration, the tensors by name, and their shapes.

Raw reading only. What a tensor's rows mean is each engine's own business.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.contract import CheckpointError, ModelConfig, ModelSource, UnsupportedError
from kdtr.kdtr_format.checkpoint import file_mode, read_checkpoint
from kdtr.kdtr_format.model import read_model
from kdtr.kdtr_format.reader import Bundle, naming

_EXPECTED = (
    "expected a Hugging Face directory, a .kdtr file with weights, or a pair of ModelConfig and "
    "a mapping from checkpoint names to arrays"
)


@dataclass(frozen=True, slots=True, eq=False)
class OpenModel:
    """tensors may be lazy: `shapes` tells theirs without reading one."""

    config: ModelConfig
    tensors: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]


def open_model(source: ModelSource) -> OpenModel:
    """Raises ConfigError, CheckpointError, BundleError or UnsupportedError."""
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(source))
    if not isinstance(source, tuple) or len(source) != 2:
        raise CheckpointError(f"source is {type(source).__name__}; {_EXPECTED}")
    config, tensors = source
    if not isinstance(config, ModelConfig) or not isinstance(tensors, Mapping):
        kinds = f"({type(config).__name__}, {type(tensors).__name__})"
        raise CheckpointError(f"source is {kinds}; {_EXPECTED}")
    return _in_memory(config, tensors)


def _open_path(path: Path) -> OpenModel:
    if path.suffix == ".kdtr" and not _is_directory(path):
        view = Bundle.open(path).view("config/", "weights/")
        with naming(path):  # a view does not know its file
            return _in_memory(*read_model(view))
    mode = file_mode(path)
    if mode is not None and stat.S_ISDIR(mode):
        checkpoint = read_checkpoint(path)
        config = ModelConfig.from_hf(checkpoint.config)
        return OpenModel(config, checkpoint.tensors, checkpoint.shapes)
    if path.suffix == ".gguf":
        raise UnsupportedError(
            f"{path}: GGUF is not read by this version; {_EXPECTED}, and convert it to one of them"
        )
    what = "does not exist" if mode is None else "is no directory and no .kdtr file"
    raise CheckpointError(f"{path} {what}; {_EXPECTED}")


def _in_memory(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> OpenModel:
    shapes = {}
    for name in tensors:
        if not isinstance(name, str):
            raise CheckpointError(f"tensor name {name!r} is {type(name).__name__}; expected str")
        try:
            shapes[name] = tuple(np.shape(tensors[name]))
        except ValueError as error:  # a ragged list
            raise CheckpointError(f"{name} is no array: {error}") from None
    return OpenModel(config, tensors, shapes)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
