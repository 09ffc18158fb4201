"""A Hugging Face checkpoint directory, raw: config.json and named tensors, nothing interpreted.

What a name means, how rows are laid out and which tensors must exist is each reader's own business:
if the reference and an engine shared that code here, a mistake in it would look like agreement.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from kdtr.contract.errors import CheckpointError
from kdtr.kdtr_format.named_arrays import NamedArrays, UnknownNameError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_CONFIG_SIZE = 16 * 1024 * 1024  # bytes; released ones have some thousand
WEIGHT_DTYPES = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
}
_FILE_NAME = re.compile(r"[^/\\\0]+\.safetensors")  # in this directory, nowhere else
_SHOWN = 20  # names in one message: a wrong directory has thousands
_open_safetensors: Callable[..., Any] = safe_open  # the library's stubs leave it untyped


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a directory holds.

    config   config.json as parsed, unchanged
    tensors  name -> read-only array in the file's dtype (float32, ml_dtypes.bfloat16, float16);
             read from disk at each access and not kept. An unknown name is a CheckpointError.
    shapes   name -> shape, from the files' headers alone
    """

    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray]
    shapes: Mapping[str, tuple[int, ...]]


def read_checkpoint(directory: str | os.PathLike[str]) -> Checkpoint:
    """Open the directory's config.json and *.safetensors; reads headers, no weights.

    With model.safetensors.index.json the shards are those that it lists, and it must list exactly
    what they hold; without it, all *.safetensors together. Raises CheckpointError naming what is
    missing, doubled, unreadable or of a dtype other than float32, bfloat16 and float16.
    """
    directory = Path(directory)
    mode = file_mode(directory)
    if mode is None or not stat.S_ISDIR(mode):
        kind = "does not exist" if mode is None else "is not a directory"
        raise CheckpointError(f"{directory} {kind}; expected a Hugging Face checkpoint directory")
    config = _read_config(directory / CONFIG)
    index = directory / INDEX
    weight_map = _read_weight_map(index) if file_mode(index) is not None else None
    shards = [_Shard(path) for path in _shard_paths(directory, weight_map)]
    owners = _owners(shards)
    if weight_map is not None:
        _check_weight_map(weight_map, owners)
    for shard in shards:
        shard.check_dtypes()
    names = sorted(owners)
    shapes = {name: owners[name].shapes[name] for name in names}
    return Checkpoint(config, _Tensors({n: owners[n] for n in names}), MappingProxyType(shapes))


class _Shard:
    """One open safetensors file: its tensors' shapes (elements) and dtypes (safetensors' names)."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        _check_readable(path)
        try:
            self._file = _open_safetensors(path, framework="numpy")
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            with_hint = f"{path} cannot be read as safetensors: {error}{_hint(path)}"
            raise CheckpointError(with_hint) from error
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self.dtypes: dict[str, str] = {name: part.get_dtype() for name, part in slices.items()}

    def check_dtypes(self) -> None:
        wrong = [f"{n} {d}" for n, d in sorted(self.dtypes.items()) if d not in WEIGHT_DTYPES]
        if wrong:
            raise CheckpointError(
                f"{self.name}: {_count(wrong, 'tensor')} not of dtype {', '.join(WEIGHT_DTYPES)}: "
                f"{_list(wrong)}; convert them first (quantised weights: dequantise to bfloat16)"
            )

    def read(self, name: str) -> np.ndarray:
        try:
            array: np.ndarray = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.name}: tensor {name!r} cannot be read: {error}"
            ) from error
        # the library chooses the NumPy dtype; with another bfloat16 all values would be wrong
        assert array.dtype == WEIGHT_DTYPES[self.dtypes[name]], (name, array.dtype)
        array.flags.writeable = False
        return array


class UnknownWeightError(CheckpointError, UnknownNameError):
    """A tensor that the checkpoint does not have."""


class _Tensors(NamedArrays):
    """All shards' tensors, sorted by name; each access reads the file."""

    __slots__ = ("_owners",)
    unknown = UnknownWeightError

    def __init__(self, owners: Mapping[str, _Shard]) -> None:
        super().__init__(owners)
        self._owners = owners

    def _load(self, name: str) -> np.ndarray:
        return self._owners[name].read(name)


