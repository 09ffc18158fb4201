"""A model as a Hugging Face directory: config.json and safetensors, equal input, equal bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod

import numpy as np

from kdtr.contract import ModelSource
from kdtr.contract.hf_config_writer import unknown_to_transformers, write_hf_config
from kdtr.kdtr_format.checkpoint import CONFIG
from kdtr.kdtr_format.checkpoint_writer import write_checkpoint
from kdtr.kdtr_format.export_target import replaced_directory
from kdtr.kdtr_format.export_tensors import ConvertedTensors, ExportTensors, export_dtype
from kdtr.kdtr_format.model_source import open_model

_SHARD_BYTES = 5_000_000_000  # transformers' own default; a smaller model is one file


def export_checkpoint(
    source: ModelSource,
    directory: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    rounding: bool = False,
    stacked: bool = False,
) -> list[str]:
    """Write `directory`; returns what a reader of it may not see, one sentence each.

    source    what open_model reads
    dtype     float32, bfloat16 or float16; None keeps each tensor's own
    rounding  allow a conversion that is not exact
    stacked   one tensor per layer for all routed experts, as transformers 5 writes them; otherwise
              one per expert, as in released checkpoints

    A directory that is there is replaced when it holds a checkpoint and nothing else. Raises
    ConfigError, CheckpointError, BundleError or UnsupportedError; then nothing has changed.
    """
    wanted = export_dtype(dtype)
    model = open_model(source)
    tensors = ExportTensors(model, stacked=stacked)
    chosen: Mapping[str, np.ndarray] = tensors
    if wanted is not None:
        chosen = ConvertedTensors(tensors, wanted, rounding)
    # four bytes an element at most: whether there is one file follows from the shapes alone
    large = 4 * sum(map(prod, tensors.shapes.values())) > _SHARD_BYTES
    with replaced_directory(directory) as sibling:
        write_checkpoint(
            sibling,
            write_hf_config(model.config),
            chosen,
            max_shard_bytes=_SHARD_BYTES if large else None,
        )
        for file in sibling.glob("*.safetensors"):  # the library keeps them from all other users
            file.chmod((sibling / CONFIG).stat().st_mode)
    unknown = unknown_to_transformers(model.config).values()
    notes = [f"only kdtr reads {sentence}" for sentence in unknown]
    return notes + dropped_note(tensors.dropped)


def dropped_note(names: list[str]) -> list[str]:
    """The sentence about the source's tensors that an export leaves out, if there are any."""
    if not names:
        return []
    more = ", ..." if len(names) > 3 else ""
    return [f"left out, no forward uses them: {len(names)} tensors ({', '.join(names[:3])}{more})"]
