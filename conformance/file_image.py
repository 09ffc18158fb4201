"""Files of weights byte by byte, sound and broken: what a writer of files would never write.

A KDTR file as in FORMAT.md, and a safetensors file: the length of a JSON header in 8 bytes, the
header with dtype, shape and place of each tensor, then the payloads.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.kdtr_format import layout

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One tensor of a file; two of a file may have the same name."""

    name: str
    array: np.ndarray

    @property
    def payload(self) -> bytes:
        return np.ascontiguousarray(self.array).tobytes()


def parts_of(tensors: Mapping[str, np.ndarray]) -> list[Part]:
    """In the order in which both forms are written: by name."""
    return [Part(name, np.asarray(tensors[name])) for name in sorted(tensors)]


def kdtr_image(
    parts: Sequence[Part],
    *,
    alignment: int = layout.DEFAULT_ALIGNMENT,
    placed: Sequence[int] | None = None,
) -> bytes:
    """A KDTR file with these tensors in its directory, checksums and all.

    placed  the order of the payloads, as indices of parts; None: that of the directory
    """
    metadata = b"{}"
    dir_size = layout.ENTRY_SIZE * len(parts)
    meta_offset = layout.HEADER_SIZE + dir_size
    data_offset = _rounded_up(meta_offset + len(metadata), alignment)
    body, offsets = bytearray(), {}
    for i in range(len(parts)) if placed is None else placed:
        body += bytes(_rounded_up(len(body), alignment) - len(body))
        offsets[i] = data_offset + len(body)
        body += parts[i].payload
    directory = b"".join(_entry(part, offsets[i]) for i, part in enumerate(parts))
    fields = layout.Header(
        layout.MAGIC,
        layout.MAJOR,
        layout.MINOR,
        layout.HEADER_SIZE,
        0,
        0,
        len(parts),
        layout.HEADER_SIZE,
        dir_size,
        layout.ENTRY_SIZE,
        alignment,
        meta_offset,
        len(metadata),
        data_offset,
        data_offset + len(body),
        zlib.crc32(directory),
        zlib.crc32(metadata),
        bytes(20),
        0,
    )
    unsigned = layout.HEADER.pack(*fields)[: layout.CRC_HEADER_OFFSET]
    head = unsigned + struct.pack("<I", zlib.crc32(unsigned)) + directory + metadata
    return head + bytes(data_offset - len(head)) + bytes(body)


def safetensors_image(parts: Sequence[Part], *, placed: Sequence[int] | None = None) -> bytes:
    """A safetensors file with these tensors in its header; `placed` as above."""
    body, offsets = bytearray(), {}
    for i in range(len(parts)) if placed is None else placed:
        offsets[i] = len(body)
        body += parts[i].payload
    entries = []
    for i, part in enumerate(parts):
        about = {
            "dtype": _SAFETENSORS[part.array.dtype.name],
            "shape": [*part.array.shape],
            "data_offsets": [offsets[i], offsets[i] + part.array.nbytes],
        }
        entries.append(f"{json.dumps(part.name)}:{json.dumps(about)}")
    header = f"{{{','.join(entries)}}}".encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + bytes(body)


def _entry(part: Part, offset: int) -> bytes:
    array, payload = part.array, part.payload
    dims = [*array.shape, *[0] * (layout.MAX_NDIM - array.ndim)]
    code = layout.DTYPE_BY_NUMPY[array.dtype].code
    name = part.name.encode()
    return layout.ENTRY.pack(
        name, code, array.ndim, 0, *dims, offset, len(payload), zlib.crc32(payload), 0
    )


def _rounded_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
