"""Writing a KDTR file: equal tensors and metadata give equal bytes, in any order, on any machine.

Names, dtypes, shapes and metadata are all checked before a file is touched. The bytes go to a
temporary sibling, which replaces the target only when it is complete and on disk.
"""

import hashlib
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import layout
from kdtr.kdtr_format.int4 import pack_i4x2
from kdtr.kdtr_format.layout import DTYPE_BY_NUMPY, Dtype, Header
from kdtr.kdtr_format.metadata import encode_metadata


@dataclass(frozen=True, slots=True)
class _Planned:
    """A tensor's place in the file, known from its dtype and shape alone; offset in bytes."""

    name: str
    raw_name: bytes
    dtype: Dtype
    shape: tuple[int, ...]
    offset: int


def write_bundle(
    path: str | os.PathLike[str],
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    *,
    alignment: int = layout.DEFAULT_ALIGNMENT,
) -> str:
    """Write `tensors` and `metadata` to `path`; returns the SHA-256 of the file in hex.

    tensors    NumPy arrays of the dtypes in layout.DTYPES (ml_dtypes.int4 becomes i4x2), any
               strides and byte order. The mapping may be lazy: each tensor is asked for twice,
               first for its dtype and shape, and one at a time is held or copied.
    metadata   what canonical JSON can say: no floats, store float.hex() instead
    alignment  bytes; a power of two from 64 to 65536

    BundleError when something cannot be stored, before anything is written. After any failure, an
    earlier file at `path` is what it was.
    """
    _check_alignment(alignment)
    if Path(path).exists() and not Path(path).is_file() and not Path(path).is_dir():
        raise BundleError(
            f"{path} is no regular file; expected a file to write"
        )  # a device, a pipe
    meta = encode_metadata(metadata)
    names = sorted((_encode_name(name), name) for name in tensors)
    meta_end = layout.HEADER_SIZE + len(names) * layout.ENTRY_SIZE + len(meta)
    data_offset = _aligned(meta_end, alignment)
    plan, file_size = _plan(tensors, names, data_offset, alignment)
    with _replacement(Path(path)) as file:
        file.write(bytes(data_offset))  # header and directory follow once the checksums are known
        crcs = [_write_tensor(file, planned, tensors[planned.name]) for planned in plan]
        directory = b"".join(_entry(planned, crc) for planned, crc in zip(plan, crcs, strict=True))
        file.seek(0)
        file.write(_header(directory, meta, len(plan), alignment, data_offset, file_size))
        file.write(directory + meta)
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_alignment(alignment: int) -> None:
    low, high = layout.MIN_ALIGNMENT, layout.MAX_ALIGNMENT
    if not low <= alignment <= high or alignment & (alignment - 1):
        raise BundleError(f"alignment is {alignment}; expected a power of two from {low} to {high}")


def _plan(
    tensors: Mapping[str, np.ndarray],
    names: list[tuple[bytes, str]],
    data_offset: int,
    alignment: int,
) -> tuple[list[_Planned], int]:
    """The tensors in file order, each at its offset, and the file's size."""
    plan = []
    end = data_offset
    for raw_name, name in names:
        array = tensors[name]
        dtype = _dtype_of(name, array)
        shape = tuple(int(n) for n in array.shape)
        if len(shape) > layout.MAX_NDIM:
            raise BundleError(
                f"tensor {name!r} has {len(shape)} dimensions; at most {layout.MAX_NDIM}"
            )
        if prod(n or 1 for n in shape) > layout.MAX_ELEMENTS:
            raise BundleError(
                f"tensor {name!r} has shape {list(shape)}; "
                f"at most 2**48 elements, zeros counted as ones"
            )
        n_bytes = dtype.n_bytes(shape)
        offset = _aligned(end, alignment) if n_bytes else end
        plan.append(_Planned(name, raw_name, dtype, shape, offset))
        end = offset + n_bytes
    return plan, end


def _encode_name(name: str) -> bytes:
    if not isinstance(name, str):
        raise BundleError(f"tensor name {name!r} is a {type(name).__name__}; expected str")
    try:
        raw = name.encode("utf-8")
    except UnicodeEncodeError:
        raise BundleError(
            f"tensor name {name!r} has a lone surrogate, which UTF-8 does not encode"
        ) from None
    if not 1 <= len(raw) < layout.NAME_SIZE or b"\0" in raw:
        raise BundleError(
            f"tensor name {name!r} takes {len(raw)} bytes of UTF-8; "
            f"expected 1 to {layout.NAME_SIZE - 1} and no NUL"
        )
    return raw


