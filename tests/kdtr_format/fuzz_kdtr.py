"""Differential fuzz of the two KDTR readers: python tests/kdtr_format/fuzz_kdtr.py --count 10000

Small bundles are damaged, most get fitting checksums again, and kdtr.h (under ASan and UBSan) and
the Python reader must say the same about every file: the same step and text of a refusal, or the
same entries and payloads. Where FORMAT.md alone decides the verdict, both must give that one.

Mutant i of a seed is always the same: --only i makes that one, --keep writes it to a file.
"""

import argparse
import hashlib
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.kdtr_format.layout import DTYPES, ENTRY, HEADER, Header
from kdtr.kdtr_format.metadata import encode_metadata

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DRIVER = HERE / "c/driver.c"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wconversion", "-Wshadow")
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
BATCH = 1000


# The C side


def compiler(language: str = "c") -> str | None:
    """CC or CXX, else gcc or g++, else what the system calls its compiler; None without any."""
    variable, *names = {"c": ("CC", "gcc", "cc"), "c++": ("CXX", "g++", "c++")}[language]
    return os.environ.get(variable) or next(filter(None, map(shutil.which, names)), None)


def compile_c(source: Path, program: Path, *flags: str, language: str = "c") -> Path:
    """The program of one C source that includes kdtr.h; any warning is an error."""
    if compiler(language) is None:
        raise RuntimeError(f"no compiler for {language}: install gcc and g++, or set CC and CXX")
    command = [compiler(language), "-x", language, *flags, *STRICT, f"-I{ROOT / 'kdtr_format'}"]
    done = subprocess.run(
        [*command, source, "-o", program], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{source.name} does not compile:\n{done.stderr}")
    return program


def c_verdicts(driver: Path, files: list[bytes]) -> list[str]:
    """The driver's lines; after a crash the last one says so, and those after it are missing."""
    stream = b"".join(struct.pack("<I", len(data)) + data for data in files)
    done = subprocess.run([driver, "judge"], input=stream, capture_output=True, check=False)
    lines = done.stdout.decode().splitlines()
    if done.returncode:
        lines.append(f"crash, exit status {done.returncode}: {done.stderr.decode()[-3000:]}")
    return lines


# The Python side

# The step of FORMAT.md that a text belongs to, by how it starts or by what it says of a tensor.
STEPS = {
    1: "the file is empty|no such file|is a directory|is not a regular file|cannot be read",
    2: r"not a KDTR file|the file has \d+ bytes|format version|header checksum|needs the features|"
    "header_size is|entry_size is|the header's reserved bytes|alignment is|the header says|"
    r"dir_offset is|\d+ entries of|dir_size is|meta_offset is|meta_size is|data_offset is",
    3: "(directory|metadata) checksum",
    4: r"entry \d+[: ]|tensor '.*' (is there twice|comes after|has flags|has dtype code|"
    r"has \d+ dimensions|has shape|spans bytes|starts at byte)|the last tensor ends",
    5: r"byte \d+ is 0x.., in the gap",
    6: r"metadata(?! checksum)|a key of metadata",
    7: "tensor '.*' (has checksum|is bool|has the spare nibble)",
}
_STEP = {step: re.compile(pattern) for step, pattern in STEPS.items()}


def python_verdict(path: Path) -> str:
    """What the driver says about the file, from the Python reader."""
    try:
        with Bundle.open(path) as bundle:
            bundle.verify()
            said = [f"0 {bundle.version[1]} {_hex(encode_metadata(bundle.metadata))}"]
            for e in bundle.entries:
                shape = ",".join(map(str, e.shape))
                payload = _hex(bundle.payload(e.name).tobytes())
                said.append(
                    f"{_hex(e.name.encode())}:{e.dtype}:{shape}:{e.offset}:{e.n_bytes}:"
                    f"{e.crc:08x}:{payload}"
                )
            return " ".join(said)
    except BundleError as error:
        text = str(error).removeprefix(f"{path}: ")
    except Exception as error:
        return f"crash, {type(error).__name__}: {error}"
    plain = comparable(text)
    return f"{next((s for s, pattern in _STEP.items() if pattern.match(plain)), '?')} {text}"


def _hex(data: bytes) -> str:
    return data.hex() or "-"


def comparable(text: str) -> str:
    """A refusal without that in which the readers may differ: the spelling of odd names, hints."""
    text = re.sub(r"""(?<!\w)b?('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", _plain_name, text)
    text = re.sub(r"(is not UTF-8).*?( at byte \d+).*", r"\1\2", text)
    text = re.sub(r"(not a KDTR file):.*", r"\1", text, flags=re.DOTALL)
    return re.sub(r"(?<=\.\.)\d{20,}", lambda n: "past 2**64" if int(n[0]) >= 2**64 else n[0], text)


def _plain_name(match: re.Match[str]) -> str:
    return match[1] if re.fullmatch(r"'[ -\[\]-~]*'", match[1]) else "'?'"


def agree(python: str, c: str) -> bool:
    """The same verdict; what only a JSON parser can refuse, C may accept or refuse in step 7."""
    if python.startswith("6 ") and "is not UTF-8" not in python:
        return c.startswith(("0 ", "7 "))
    return comparable(python) == comparable(c)


# Small bundles to damage


@dataclass(frozen=True)
class Seed:
    """A good file, and what its bytes are: starts[i] is where part parts[i] begins."""

    name: str
    data: bytes
    starts: list[int]
    parts: list[str]
    header: Header
    entries: list[tuple]

    def part(self, at: int) -> str:
        return self.parts[bisect_right(self.starts, at) - 1]


_WIDTHS = (8, 2, 2, 4, *[8] * 5, 4, 4, *[8] * 4, 4, 4, 20, 4)
_HEADER_SIZES = dict(zip(Header._fields, _WIDTHS, strict=True))
_ENTRY_SIZES = {"name": 96, "dtype": 2, "ndim": 2, "flags": 4}
_ENTRY_SIZES |= {f"shape{i}": 8 for i in range(8)}
_ENTRY_SIZES |= {"offset": 8, "n_bytes": 8, "crc": 4, "reserved": 4}


def make_seed(name: str, data: bytes) -> Seed:
    header = Header._make(HEADER.unpack(data[:128]))
    entries = list(ENTRY.iter_unpack(data[128 : header.meta_offset]))
    marks, at = [], 0
    for field_name, size in _HEADER_SIZES.items():
        marks.append((at, field_name))
        at += size
    for i in range(len(entries)):
        for field_name, size in _ENTRY_SIZES.items():
            marks.append((at, f"entry{i}.{field_name}"))
            at += size
    spans = [(header.meta_offset, header.meta_size, "metadata")]
    spans += [(e[12], e[13], f"payload{i}") for i, e in enumerate(entries)]
    for start, size, part in spans:
        if start > at:
            marks.append((at, "gap"))
        if size:
            marks.append((start, part))
        at = start + size
    if at < len(data):
        marks.append((at, "gap"))
    starts, parts = zip(*marks, strict=True)
    return Seed(name, data, list(starts), list(parts), header, entries)


def make_seeds(folder: Path) -> list[Seed]:
    rng = np.random.default_rng(1)

    def values(dtype, *shape):
        codes = rng.integers(0, 2 if dtype.name in ("bool", "i4x2") else 256, (*shape, 8), np.uint8)
        if dtype.name == "i4x2":
            return codes[..., 0].astype(ml_dtypes.int4)
        raw = np.ascontiguousarray(codes[..., : dtype.bits // 8])
        return raw.view(dtype.numpy).reshape(shape)

    every = {d.name: values(d, 2, 3) for d in DTYPES}
    f32, i4, flag = DTYPES[1], DTYPES[9], DTYPES[13]
    shapes = {
        "a": values(f32),
        "a/b": values(f32, 0),
        "ab": values(i4, 3),
        "b": values(f32, 2, 0, 3),
        "c": values(f32, *[1, 2] * 4),
        "d": values(i4),
        "e": values(flag, 5),
        "z": values(f32, 0, 0),
    }
    names = {
        n: values(DTYPES[12], 1 + i) for i, n in enumerate(["x" * 95, "'\"\\", "é", "\U0001f333"])
    }
    bundles = {
        "none": ({}, {}, 64),
        "scalar": ({"config/n": values(DTYPES[6])}, {"k": 1}, 256),
        "every dtype": (every, {"case": "chain", "seed": 7}, 64),
        "shapes": (shapes, {"a": [1, {"b": "é\n"}], "c": None}, 64),
        "names": (names, {"x": "y" * 50}, 128),
        "long": ({"a": values(f32, 150), "b": values(flag, 700)}, {}, 1024),  # both crc32 loops
    }
    seeds = []
    for name, (tensors, metadata, alignment) in bundles.items():
        write_bundle(folder / "seed.kdtr", tensors, metadata, alignment=alignment)
        seeds.append(make_seed(name, (folder / "seed.kdtr").read_bytes()))
    return seeds


# Mutations: (draws, seed, all seeds) -> the damaged file and what was done

Draw = random.Random
Damaged = tuple[bytes, str]


def pick(draw: Draw, seed: Seed) -> int:
    """A byte; small parts are as likely as large ones."""
    kind = draw.choice(sorted({re.sub(r"\d+", "", part) for part in seed.parts}))
    i = draw.choice([i for i, p in enumerate(seed.parts) if re.sub(r"\d+", "", p) == kind])
    end = seed.starts[i + 1] if i + 1 < len(seed.starts) else len(seed.data)
    return draw.choice([seed.starts[i], end - 1, *[draw.randrange(seed.starts[i], end)] * 2])


def overwrite(data: bytes, at: int, new: bytes) -> bytes:
    return (data[:at] + new + data[at + len(new) :])[: len(data)]


def flip_bit(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    at, bit = pick(draw, seed), draw.randrange(8)
    new = bytes([seed.data[at] ^ 1 << bit])
    return overwrite(seed.data, at, new), f"bit {bit} of byte {at} ({seed.part(at)}) flipped"


def set_bytes(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    data, said = seed.data, []
    for _ in range(draw.choice([1, 1, 2, 5])):
        at, value = pick(draw, seed), draw.choice([0, 1, 2, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        data = overwrite(data, at, bytes([value]))
        said.append(f"byte {at} ({seed.part(at)}) = {value:#x}")
    return data, ", ".join(said)


def set_range(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    at, n = pick(draw, seed), draw.choice([2, 4, 8, 32, 200])
    new = draw.choice([bytes(n), b"\xff" * n, draw.randbytes(n)])
    return overwrite(seed.data, at, new), f"{n} bytes at {at} ({seed.part(at)}) overwritten"


def truncate(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    size = draw.choice([pick(draw, seed), draw.choice(seed.starts), len(seed.data) - 1, 0])
    return seed.data[:size], f"cut to {size} bytes"


def extend(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    n = draw.choice([1, 7, 64, 1000])
    more = draw.choice([bytes(n), draw.randbytes(n)])
    return seed.data + more, f"{n} bytes appended"


def insert(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    at, n = pick(draw, seed), draw.choice([1, 64, 192])
    return seed.data[:at] + bytes(n) + seed.data[at:], f"{n} zeros inserted at {at}"


def delete(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    at, n = pick(draw, seed), draw.choice([1, 64, 192])
    return seed.data[:at] + seed.data[at + n :], f"{n} bytes deleted at {at}"


def splice(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    other = draw.choice(seeds)
    at, start = pick(draw, seed), pick(draw, other)
    start = draw.choice([at, start])
    data = seed.data[:at] + other.data[start:]
    return data, f"first {at} bytes, then {other.name!r} from byte {start}"


def _number(draw: Draw, old: int, size: int, width: int) -> int:
    near = [old - 1, old + 1, old * 2, old ^ 1 << draw.randrange(8 * width), -old]
    edges = [0, 1, 8, 9, 64, 256, size, size - 1, 2**32 - 1, 2**48, 2**48 + 1, 2**63, 2**64 - 1]
    value = draw.choice([draw.choice(near), draw.choice(edges), draw.getrandbits(8 * width)])
    return value % 2 ** (8 * width)


def header_field(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    name = draw.choice(Header._fields)
    at = seed.starts[seed.parts.index(name)]
    width = min(8, _HEADER_SIZES[name])
    old = int.from_bytes(seed.data[at : at + width], "little")
    value = _number(draw, old, len(seed.data), width)
    return overwrite(seed.data, at, value.to_bytes(width, "little")), f"{name} = {value}"


def entry_field(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    if not seed.entries:
        return header_field(draw, seed, seeds)
    i, name = draw.randrange(len(seed.entries)), draw.choice(list(_ENTRY_SIZES))
    if name == "name":
        return entry_name(draw, seed, seeds)
    at = seed.starts[seed.parts.index(f"entry{i}.{name}")]
    width = _ENTRY_SIZES[name]
    old = int.from_bytes(seed.data[at : at + width], "little")
    value = _number(draw, old, len(seed.data), width)
    value = draw.choice([value, draw.randrange(16)])
    return overwrite(seed.data, at, value.to_bytes(width, "little")), f"entry{i}.{name} = {value}"


_NOT_UTF8 = (b"\x80", b"\xc0\x80", b"\xc2", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xe2\x82", b"\xff")
_NOT_UTF8 += (
    b"\xf0\x80\x80\x80",
    b"\xf4\x90\x80\x80",
    b"\xf5\x80\x80\x80",
    b"\xc3(",
    b"\xf1\x80\x80(",
)
_EDGES = "\x7f\x80\u07ff\u0800\ud7ff\ue000\uffff\U00010000\U0010ffff"


def entry_name(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    if not seed.entries:
        return header_field(draw, seed, seeds)
    i = draw.randrange(len(seed.entries))
    old = seed.entries[i][0].rstrip(b"\0")
    other = draw.choice(seed.entries)[0].rstrip(b"\0")
    letter = draw.choice(_EDGES).encode()
    names = [b"", b"n" * 96, old + b"\0n", old + draw.choice(_NOT_UTF8), old + letter, other]
    names += [old + b"!", old[:-1], b"\xc3\xa9" * 48, draw.choice(_NOT_UTF8) + old]
    new = draw.choice(names)[:96]
    data = overwrite(seed.data, 128 + 192 * i, new.ljust(96, b"\0"))
    return data, f"entry{i}.name = {new!r}"


def _with_entry(seed: Seed, i: int, shape: list[int], dtype: int | None = None) -> bytes:
    """Entry i with this shape, and the n_bytes that fit it, or fit it modulo 2^64."""
    name, code, _, flags, *_, offset, _, crc, reserved = seed.entries[i]
    code = dtype or code
    bits = DTYPES[code - 1].bits if 1 <= code <= 14 else 8
    n_bytes = (int(np.prod(shape, dtype=object)) * bits + 7) // 8 % 2**64
    dims = (shape + [0] * 8)[:8]
    entry = ENTRY.pack(name, code, len(shape), flags, *dims, offset, n_bytes, crc, reserved)
    return overwrite(seed.data, 128 + 192 * i, entry)


def entry_shape(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    if not seed.entries:
        return header_field(draw, seed, seeds)
    i = draw.choice([draw.randrange(len(seed.entries)), len(seed.entries) - 1])
    old = list(seed.entries[i][4 : 4 + seed.entries[i][2]])
    shapes = [draw.sample(old, len(old)), [*old, 1][:8], [1, *old][:8], [0, *old][:8], old[1:]]
    shapes += [[2**48], [2**24, 2**24], [2**24, 2**24 + 1], [2**32] * 2, [2**63, 2], [0, 2**49]]
    shapes += [[2**16] * 8, [n + 1 for n in old], [1] * 9, [2**48, 0, 1], [len(seed.data)]]
    shape = draw.choice(shapes)
    return _with_entry(seed, i, shape), f"entry{i} of shape {shape}, n_bytes to match"


def entry_dtype(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    if not seed.entries:
        return header_field(draw, seed, seeds)
    i, dtype = draw.randrange(len(seed.entries)), draw.randrange(1, 16)
    old = list(seed.entries[i][4 : 4 + seed.entries[i][2]])
    return _with_entry(seed, i, old, dtype), f"entry{i} of dtype {dtype}, n_bytes to match"


def payload_value(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    """Values that a bool, or the byte with a spare nibble, may not have."""
    kinds = {"bool", "i4x2"}
    hits = [i for i, e in enumerate(seed.entries) if e[13] and DTYPES[e[1] - 1].name in kinds]
    if not hits:
        return set_bytes(draw, seed, seeds)
    i, value = draw.choice(hits), draw.choice([1, 2, 0x0F, 0x10, 0x80, 0xFF])
    at = sum(seed.entries[i][12:14]) - 1
    return overwrite(seed.data, at, bytes([value])), f"last byte of payload{i} = {value:#x}"


def swap_entries(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    if not seed.entries:
        return header_field(draw, seed, seeds)
    i, j = draw.randrange(len(seed.entries)), draw.randrange(len(seed.entries))
    a, b = (seed.data[128 + 192 * n : 320 + 192 * n] for n in (i, j))
    data = overwrite(seed.data, 128 + 192 * i, b)
    both = draw.random() < 0.5
    data = overwrite(data, 128 + 192 * j, a) if both else data
    return data, f"entries {i} and {j} swapped" if both else f"entry {j} copied over {i}"


def metadata(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    """Other metadata in the same place: meta_size may change as far as the gap after it allows."""
    room = seed.header.data_offset - seed.header.meta_offset
    texts = [
        b"{}",
        b'{"a":1}',
        b'{ "a":1}',
        b'{"a":1.0}',
        b'{"b":1,"a":2}',
        b"[]",
        b"",
        b"{",
        b"\0",
    ]
    texts += [
        b'{"a":1,"a":1}',
        b'{"a":"\xff"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\\ud800"}',
        b'"a"',
    ]
    texts += [b'{"a":18446744073709551616}', b'{"a":' * 9, b'{"\xc3\xa9":null}', b"\xef\xbb\xbf{}"]
    texts += [
        seed.data[seed.header.meta_offset :][: seed.header.meta_size] + draw.choice([b"\0", b" "])
    ]
    text = draw.choice(texts)[:room]
    data = overwrite(seed.data, seed.header.meta_offset, text.ljust(room, b"\0"))
    return overwrite(data, 72, struct.pack("<Q", len(text))), f"metadata {text!r}"


def realign(draw: Draw, seed: Seed, seeds: list[Seed]) -> Damaged:
    """Another alignment or n_entries, with the numbers that follow from it."""
    h = seed.header
    n = draw.choice([h.n_entries, h.n_entries, max(0, h.n_entries - 1), h.n_entries + 1])
    alignment = draw.choice([64, 128, 256, 512, 65536, 96, 32, 131072])
    offset = 128 + 192 * n
    end = -(-(offset + h.meta_size) // alignment) * alignment
    h = h._replace(n_entries=n, dir_size=192 * n, meta_offset=offset, alignment=alignment)
    data = HEADER.pack(*h._replace(data_offset=end)) + seed.data[128:]
    return data, f"{n} entries, alignment {alignment}, the rest of the header to match"


MUTATIONS: tuple[Callable[[Draw, Seed, list[Seed]], Damaged], ...] = (
    flip_bit,
    flip_bit,
    set_bytes,
    set_bytes,
    set_range,
    truncate,
    extend,
    insert,
    delete,
    splice,
    header_field,
    header_field,
    entry_field,
    entry_field,
    entry_name,
    entry_shape,
    entry_dtype,
    swap_entries,
    metadata,
    realign,
    payload_value,
)


# Checksums, and what FORMAT.md alone says of a mutant

KEPT, SEALED, RESEALED = "checksums kept", "structure sealed", "all sealed"


def seal(data: bytes, level: str) -> bytes:
    """With fitting checksums: of the payloads (RESEALED), the directory, the metadata, the header.

    File_size too, so that a cut or longer file gets past it. What the file's own numbers put
    outside of it is left alone.
    """
    if level == KEPT or len(data) < 128:
        return data
    h = Header._make(HEADER.unpack(data[:128]))
    for at in range(128, min(128 + 192 * h.n_entries, len(data) - 191), 192):
        offset, n_bytes = struct.unpack_from("<QQ", data, at + 168)
        if level == RESEALED and offset + n_bytes <= len(data):
            crc = zlib.crc32(data[offset : offset + n_bytes])
            data = overwrite(data, at + 184, struct.pack("<I", crc))
    h = h._replace(
        crc_dir=zlib.crc32(data[h.dir_offset : h.dir_offset + h.dir_size]),
        crc_meta=zlib.crc32(data[h.meta_offset : h.meta_offset + h.meta_size]),
    )
    head = HEADER.pack(*h)[:124]
    return head + struct.pack("<I", zlib.crc32(head)) + data[128:]


def with_file_size(data: bytes) -> bytes:
    return overwrite(data, 88, struct.pack("<Q", len(data))) if len(data) >= 128 else data


REFUSED, LOADS, EITHER = "refused", "loads", "either"
_CONSTANT = {
    "magic",
    "major",
    "header_size",
    "incompatible",
    "entry_size",
    "dir_offset",
    "reserved",
}
_CONSTANT |= {"entry.flags", "entry.reserved"}
# Wrong whenever nothing else changes; of `alignment` and `meta_size` a second value may fit.
_IMPLIED = {"n_entries", "dir_size", "meta_offset", "data_offset", "file_size", "gap"}
_IMPLIED |= {"entry.offset", "entry.n_bytes"}
_IGNORED = {"minor", "compatible"}


def expected(seed: Seed, damaged: bytes, data: bytes, level: str, mutation: str) -> str:
    """The verdict, from the parts that were changed before the checksums were made to fit."""
    if data == seed.data:
        return LOADS
    if level == KEPT or (mutation in ("truncate", "extend") and len(data) != len(seed.data)):
        return REFUSED
    if len(damaged) != len(seed.data):
        return EITHER
    pairs = zip(seed.data, damaged, strict=True)
    changed = {seed.part(i) for i, (a, b) in enumerate(pairs) if a != b}
    changed -= {"crc_dir", "crc_meta", "crc_header", *_IGNORED}  # made to fit, or without meaning
    hit = {int(part[7:]) for part in changed if part.startswith("payload")}
    kinds = {re.sub(r"\d+", "", part) for part in changed}
    kinds -= {"entry.crc"} if level == RESEALED else set()
    if kinds & _CONSTANT:
        return REFUSED
    if not kinds - {"payload"}:
        good = level == RESEALED and all(_storable(seed, damaged, i) for i in hit)
        return LOADS if good or not kinds else REFUSED
    return REFUSED if len(changed) == 1 and kinds <= _IMPLIED | {"entry.crc"} else EITHER


def _storable(seed: Seed, data: bytes, i: int) -> bool:
    """Payload i obeys its dtype: bools are 0 or 1, a spare nibble is 0."""
    _, code, ndim, _, *rest = seed.entries[i]
    payload = data[rest[8] : rest[8] + rest[9]]
    if DTYPES[code - 1].name == "bool":
        return max(payload) <= 1
    odd = DTYPES[code - 1].name == "i4x2" and int(np.prod(rest[:ndim])) % 2
    return not odd or payload[-1] < 16


@dataclass(frozen=True)
class Mutant:
    """One damaged file; `done` says how it came about."""

    index: int
    data: bytes
    original: bytes
    kind: str
    done: str
    expected: str


def make_mutant(seeds: list[Seed], run: int, index: int) -> Mutant:
    draw = random.Random(f"{run}/{index}")
    seed, mutate = draw.choice(seeds), draw.choice(MUTATIONS)
    level = draw.choice([KEPT, SEALED, RESEALED])
    damaged, done = mutate(draw, seed, seeds)
    data = damaged
    if len(damaged) != len(seed.data) and level != KEPT and draw.random() < 0.8:
        data = with_file_size(damaged)
    data = seal(data, level)
    said = expected(seed, damaged, data, level, mutate.__name__)
    if said == REFUSED and any(data == other.data for other in seeds):
        said = LOADS  # a splice that is another seed, whole
    return Mutant(index, data, seed.data, level, f"{seed.name!r}: {done}; {level}", said)


# The campaign


@dataclass
class Outcome:
    """Counts, the texts reached, and a sentence for each fault of a reader."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    texts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


def judge(mutant: Mutant, python: str, c: str, outcome: Outcome, sha256: str) -> None:
    loads = python.startswith("0 ")
    aside = python.startswith("6 ") and not c.startswith("6 ")
    result = "loads" if loads else "set aside" if aside else f"step {python[:1]}"
    outcome.counts[mutant.kind, mutant.expected, result] += 1
    if not loads:
        outcome.texts[without_values(python)] += 1
    wrong = []
    if not agree(python, c):
        wrong.append("the readers disagree")
    if mutant.expected != EITHER and (mutant.expected == LOADS) != loads:
        wrong.append(f"FORMAT.md says: {mutant.expected}")
    same_bytes = mutant.data == mutant.original
    if loads and same_bytes != (sha256 == hashlib.sha256(mutant.original).hexdigest()):
        wrong.append("the SHA-256 and the bytes differ on whether this is the original")
    if "?" in python[:1] or python.startswith("crash"):
        wrong.append("the Python reader's refusal is none of FORMAT.md's")
    if wrong:
        outcome.faults.append(
            f"--only {mutant.index} ({mutant.done}): {'; '.join(wrong)}\n"
            f"    Python: {python[:400]}\n    C:      {c[:3000]}"
        )


def without_values(verdict: str) -> str:
    """A refusal's text with # for numbers and N for names: one for each way to refuse."""
    step, _, text = comparable(verdict).partition(" ")
    text = re.sub(r"'[^']*'", "N", text)
    text = re.sub(rf"\[[\d, ]*\](?: (?:{'|'.join(d.name for d in DTYPES)}))?", "#", text)
    number = r"\b(0x[0-9a-f]+|[0-9a-f]{8}|[0-9a-f]{40}|\d+)\b"
    return f"{step} {re.sub(number, '#', text)}"


def batches(indices: range) -> Iterator[range]:
    for start in range(0, len(indices), BATCH):
        yield indices[start : start + BATCH]


def fuzz(driver: Path, folder: Path, run: int, indices: range) -> Outcome:
    """Mutants `indices` of `run`, each judged by both readers; stops where faults are found."""
    seeds, outcome, path = make_seeds(folder), Outcome(), folder / "mutant.kdtr"
    for batch in batches(indices):
        mutants = [make_mutant(seeds, run, index) for index in batch]
        lines = c_verdicts(driver, [m.data for m in mutants])
        for mutant, line in zip(mutants, lines, strict=False):
            path.write_bytes(mutant.data)
            python = python_verdict(path)
            sha256 = ""
            if python.startswith("0 "):
                with Bundle.open(path) as bundle:
                    sha256 = bundle.sha256()
            judge(mutant, python, line, outcome, sha256)
        if len(lines) != len(mutants):
            outcome.faults.append(f"the driver judged {len(lines)} of {len(mutants)} files")
        if outcome.faults:
            break
    return outcome


def report(outcome: Outcome) -> str:
    lines = [f"{'checksums':<18}{'FORMAT.md says':<16}{'the readers':<14}files"]
    for (kind, said, result), n in sorted(outcome.counts.items()):
        lines.append(f"{kind:<18}{said:<16}{result:<14}{n}")
    lines.append(f"{len(outcome.texts)} texts of refusals")
    return "\n".join(lines + outcome.faults[:20])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000, help="how many files")
    parser.add_argument("--seed", type=int, default=0, help="which files")
    parser.add_argument("--only", type=int, metavar="I", help="mutant I alone")
    parser.add_argument("--keep", type=Path, metavar="PATH", help="with --only: write it there")
    parser.add_argument("--texts", action="store_true", help="list the texts that were reached")
    given = parser.parse_args()
    if compiler() is None:
        print("no C compiler: install gcc, or name one in CC", file=sys.stderr)
        return 2
    indices = range(given.count) if given.only is None else range(given.only, given.only + 1)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        driver = compile_c(DRIVER, folder / "driver", "-std=c99", *SANITIZED)
        if given.keep:
            given.keep.write_bytes(make_mutant(make_seeds(folder), given.seed, indices[0]).data)
        outcome = fuzz(driver, folder, given.seed, indices)
    print(report(outcome))
    if given.texts:
        print("\n".join(f"{n:8} {text}" for text, n in sorted(outcome.texts.items())))
    n = sum(outcome.counts.values())
    print(f"{n} files, {len(outcome.faults)} faults, {time.monotonic() - started:.0f} s")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
