"""KDTR v1 in numbers: two structs, limits, the dtype table. FORMAT.md says what they mean."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import ml_dtypes
import numpy as np

MAGIC = (
    b"\x89KDTR\r\n\x1a"  # the high bit, CR LF and ^Z each break in one kind of text-mode transfer
)
MAJOR, MINOR = 1, 0

HEADER_SIZE = 128
ENTRY_SIZE = 192
HEADER = struct.Struct("<8sHHIQQQQQIIQQQQII20sI")
ENTRY = struct.Struct("<96sHHI8QQQII")
CRC_HEADER_OFFSET = 124  # crc_header covers the bytes before it
assert (HEADER.size, ENTRY.size) == (HEADER_SIZE, ENTRY_SIZE)

NAME_SIZE = 96  # one byte of it is always the terminating NUL
MAX_NDIM = 8
MAX_ELEMENTS = 2**48  # zero dimensions counted as one: no product in a reader can overflow 64 bits
MIN_ALIGNMENT, DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 64, 256, 65536  # powers of two, in bytes
MAX_META_SIZE = 16 * 1024 * 1024


class Header(NamedTuple):
    """The header's fields in file order; sizes and offsets in bytes."""

    magic: bytes
    major: int
    minor: int
    header_size: int
    incompatible: int
    compatible: int
    n_entries: int
    dir_offset: int
    dir_size: int
    entry_size: int
    alignment: int
    meta_offset: int
    meta_size: int
    data_offset: int
    file_size: int
    crc_dir: int
    crc_meta: int
    reserved: bytes
    crc_header: int


@dataclass(frozen=True, slots=True)
class Dtype:
    """One line of the dtype table: the KDTR name and code, the width, the NumPy dtype."""

    name: str
    code: int
    bits: int
    numpy: np.dtype

    def n_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of the payload; only i4x2 rounds up, for the spare nibble."""
        return (prod(shape) * self.bits + 7) // 8


# Codes are part of the format: append, never renumber. 0 is none, so a zeroed entry is refused.
DTYPES = (
    Dtype("f64", 1, 64, np.dtype("<f8")),
    Dtype("f32", 2, 32, np.dtype("<f4")),
    Dtype("f16", 3, 16, np.dtype("<f2")),
    Dtype("bf16", 4, 16, np.dtype(ml_dtypes.bfloat16)),
    Dtype("f8e4m3", 5, 8, np.dtype(ml_dtypes.float8_e4m3fn)),
    Dtype("f8e5m2", 6, 8, np.dtype(ml_dtypes.float8_e5m2)),
    Dtype("i64", 7, 64, np.dtype("<i8")),
    Dtype("i32", 8, 32, np.dtype("<i4")),
    Dtype("i8", 9, 8, np.dtype("i1")),
    Dtype("i4x2", 10, 4, np.dtype(ml_dtypes.int4)),
    Dtype("u64", 11, 64, np.dtype("<u8")),
    Dtype("u32", 12, 32, np.dtype("<u4")),
    Dtype("u8", 13, 8, np.dtype("u1")),
    Dtype("bool", 14, 8, np.dtype("?")),
)
DTYPE_BY_CODE = {dtype.code: dtype for dtype in DTYPES}
DTYPE_BY_NAME = {dtype.name: dtype for dtype in DTYPES}
DTYPE_BY_NUMPY = {dtype.numpy: dtype for dtype in DTYPES}
