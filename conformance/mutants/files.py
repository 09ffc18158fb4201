"""FILE: how an engine reads a file of weights.

The engine's own reader is asked first: what it refuses for another reason stays refused. Then the
file is read once more, by a reader that trusts it, in the one wrong way.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants.mutant import MutantClass
from kdtr.contract import KdtrError, ModelConfig, has_stacked_experts, tensor_shapes
from kdtr.kdtr_format import open_model, read_model

FILES = MutantClass("weight files")

_MAGIC = b"\x89KDTR\r\n\x1a"
_KDTR = {1: np.float64, 2: np.float32, 3: np.float16, 4: ml_dtypes.bfloat16, 7: np.int64, 14: bool}
_SAFETENSORS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class _Tensor(NamedTuple):
    """As a file's directory has it, in its order; `at` counts bytes from the file's start."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    at: int

    @property
    def n_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=int)) * np.dtype(self.dtype).itemsize


class _File(NamedTuple):
    """The bytes, where payloads begin, and the directory; nothing is checked."""

    data: bytes
    first: int
    tensors: list[_Tensor]

    @property
    def end(self) -> int:
        return max(one.at + one.n_bytes for one in self.tensors)


@FILES.mutant(
    "M133",
    "FILE-1",
    breaks="LOAD-1",
    first_seen_at="checkpoint with payloads in reverse order",
    needs="file",
)
def payloads_as_listed(engine: Any) -> None:
    """Payloads are read one after the other, in the order of the directory."""

    def read(file: _File) -> _File:
        if file.data[:8] == _MAGIC:  # there the order is the only one allowed
            return file
        at, moved = file.first, []
        for one in file.tensors:
            moved.append(one._replace(at=at))
            at += one.n_bytes
        return file._replace(tensors=moved)

    _on_files(engine, read)


@FILES.mutant(
    "M135", "FILE-3", breaks="LOAD-2", first_seen_at="KDTR file that was cut", needs="file"
)
def cut_filled_up(engine: Any) -> None:
    """What a cut file lacks is read as zeros."""
    _tolerating(
        engine,
        lambda file: len(file.data) < file.end,
        lambda file: file._replace(data=file.data + bytes(file.end - len(file.data))),
    )


@FILES.mutant("M137", "FILE-5", breaks="LOAD-1", first_seen_at="KDTR file", needs="file")
def aligned_to_32(engine: Any) -> None:
    """Payloads are taken to be aligned to 32 bytes, whatever the file declares."""

    def read(file: _File) -> _File:
        if file.data[:8] != _MAGIC:  # the other form has no alignment
            return file
        at, moved = file.first, []
        for one in file.tensors:
            at = -(-at // 32) * 32
            moved.append(one._replace(at=at))
            at += one.n_bytes
        return file._replace(tensors=moved)

    _on_files(engine, read)


@FILES.mutant(
    "M138", "FILE-6", breaks="LOAD-2", first_seen_at="KDTR file with a tensor twice", needs="file"
)
def last_of_a_name(engine: Any) -> None:
    """Of two tensors of one name the last is read."""
    _tolerating(
        engine,
        lambda file: len({one.name for one in file.tensors}) < len(file.tensors),
        lambda file: file,
    )


@FILES.mutant(
    "M140", "FILE-8", breaks="LOAD-2", first_seen_at="KDTR file without a tensor", needs="file"
)
def missing_is_zeros(engine: Any) -> None:
    """A tensor that the file lacks is zeros."""
    load = engine.load

    def faulty(source: Any) -> Any:
        model = open_model(source)
        stacked = has_stacked_experts(model.shapes)
        wanted = tensor_shapes(model.config, stacked_experts=stacked)
        lacking = {
            name: np.zeros(shape, np.float32)
            for name, shape in wanted.items()
            if name not in model.shapes
        }
        return load((model.config, {**model.tensors, **lacking}) if lacking else source)

    engine.load = faulty


def _on_files(engine: Any, read: Callable[[_File], _File]) -> None:
    """Weights of a file that the engine loads are what `read` finds in it."""
    load = engine.load

    def faulty(source: Any) -> Any:
        model, file = load(source), _opened(source)
        if file is None:
            return model
        model.close()
        return load((open_model(source).config, _weights(read(file))))

    engine.load = faulty


def _tolerating(
    engine: Any, is_so: Callable[[_File], bool], read: Callable[[_File], _File]
) -> None:
    """A file that the engine refuses, and that is so, is loaded as `read` finds it."""
    load = engine.load

    def faulty(source: Any) -> Any:
        try:
            return load(source)
        except KdtrError:
            file = _opened(source)
            if file is None or not is_so(file):
                raise
            file = read(file)
            return load((_config(source, file), _weights(file)))

    engine.load = faulty


def _opened(source: Any) -> _File | None:
    """A KDTR file, or a checkpoint of one file; None for anything else."""
    if isinstance(source, tuple):
        return None
    path = Path(source)
    if not path.is_dir():
        return _kdtr(path.read_bytes())
    files = sorted(path.glob("*.safetensors"))
    return _safetensors(files[0].read_bytes()) if len(files) == 1 else None


def _kdtr(data: bytes) -> _File:
    n_entries, dir_offset = struct.unpack_from("<QQ", data, 32)
    (first,) = struct.unpack_from("<Q", data, 80)
    tensors = []
    for at in range(dir_offset, dir_offset + 192 * n_entries, 192):
        name, dtype, ndim = struct.unpack_from("<96sHH", data, at)
        shape = struct.unpack_from(f"<{ndim}Q", data, at + 104)
        (offset,) = struct.unpack_from("<Q", data, at + 168)
        tensors.append(_Tensor(name.rstrip(b"\0").decode(), _KDTR[dtype], shape, offset))
    return _File(data, first, tensors)


def _safetensors(data: bytes) -> _File:
    (size,) = struct.unpack_from("<Q", data)
    first, header = 8 + size, json.loads(data[8 : 8 + size])
    tensors = [
        _Tensor(
            name,
            _SAFETENSORS[about["dtype"]],
            tuple(about["shape"]),
            first + about["data_offsets"][0],
        )
        for name, about in header.items()
        if name != "__metadata__"
    ]
    return _File(data, first, tensors)


def _arrays(file: _File) -> dict[str, np.ndarray]:
    return {
        one.name: np.frombuffer(
            file.data, one.dtype, one.n_bytes // np.dtype(one.dtype).itemsize, one.at
        ).reshape(one.shape)
        for one in file.tensors
    }


def _weights(file: _File) -> dict[str, np.ndarray]:
    """Under their checkpoint names."""
    return {
        name.removeprefix("weights/"): array
        for name, array in _arrays(file).items()
        if not name.startswith("config/")
    }


def _config(source: Any, file: _File) -> ModelConfig:
    if file.data[:8] == _MAGIC:
        return read_model(_arrays(file))[0]
    return ModelConfig.from_hf(json.loads((Path(source) / "config.json").read_text()))