def _dtype_of(name: str, array: np.ndarray) -> Dtype:
    # a list or a masked array would have to be guessed at: the platform's integer, a lost mask
    if not isinstance(array, np.ndarray | np.generic) or isinstance(array, np.ma.MaskedArray):
        raise BundleError(f"tensor {name!r} is a {type(array).__name__}; expected a NumPy array")
    dtype = DTYPE_BY_NUMPY.get(array.dtype.newbyteorder("="))
    if dtype is None:
        known = " ".join(dtype.name for dtype in layout.DTYPES)
        raise BundleError(f"tensor {name!r} has dtype {array.dtype}; expected one of {known}")
    return dtype


def _write_tensor(file: BufferedRandom, planned: _Planned, array: np.ndarray) -> int:
    """Zeros up to the tensor's offset, then its payload; returns the payload's CRC-32."""
    dtype = _dtype_of(planned.name, array)
    if dtype != planned.dtype or array.shape != planned.shape:
        raise BundleError(
            f"tensor {planned.name!r} is {list(array.shape)} {dtype.name}, "
            f"when first asked for it was {list(planned.shape)} {planned.dtype.name}; "
            f"a mapping must not change while it is written"
        )
    payload = _payload(array, dtype)
    file.write(bytes(planned.offset - file.tell()))
    file.write(payload.data)
    return zlib.crc32(payload.data)


def _payload(array: np.ndarray, dtype: Dtype) -> np.ndarray:
    """The tensor's bytes in file order, uint8 [n_bytes]; copied only if they lie otherwise."""
    if dtype.name == "i4x2":
        return pack_i4x2(array)
    flat = np.ascontiguousarray(array, dtype=dtype.numpy).reshape(-1).view(np.uint8)
    if dtype.name == "bool":
        return np.not_equal(flat, 0).view(np.uint8)  # a bool viewed from other bytes may hold 2
    return flat


def _header(
    directory: bytes, meta: bytes, n_entries: int, alignment: int, data_offset: int, file_size: int
) -> bytes:
    header = Header(
        magic=layout.MAGIC,
        major=layout.MAJOR,
        minor=layout.MINOR,
        header_size=layout.HEADER_SIZE,
        incompatible=0,
        compatible=0,
        n_entries=n_entries,
        dir_offset=layout.HEADER_SIZE,
        dir_size=len(directory),
        entry_size=layout.ENTRY_SIZE,
        alignment=alignment,
        meta_offset=layout.HEADER_SIZE + len(directory),
        meta_size=len(meta),
        data_offset=data_offset,
        file_size=file_size,
        crc_dir=zlib.crc32(directory),
        crc_meta=zlib.crc32(meta),
        reserved=b"",
        crc_header=0,
    )
    checked = layout.HEADER.pack(*header)[: layout.CRC_HEADER_OFFSET]
    return checked + zlib.crc32(checked).to_bytes(4, "little")


def _entry(planned: _Planned, crc: int) -> bytes:
    ndim = len(planned.shape)
    shape = planned.shape + (0,) * (layout.MAX_NDIM - ndim)
    n_bytes = planned.dtype.n_bytes(planned.shape)
    return layout.ENTRY.pack(
        planned.raw_name, planned.dtype.code, ndim, 0, *shape, planned.offset, n_bytes, crc, 0
    )


@contextmanager
def _replacement(target: Path) -> Iterator[BufferedRandom]:
    """A temporary sibling of `target` that takes its place on success and vanishes on failure."""
    if target.is_dir():
        raise BundleError(f"{target}: is a directory; expected the path of a file")
    sibling = target.parent / f".kdtr-{secrets.token_hex(8)}.tmp"
    try:
        file = open(sibling, "x+b")  # noqa: SIM115 - its errors differ from those of its use
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        why = getattr(error, "strerror", None) or error
        raise BundleError(f"{target}: cannot be written: {why}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(sibling, target)
    except BaseException as error:
        sibling.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BundleError(f"{target}: cannot be written: {error.strerror or error}") from error
        raise
    _fsync_directory(target.parent)


def _fsync_directory(directory: Path) -> None:
    """Make the rename itself survive a power cut, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _aligned(n: int, alignment: int) -> int:
    # structure.py has its own: a mistake in one shared helper would be written and then accepted
    return -(-n // alignment) * alignment
