"""Everything in a KDTR file except the payloads: parse it, and refuse whatever FORMAT.md refuses.

The file is hostile until proven otherwise. Each number is compared with the file's size before it
is used, all arithmetic is on Python integers, and the only reads are the header, the directory, the
metadata and the gaps, each inside a range already checked.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from mmap import mmap
from typing import Any

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import layout
from kdtr.kdtr_format.foreign import looks_like
from kdtr.kdtr_format.layout import DTYPE_BY_CODE, ENTRY_SIZE, HEADER_SIZE, Dtype, Header
from kdtr.kdtr_format.metadata import decode_metadata

CUT = "the file was cut or edited"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor: KDTR dtype name, shape; its bytes are offset .. offset + n_bytes of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Structure:
    """A file's validated header, directory and metadata."""

    header: Header
    entries: tuple[Entry, ...]
    metadata: dict[str, Any]


def read_structure(data: mmap | bytes) -> Structure:
    """Validate all of `data` but the payloads, in the order of FORMAT.md.

    BundleError says what the first fault is.
    """
    header = _read_header(data)
    directory = data[header.dir_offset : header.dir_offset + header.dir_size]
    metadata = data[header.meta_offset : header.meta_offset + header.meta_size]
    _check_crc("directory", directory, header.crc_dir)
    _check_crc("metadata", metadata, header.crc_meta)
    entries = _read_directory(directory, header)
    _check_gaps(data, header, entries)
    return Structure(header, entries, decode_metadata(metadata))


def _read_header(data: mmap | bytes) -> Header:
    size = len(data)
    if data[:8] != layout.MAGIC:
        raise BundleError(
            f"not a KDTR file: {looks_like(data)}; "
            f"expected it to start with {layout.MAGIC.hex(' ')}"
        )
    if size < HEADER_SIZE:
        raise BundleError(f"the file has {size} bytes, the header alone takes {HEADER_SIZE}; {CUT}")
    h = Header._make(layout.HEADER.unpack(data[:HEADER_SIZE]))
    if h.major != layout.MAJOR:  # before the checksum: another version may keep it elsewhere
        raise BundleError(
            f"format version {h.major}.{h.minor}, this reader knows {layout.MAJOR}.x; "
            f"use the kdtr that wrote the file, or regenerate it"
        )
    _check_crc("header", data[: layout.CRC_HEADER_OFFSET], h.crc_header)
    if h.incompatible:
        raise BundleError(
            f"needs the features {h.incompatible:#x}, this reader knows none; use a newer kdtr"
        )
    _expect("header_size", h.header_size, HEADER_SIZE)
    _expect("entry_size", h.entry_size, ENTRY_SIZE)
    if any(h.reserved):
        raise BundleError(f"the header's reserved bytes are {h.reserved.hex()}; expected zeros")
    low, high = layout.MIN_ALIGNMENT, layout.MAX_ALIGNMENT
    if not low <= h.alignment <= high or h.alignment & (h.alignment - 1):
        raise BundleError(
            f"alignment is {h.alignment}; expected a power of two from {low} to {high}"
        )
    if h.file_size != size:
        raise BundleError(f"the header says {h.file_size} bytes, the file has {size}; {CUT}")
    _expect("dir_offset", h.dir_offset, HEADER_SIZE)
    if h.n_entries * ENTRY_SIZE > size:
        raise BundleError(
            f"{h.n_entries} entries of {ENTRY_SIZE} bytes do not fit a file of {size}"
        )
    _expect("dir_size", h.dir_size, h.n_entries * ENTRY_SIZE)
    _expect("meta_offset", h.meta_offset, h.dir_offset + h.dir_size)
    if h.meta_size > layout.MAX_META_SIZE:
        raise BundleError(f"meta_size is {h.meta_size}; at most {layout.MAX_META_SIZE}")
    meta_end = h.meta_offset + h.meta_size
    _expect("data_offset", h.data_offset, _round_up(meta_end, h.alignment))
    if h.data_offset > size:
        raise BundleError(f"data_offset is {h.data_offset}, past the file's end at {size}; {CUT}")
    return h


def _read_directory(directory: bytes, header: Header) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    previous = b""
    end = header.data_offset
    for index, fields in enumerate(layout.ENTRY.iter_unpack(directory)):
        padded_name, code, ndim, flags, *dims, offset, n_bytes, crc, reserved = fields
        name = _read_name(padded_name, index)
        _check_order(padded_name, previous, name)
        tensor = f"tensor {name!r}"
        if flags or reserved:
            raise BundleError(
                f"{tensor} has flags {flags:#x} and reserved {reserved:#x}; expected zeros"
            )
        dtype, shape = _read_type(tensor, code, ndim, dims)
        needed = dtype.n_bytes(shape)
        if n_bytes != needed:
            raise BundleError(
                f"{tensor} spans bytes {offset}..{offset + n_bytes}, "
                f"but {list(shape)} {dtype.name} takes {needed}; {CUT}"
            )
        entry = Entry(name, dtype.name, shape, offset, n_bytes, crc)
        _check_place(entry, end, header)
        previous, end = padded_name, offset + n_bytes
        entries.append(entry)
    if end != header.file_size:
        raise BundleError(
            f"the last tensor ends at byte {end}, the file at {header.file_size}; "
            f"expected no trailing bytes"
        )
    return tuple(entries)