def file_mode(path: Path) -> int | None:
    """st_mode of what lies there, None for nothing; CheckpointError with the system's words."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError:  # a NUL in the path
        return None


def _check_readable(path: Path, most: int | None = None) -> None:
    """Refuse what is no regular file before it is opened: a pipe waits, /dev/zero never ends."""
    try:
        about = os.stat(path)
        if not stat.S_ISDIR(about.st_mode) and not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{path} is not a regular file; expected a file of a checkpoint")
        if most is not None and about.st_size > most:
            raise CheckpointError(f"{path} has {about.st_size} bytes; expected at most {most}")
        with path.open("rb"):  # safetensors says of every failure that there is no such file
            pass
    except FileNotFoundError:
        if not path.is_symlink():
            raise CheckpointError(f"{path.parent} has no {path.name}") from None
        raise CheckpointError(f"{path} cannot be read: it links to a missing file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json_object(path, most=MAX_CONFIG_SIZE)
    # multimodal checkpoints keep the language model's configuration in text_config
    for where, part in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(part, dict) and part.get("quantization_config") is not None:
            raise CheckpointError(
                f"{path}: {where}quantization_config is present, so the weights are quantised; "
                f"dequantise the checkpoint to bfloat16 and remove the entry"
            )
    return config


def _read_json_object(path: Path, most: int | None = None) -> dict[str, Any]:
    _check_readable(path, most)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: not JSON, not UTF-8
        raise CheckpointError(f"{path} is not JSON: {error}{_hint(path)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is a JSON {type(value).__name__}; expected an object")
    return value


def _read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> shard file name."""
    weight_map = _read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map; expected tensor name -> file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _FILE_NAME.fullmatch(shard):
            raise CheckpointError(
                f"{path}: weight_map[{name!r}] is {shard!r}; "
                f"expected the name of a *.safetensors file beside it"
            )
    return weight_map


def _shard_paths(directory: Path, weight_map: dict[str, str] | None) -> list[Path]:
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if weight_map is None:
        if not found:
            try:
                beside = list(directory.iterdir())
            except OSError as error:
                raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
            others = sorted(p.name for p in beside if p.suffix in (".bin", ".gguf", ".pt"))
            instead = f"; it has {_list(others)}, convert that to safetensors" if others else ""
            raise CheckpointError(f"{directory} has no *.safetensors{instead}")
        return [directory / name for name in found]
    listed = sorted(set(weight_map.values()))
    missing = [name for name in listed if file_mode(directory / name) is None]
    if missing:
        lost = [
            f"{name} ({_count([s for s in weight_map.values() if s == name], 'tensor')})"
            for name in missing
        ]
        raise CheckpointError(
            f"{directory}: {_count(missing, 'shard')} of {len(listed)} missing: {', '.join(lost)}"
        )
    if SINGLE in found and SINGLE not in listed:
        # transformers reads the single file, other loaders the shards: two models in one directory
        raise CheckpointError(
            f"{directory} has both {SINGLE} and {INDEX}, which does not list it; remove one of them"
        )
    return [directory / name for name in listed]


def _owners(shards: Iterable[_Shard]) -> dict[str, _Shard]:
    """Tensor name -> the one shard that holds it."""
    owners: dict[str, _Shard] = {}
    doubled = []
    for shard in shards:
        for name in shard.shapes:
            if name in owners:
                doubled.append(f"{name} ({owners[name].name}, {shard.name})")
            owners[name] = shard
    if doubled:
        raise CheckpointError(f"{_count(doubled, 'tensor')} in two files: {_list(sorted(doubled))}")
    return owners


def _check_weight_map(weight_map: dict[str, str], owners: Mapping[str, _Shard]) -> None:
    lacking = [
        f"{name} ({shard})"
        for name, shard in weight_map.items()
        if name not in owners or owners[name].name != shard
    ]
    if lacking:
        raise CheckpointError(
            f"{INDEX} lists {_count(lacking, 'tensor')} that the shard lacks: "
            f"{_list(sorted(lacking))}"
        )
    unlisted = [
        f"{name} ({owner.name})" for name, owner in owners.items() if name not in weight_map
    ]
    if unlisted:
        raise CheckpointError(
            f"{INDEX} does not list {_count(unlisted, 'tensor')} of its shards: "
            f"{_list(sorted(unlisted))}"
        )


def _hint(path: Path) -> str:
    """The commonest reason why a downloaded file is not what its name says."""
    with suppress(OSError), path.open("rb") as file:
        if file.read(24).startswith(b"version https://git-lfs"):
            return "; it is a Git LFS pointer, run git lfs pull"
    return ""


def _list(items: Collection[str]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(list(items)[:_SHOWN]) + more


def _count(items: Collection[str], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
