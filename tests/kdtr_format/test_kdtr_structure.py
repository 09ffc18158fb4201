"""Files that break FORMAT.md, one rule at a time, with checksums that are right again."""

import zlib
from contextlib import suppress

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.kdtr_format.layout import ENTRY, HEADER, Header

# The file that is operated on. Offsets: data 1024, a 1024..1033, b 1088..1088 (empty, at 1033), ...
TENSORS = {
    "a": np.array([1, 2, 3], np.uint8),
    "b": np.zeros((0, 2), np.float32),
    "c": np.arange(3).astype(ml_dtypes.int4),
    "d": np.array([[True, False]]),
}
FIELDS = ("name", "dtype", "ndim", "flags", *"01234567", "offset", "n_bytes", "crc", "reserved")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("structure") / "a.kdtr"
    write_bundle(path, TENSORS, {"k": 1}, alignment=64)
    return path.read_bytes()


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Writes the given bytes to a file, reads all of it and returns everything it says."""
    path = tmp_path_factory.mktemp("read") / "x.kdtr"

    def open_and_read(data):
        path.write_bytes(data)
        with Bundle.open(path) as bundle:
            bundle.verify()
            said = [
                (e.name, e.dtype, e.shape, bundle.payload(e.name).tobytes()) for e in bundle.entries
            ]
            return bundle.version, bundle.metadata, said

    return open_and_read


def with_header(data, **changes):
    """The file with changed header fields and a fitting crc_header."""
    header = Header._make(HEADER.unpack(data[:128]))._replace(**changes)
    return sealed(HEADER.pack(*header) + data[128:])


def with_entry(data, index, **changes):
    """The file with changed fields in one directory entry; '0' to '7' are the dimensions."""
    at = 128 + 192 * index
    fields = dict(zip(FIELDS, ENTRY.unpack(data[at : at + 192]), strict=True)) | changes
    return sealed(data[:at] + ENTRY.pack(*fields.values()) + data[at + 192 :])


def with_metadata(data, meta):
    """The file with other metadata of the same length."""
    header = Header._make(HEADER.unpack(data[:128]))
    assert len(meta) == header.meta_size
    return sealed(data[: header.meta_offset] + meta + data[header.meta_offset + header.meta_size :])


def with_payload(data, index, payload):
    """The file with another payload of the same length, and its crc."""
    start, end = payload_range(data, index)
    assert len(payload) == end - start
    return with_entry(data[:start] + payload + data[end:], index, crc=zlib.crc32(payload))


def payload_range(data, index):
    fields = dict(
        zip(FIELDS, ENTRY.unpack(data[128 + 192 * index : 320 + 192 * index]), strict=True)
    )
    return fields["offset"], fields["offset"] + fields["n_bytes"]


def sealed(data):
    """The file with the three structural checksums made right, where its own numbers allow it."""
    h = Header._make(HEADER.unpack(data[:128]))
    crc_dir = zlib.crc32(data[h.dir_offset : h.dir_offset + h.dir_size])
    crc_meta = zlib.crc32(data[h.meta_offset : h.meta_offset + h.meta_size])
    head = HEADER.pack(*h._replace(crc_dir=crc_dir, crc_meta=crc_meta))[:124]
    return head + zlib.crc32(head).to_bytes(4, "little") + data[128:]


def swapped(data, i, j):
    """The file with two directory entries exchanged."""
    directory = [data[128 + 192 * n : 320 + 192 * n] for n in range(4)]
    directory[i], directory[j] = directory[j], directory[i]
    return sealed(data[:128] + b"".join(directory) + data[896:])


def poked(data, at, value):
    return sealed(data[:at] + bytes([value]) + data[at + 1 :])


HUGE = 2**64 - 1
HEADER_CASES = {
    "major": ({"major": 2}, r"format version 2\.0, this reader knows 1\.x"),
    "major 0": ({"major": 0}, r"format version 0\.0, this reader knows 1\.x"),
    "header_size": ({"header_size": 256}, "header_size is 256; expected 128"),
    "incompatible": ({"incompatible": 4}, "needs the features 0x4, this reader knows none"),
    "n_entries more": ({"n_entries": 5}, "dir_size is 768; expected 960"),
    "n_entries huge": ({"n_entries": HUGE}, f"{HUGE} entries of 192 bytes do not fit a file of"),
    "n_entries wraps": ({"n_entries": 2**58 + 4}, "entries of 192 bytes do not fit a file of"),
    "dir_offset": ({"dir_offset": 320}, "dir_offset is 320; expected 128"),
    "dir_size": ({"dir_size": HUGE}, f"dir_size is {HUGE}; expected 768"),
    "entry_size": ({"entry_size": 200}, "entry_size is 200; expected 192"),
    "alignment 0": ({"alignment": 0}, "alignment is 0; expected a power of two from 64 to 65536"),
    "alignment 32": ({"alignment": 32}, "alignment is 32; expected a power of two"),
    "alignment 96": ({"alignment": 96}, "alignment is 96; expected a power of two"),
    "alignment big": ({"alignment": 2**17}, "alignment is 131072; expected a power of two"),
    "alignment other": ({"alignment": 4096}, "data_offset is 960; expected 4096"),
    "meta_offset": ({"meta_offset": 897}, "meta_offset is 897; expected 896"),
    "meta_offset huge": ({"meta_offset": HUGE}, f"meta_offset is {HUGE}; expected 896"),
    "meta_size 0": (
        {"meta_size": 0, "data_offset": 896},
        "starts at byte 960, which leaves a hole",
    ),
    "meta_size past": ({"meta_size": 2000}, "data_offset is 960; expected 2944"),
    "meta past the end": (
        {"meta_size": 2000, "data_offset": 2944},
        "data_offset is 2944, past the file's end",
    ),
    "meta_size huge": ({"meta_size": HUGE}, f"meta_size is {HUGE}; at most 16777216"),
    "data_offset": ({"data_offset": 1024}, "data_offset is 1024; expected 960"),
    "data_offset huge": ({"data_offset": HUGE}, f"data_offset is {HUGE}; expected 960"),
    "file_size less": (
        {"file_size": 128},
        r"the header says 128 bytes, the file has \d+; the file was cut",
    ),
    "file_size huge": ({"file_size": HUGE}, f"the header says {HUGE} bytes, the file has"),
    "reserved": (
        {"reserved": bytes(19) + b"\1"},
        "the header's reserved bytes are 0+1; expected zeros",
    ),
    "magic": ({"magic": b"\x89KDTS\r\n\x1a"}, "not a KDTR file"),
}


@pytest.mark.parametrize(("changes", "text"), HEADER_CASES.values(), ids=HEADER_CASES)
def test_header_field(original, read, changes, text):
    with pytest.raises(BundleError, match=text):
        read(with_header(original, **changes))


def named(raw):
    return {"name": raw.ljust(96, b"\0")}


ENTRY_CASES = {
    "name empty": (0, named(b""), "entry 0 has an empty name"),
    "name without NUL": (1, named(b"b" * 96), "entry 1: the name has no NUL in its 96 bytes"),
    "name padding": (1, named(b"b\0\0x"), "entry 1: the name b'b' is padded with non-zero bytes"),
    "name not UTF-8": (
        1,
        named(b"b\xff"),
        "entry 1: the name .* is not UTF-8 at byte 1: invalid start",
    ),
    "name surrogate": (1, named(b"b\xed\xa0\x80"), "entry 1: the name .* is not UTF-8 at byte 1"),
    "name overlong": (1, named(b"b\xc0\x80"), "entry 1: the name .* is not UTF-8 at byte 1"),
    "name twice": (1, named(b"a"), "tensor 'a' is there twice; expected unique names"),
    "name unsorted": (1, named(b"A"), "tensor 'A' comes after 'a'; expected bytewise order"),
    "dtype 0": (0, {"dtype": 0}, "tensor 'a' has dtype code 0; expected 1 to 14"),
    "dtype 15": (0, {"dtype": 15}, "tensor 'a' has dtype code 15; expected 1 to 14"),
    "dtype wider": (
        0,
        {"dtype": 12},
        r"spans bytes 960..963, but \[3\] u32 takes 12; the file was cut",
    ),
    "ndim 9": (0, {"ndim": 9}, "tensor 'a' has 9 dimensions; at most 8"),
    "ndim less": (
        0,
        {"ndim": 0},
        r"tensor 'a' has 0 dimensions, but the unused ones are \[3, 0, 0",
    ),
    "ndim more": (0, {"ndim": 2}, r"tensor 'a' spans bytes 960..963, but \[3, 0\] u8 takes 0"),
    "flags": (0, {"flags": 1}, "tensor 'a' has flags 0x1 and reserved 0x0; expected zeros"),
    "reserved": (0, {"reserved": 2}, "tensor 'a' has flags 0x0 and reserved 0x2; expected zeros"),
    "shape": (0, {"0": 4}, r"tensor 'a' spans bytes 960..963, but \[4\] u8 takes 4"),
    "shape huge": (
        0,
        {"0": HUGE},
        r"tensor 'a' has shape \[18446744073709551615\]; at most 2\*\*48",
    ),
    "shape wraps to 3": (
        0,
        {"ndim": 2, "0": 2**63 + 3, "1": 2},
        r"tensor 'a' has shape .*; at most 2\*\*48 elements",
    ),
    "shape huge and empty": (
        1,
        {"0": 0, "1": HUGE},
        r"tensor 'b' has shape \[0, 1844.*; at most 2\*\*48",
    ),
    "unused dimension": (
        0,
        {"7": 1},
        r"the unused ones are \[0, 0, 0, 0, 0, 0, 1\]; expected zeros",
    ),
    "n_bytes less": (0, {"n_bytes": 2}, r"tensor 'a' spans bytes 960..962, but \[3\] u8 takes 3"),
    "n_bytes negative": (
        0,
        {"n_bytes": HUGE},
        r"but \[3\] u8 takes 3; the file was cut or edited",
    ),
    "size past the end": (
        3,
        {"1": 2**40, "n_bytes": 2**40},
        r"tensor 'd' spans bytes \d+..\d+, the file ends at \d+; the file was cut",
    ),
    "offset negative": (
        0,
        {"offset": 2**64 - 64},
        "starts at byte 18446744073709551552, which leaves",
    ),
    "offset in the header": (
        0,
        {"offset": 64},
        "starts at byte 64, before byte 960 where the part before",
    ),
    "overlap": (
        2,
        {"offset": 960},
        "tensor 'c' starts at byte 960, before byte 963 .*; expected 1024",
    ),
    "misaligned": (
        2,
        {"offset": 1000},
        "tensor 'c' starts at byte 1000, not a multiple of .* 64; expected 1024",
    ),
    "hole": (
        2,
        {"offset": 1088},
        "tensor 'c' starts at byte 1088, which leaves a hole; expected 1024",
    ),
    "empty one elsewhere": (
        1,
        {"offset": 1024},
        "tensor 'b' starts at byte 1024, which leaves a hole; expected 963",
    ),
    "last one shorter": (
        3,
        {"1": 1, "n_bytes": 1},
        "the last tensor ends at byte 1089, the file at 1090; expected no",
    ),
    "crc": (0, {"crc": 1}, "tensor 'a' has checksum 00000001, its 3 bytes at 960 give"),
}


@pytest.mark.parametrize(("index", "changes", "text"), ENTRY_CASES.values(), ids=ENTRY_CASES)
def test_directory_field(original, read, index, changes, text):
    with pytest.raises(BundleError, match=text):
        read(with_entry(original, index, **changes))


FILE_CASES = {
    "entries swapped": (
        lambda f: swapped(f, 0, 2),
        "tensor 'c' starts at byte 1024, which leaves a hole",
    ),
    "directory gap": (
        lambda f: poked(f, 959, 5),
        r"byte 959 is 0x05, in the gap 903..960; expected zeros",
    ),
    "payload gap": (
        lambda f: poked(f, 963, 9),
        r"byte 963 is 0x09, in the gap 963..1024; expected zeros",
    ),
    "trailing byte": (lambda f: f + b"\0", "the header says 1090 bytes, the file has 1091"),
    "trailing and said": (
        lambda f: with_header(f + b"\0", file_size=len(f) + 1),
        "the last tensor ends at byte 1090, the file at 1091; expected no trailing bytes",
    ),
    "cut and said": (
        lambda f: with_header(f[:-1], file_size=len(f) - 1),
        "tensor 'd' spans bytes 1088..1090, the file ends at 1089; the file was cut or edited",
    ),
    "metadata spaced": (
        lambda f: with_metadata(f, b'{"": 1}'),
        "metadata is not canonical JSON: byte 4",
    ),
    "metadata float": (lambda f: with_metadata(f, b'{"":.5}'), "metadata is not JSON"),
    "metadata no object": (lambda f: with_metadata(f, b"[1,2,3]"), "metadata is a JSON list"),
    "metadata no UTF-8": (lambda f: with_metadata(f, b'{"\xff":1}'), "metadata is not UTF-8"),
    "bool": (
        lambda f: with_payload(f, 3, b"\1\2"),
        "tensor 'd' is bool, but element 1 is 2; expected 0 or 1",
    ),
    "spare nibble": (
        lambda f: with_payload(f, 2, b"\x10\x32"),
        "tensor 'c' has the spare nibble 0x3; expected 0",
    ),
    "crc_header": (
        lambda f: f[:124] + bytes(4) + f[128:],
        "header checksum is 00000000, its bytes give",
    ),
    "crc_dir": (
        lambda f: f[:128] + b"A" + f[129:],
        "directory checksum is .*; the file was cut or edited",
    ),
    "crc_meta": (
        lambda f: f[:896] + b"[" + f[897:],
        "metadata checksum is .*; the file was cut or edited",
    ),
}


@pytest.mark.parametrize(("operate", "text"), FILE_CASES.values(), ids=FILE_CASES)
def test_file(original, read, operate, text):
    with pytest.raises(BundleError, match=text):
        read(operate(original))


@pytest.mark.parametrize("changes", [{"minor": 7}, {"compatible": HUGE}], ids=str)
def test_what_a_later_minor_version_may_add_is_ignored(original, read, changes):
    read(with_header(original, **changes))


def test_resealing_alone_changes_nothing(original, read):
    read(original)

    assert original == sealed(original)
    assert original == with_entry(original, 2)


def test_every_flipped_byte_is_refused(original, read):
    for at in range(len(original)):
        damaged = bytearray(original)
        damaged[at] ^= 0xFF

        with pytest.raises(BundleError):
            read(damaged)


def test_no_two_files_say_the_same(original, read):
    """With all checksums right, a flipped bit is refused or changes what is read.

    The compatible-feature bits alone mean nothing to this version.
    """
    checksums = {*range(96, 104), *range(124, 128)}
    content = read(original)
    for bit in range(8 * len(original)):
        at = bit // 8
        if at in checksums or 24 <= at < 32:
            continue
        damaged = bytearray(original)
        damaged[at] ^= 1 << bit % 8
        for index in (0, 2, 3):
            if payload_range(original, index)[0] <= at < payload_range(original, index)[1]:
                start, end = payload_range(original, index)
                damaged = with_payload(bytes(damaged), index, bytes(damaged[start:end]))
        try:
            changed = read(sealed(bytes(damaged)))
        except BundleError:
            continue
        assert content != changed, f"bit {bit % 8} of byte {at} means nothing"


@settings(deadline=None, database=None, max_examples=300)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 1089), st.sampled_from([0, 1, 2, 0x40, 0x7F, 0x80, 0xFF])),
        min_size=1,
        max_size=6,
    ),
    cut=st.integers(0, 3),
)
def test_no_edit_raises_anything_but_a_refusal(original, read, edits, cut):
    damaged = bytearray(original[: len(original) - cut * 61])
    for at, value in edits:
        damaged[at % len(damaged)] = value
    with suppress(BundleError):
        read(sealed(bytes(damaged)))