def _read_name(raw: bytes, index: int) -> str:
    text, _, padding = raw.partition(b"\0")
    if not text:
        raise BundleError(f"entry {index} has an empty name")
    if len(text) == layout.NAME_SIZE:
        raise BundleError(f"entry {index}: the name has no NUL in its {layout.NAME_SIZE} bytes")
    if any(padding):
        raise BundleError(f"entry {index}: the name {text!r} is padded with non-zero bytes")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BundleError(
            f"entry {index}: the name {text!r} is not UTF-8 at byte {error.start}: {error.reason}"
        ) from None


def _check_order(padded_name: bytes, previous: bytes, name: str) -> None:
    # zeros sort first and names hold none, so padded names compare as the names do
    if padded_name == previous:
        raise BundleError(f"tensor {name!r} is there twice; expected unique names")
    if padded_name < previous:
        before = previous.rstrip(b"\0").decode()
        raise BundleError(f"tensor {name!r} comes after {before!r}; expected bytewise order")


def _read_type(
    tensor: str, code: int, ndim: int, dims: Sequence[int]
) -> tuple[Dtype, tuple[int, ...]]:
    """The dtype, and of the dims [8] the ndim that are the shape."""
    dtype = DTYPE_BY_CODE.get(code)
    if dtype is None:
        raise BundleError(f"{tensor} has dtype code {code}; expected 1 to {len(DTYPE_BY_CODE)}")
    if ndim > layout.MAX_NDIM:
        raise BundleError(f"{tensor} has {ndim} dimensions; at most {layout.MAX_NDIM}")
    shape, unused = tuple(dims[:ndim]), dims[ndim:]
    if any(unused):
        raise BundleError(
            f"{tensor} has {ndim} dimensions, but the unused ones are {unused}; expected zeros"
        )
    if prod(n or 1 for n in shape) > layout.MAX_ELEMENTS:
        raise BundleError(
            f"{tensor} has shape {list(shape)}; at most 2**48 elements, zeros counted as ones"
        )
    return dtype, shape


def _check_place(entry: Entry, end: int, header: Header) -> None:
    """The entry lies exactly where FORMAT.md places it after `end`, and inside the file."""
    expected = _round_up(end, header.alignment) if entry.n_bytes else end
    where = f"tensor {entry.name!r} starts at byte {entry.offset}"
    if entry.offset < end:
        raise BundleError(
            f"{where}, before byte {end} where the part before it ends; expected {expected}"
        )
    if entry.n_bytes and entry.offset % header.alignment:
        raise BundleError(
            f"{where}, not a multiple of the alignment {header.alignment}; expected {expected}"
        )
    if entry.offset != expected:
        raise BundleError(f"{where}, which leaves a hole; expected {expected}")
    if entry.offset + entry.n_bytes > header.file_size:
        raise BundleError(
            f"tensor {entry.name!r} spans bytes {entry.offset}..{entry.offset + entry.n_bytes}, "
            f"the file ends at {header.file_size}; {CUT}"
        )


def _check_gaps(data: mmap | bytes, header: Header, entries: tuple[Entry, ...]) -> None:
    """Bytes between parts are zero; a gap is shorter than the alignment, so this reads little."""
    end = header.meta_offset + header.meta_size
    starts = [(header.data_offset, header.data_offset)]
    starts += [(entry.offset, entry.offset + entry.n_bytes) for entry in entries]
    for start, next_end in starts:
        gap = data[end:start]
        if any(gap):
            first = len(gap) - len(gap.lstrip(b"\0"))
            raise BundleError(
                f"byte {end + first} is {gap[first]:#04x}, in the gap {end}..{start}; "
                f"expected zeros"
            )
        end = next_end


def _check_crc(part: str, data: bytes, stored: int) -> None:
    actual = zlib.crc32(data)
    if actual != stored:
        raise BundleError(f"{part} checksum is {stored:08x}, its bytes give {actual:08x}; {CUT}")


def _expect(field: str, value: int, expected: int) -> None:
    if value != expected:
        raise BundleError(f"{field} is {value}; expected {expected}")


def _round_up(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment
