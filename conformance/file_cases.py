"""Files that an engine is asked to load: one model written soundly, unusually and broken.

A sound file may be refused, as an engine need not read every form of it; if it is loaded, it
computes as its tensors do (LOAD-1). A broken one must be refused (LOAD-2).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.conformance.file_image import Part, kdtr_image, parts_of, safetensors_image
from kdtr.contract import ModelConfig
from kdtr.kdtr_format import config_tensors, export_checkpoint

KDTR, CHECKPOINT = "KDTR file", "checkpoint"
_LAST = "model.norm.weight"  # by name the last tensor of every model


@dataclass(frozen=True, slots=True)
class FileCase:
    """A model in a file.

    form    KDTR or CHECKPOINT: an engine that does not read the plain one is asked for no other
    name    begins with the form
    broken  what is wrong with it, in words; "" for a sound one
    write   into an empty folder; returns what `load` is given
    """

    form: str
    name: str
    broken: str
    write: Callable[[Path, ModelConfig, Mapping[str, np.ndarray]], Path]

    @property
    def rules(self) -> tuple[str, ...]:
        return ("LOAD-2",) if self.broken else ("LOAD-1",)


_Image = Callable[[list[Part]], bytes]


def _kdtr(name: str, image: _Image, broken: str = "") -> FileCase:
    def write(folder: Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Path:
        tensors = {f"weights/{key}": weights[key] for key in weights}
        path = folder / "model.kdtr"
        path.write_bytes(image(parts_of({**config_tensors(config), **tensors})))
        return path

    return FileCase(KDTR, f"{KDTR}{name}", broken, write)


def _checkpoint(name: str, files: Mapping[str, _Image], broken: str = "") -> FileCase:
    """The exporter's directory, with these files in place of its one."""

    def write(folder: Path, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> Path:
        path = folder / "model"
        export_checkpoint((config, weights), path)
        if files:
            (path / "model.safetensors").unlink()
        for file, image in files.items():
            (path / file).write_bytes(image(parts_of(weights)))
        return path

    return FileCase(CHECKPOINT, f"{CHECKPOINT}{name}", broken, write)


def _without_one(parts: list[Part]) -> list[Part]:
    return [part for part in parts if not part.name.endswith(_LAST)]


def _one_twice(parts: list[Part]) -> list[Part]:
    """The last tensor once more, as zeros."""
    return [*parts, Part(parts[-1].name, np.zeros_like(parts[-1].array))]


def _in_float32(parts: list[Part]) -> list[Part]:
    return [
        Part(part.name, part.array.astype(np.float32))
        if part.array.dtype.name in ("bfloat16", "float16")
        else part
        for part in parts
    ]


def _backwards(parts: Sequence[Part]) -> range:
    return range(len(parts))[::-1]


def _cut(image: bytes, parts: Sequence[Part]) -> bytes:
    """Without the second half of the last tensor."""
    return image[: -(len(parts[-1].payload) + 1) // 2]


def _flipped(image: bytes) -> bytes:
    """One bit of the last tensor is another."""
    return image[:-1] + bytes([image[-1] ^ 0x40])


def _halves(parts: list[Part]) -> tuple[list[Part], list[Part]]:
    return parts[: len(parts) // 2], parts[len(parts) // 2 :]


def _index_of_halves(parts: list[Part]) -> bytes:
    """Which of the two files holds each tensor, as the library that writes shards says it."""
    weight_map = {
        part.name: f"model-0000{number}-of-00002.safetensors"
        for number, half in enumerate(_halves(parts), start=1)
        for part in half
    }
    total = sum(part.array.nbytes for part in parts)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}).encode()


FILE_CASES: tuple[FileCase, ...] = (
    _kdtr("", kdtr_image),
    _kdtr(" aligned to 64 bytes", lambda parts: kdtr_image(parts, alignment=64)),
    _kdtr(" aligned to 4096 bytes", lambda parts: kdtr_image(parts, alignment=4096)),
    _kdtr(" in float32", lambda parts: kdtr_image(_in_float32(parts))),
    _kdtr(
        " with payloads in reverse order",
        lambda parts: kdtr_image(parts, placed=_backwards(parts)),
    ),
    _kdtr(
        " that was cut",
        lambda parts: _cut(kdtr_image(parts), parts),
        "it ends in the middle of its last tensor",
    ),
    _kdtr(
        " with a flipped bit",
        lambda parts: _flipped(kdtr_image(parts)),
        "its last tensor has another checksum than the directory says",
    ),
    _kdtr(
        " with a tensor twice",
        lambda parts: kdtr_image(_one_twice(parts)),
        f"it holds {_LAST} twice, the second time as zeros",
    ),
    _kdtr(
        " without a tensor",
        lambda parts: kdtr_image(_without_one(parts)),
        f"it lacks {_LAST}",
    ),
    _checkpoint("", {}),
    _checkpoint(
        " with payloads in reverse order",
        {"model.safetensors": lambda parts: safetensors_image(parts, placed=_backwards(parts))},
    ),
    _checkpoint(
        " in float32",
        {"model.safetensors": lambda parts: safetensors_image(_in_float32(parts))},
    ),
    _checkpoint(
        " in two files",
        {
            "model-00001-of-00002.safetensors": lambda parts: safetensors_image(_halves(parts)[0]),
            "model-00002-of-00002.safetensors": lambda parts: safetensors_image(_halves(parts)[1]),
            "model.safetensors.index.json": _index_of_halves,
        },
    ),
    _checkpoint(
        " with a tensor in two files",
        {
            "model.safetensors": safetensors_image,
            "model-zeros.safetensors": lambda parts: safetensors_image(_one_twice(parts)[-1:]),
        },
    ),
    _checkpoint(
        " that was cut",
        {"model.safetensors": lambda parts: _cut(safetensors_image(parts), parts)},
        "it ends in the middle of its last tensor",
    ),
    _checkpoint(
        " without a tensor",
        {"model.safetensors": lambda parts: safetensors_image(_without_one(parts))},
        f"it lacks {_LAST}",
    ),
)
