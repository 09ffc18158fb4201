"""Writing a Hugging Face checkpoint directory: for exports, and for tests that need one."""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from kdtr.contract.errors import CheckpointError
from kdtr.kdtr_format.checkpoint import CONFIG, INDEX, SINGLE, WEIGHT_DTYPES


def write_checkpoint(
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    max_shard_bytes: int | None = None,
) -> None:
    """Write config.json and the tensors; the same arguments give the same bytes.

    tensors          float32, bfloat16 (ml_dtypes) or float16, any strides; may be lazy, one
                     shard is held at a time
    max_shard_bytes  None: one model.safetensors. Otherwise shards in the order of names, none with
                     more tensor bytes than this unless it holds a single tensor, and an index.

    Each file is written under another name and then renamed, config.json last, so that a directory
    with a config.json is complete. Raises CheckpointError, before writing, for a config that is not
    JSON, a tensor of another dtype, or a directory with weights that this call would not replace:
    the mixture would be read as one model.
    """
    directory = Path(directory)
    config_text = _json(config, "config")
    sizes = {name: _n_bytes(name, tensors[name]) for name in sorted(tensors)}
    shards = _shards(sizes, max_shard_bytes)
    _refuse_leftovers(directory, {*shards, INDEX} if max_shard_bytes is not None else {*shards})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for shard, names in shards.items():
            _write_shard(directory / shard, {name: _in_file_order(tensors[name]) for name in names})
        if max_shard_bytes is not None:
            weight_map = {name: shard for shard, names in shards.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
            _write_text(directory / INDEX, _json(index, "index"))
        _write_text(directory / CONFIG, config_text)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{directory} cannot be written: {why}") from error


def _json(value: Mapping[str, Any], what: str) -> str:
    try:
        return json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} is not JSON: {error}") from None


def _n_bytes(name: str, array: np.ndarray) -> int:
    if not isinstance(array, np.ndarray | np.generic):
        raise CheckpointError(
            f"tensor {name!r} is a {type(array).__name__}; expected a NumPy array"
        )
    if array.dtype.newbyteorder("=") not in WEIGHT_DTYPES.values():
        raise CheckpointError(
            f"tensor {name!r} has dtype {array.dtype}; expected float32, bfloat16 or float16"
        )
    return array.nbytes


def _shards(sizes: Mapping[str, int], max_shard_bytes: int | None) -> dict[str, list[str]]:
    """File name -> tensor names, filled greedily in order of the names."""
    if max_shard_bytes is None:
        return {SINGLE: list(sizes)}
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}; expected at least 1, or None")
    groups: list[list[str]] = [[]]
    filled = 0
    for name, n_bytes in sizes.items():
        if groups[-1] and filled + n_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += n_bytes
    total = len(groups)
    return {f"model-{i:05}-of-{total:05}.safetensors": names for i, names in enumerate(groups, 1)}


def _refuse_leftovers(directory: Path, replaced: set[str]) -> None:
    present = {path.name for path in directory.glob("*.safetensors")}
    present |= {path.name for path in directory.glob(INDEX)}
    leftovers = sorted(present - replaced)
    if leftovers:
        raise CheckpointError(
            f"{directory} already has {', '.join(leftovers)}, which this checkpoint would not "
            f"replace; remove them or choose another directory"
        )


def _in_file_order(array: np.ndarray) -> np.ndarray:
    """C-contiguous and in native byte order: the library writes the memory as it lies."""
    return np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")


def _write_shard(path: Path, arrays: dict[str, np.ndarray]) -> None:
    sibling = _sibling(path)
    try:
        # no metadata: with several keys in it, equal saves gave unequal bytes
        save_file(arrays, sibling)
        sibling.replace(path)
    finally:
        sibling.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    sibling = _sibling(path)
    try:
        sibling.write_text(text, encoding="utf-8", newline="\n")
        sibling.replace(path)
    finally:
        sibling.unlink(missing_ok=True)


def _sibling(path: Path) -> Path:
    return path.parent / f".kdtr-{secrets.token_hex(8)}.tmp"
