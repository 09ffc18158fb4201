"""Opening, reading and closing a bundle; views that hold only a part of it."""

import contextlib
import gc
import mmap
import os
import zipfile
from collections import ChainMap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import Bundle, TensorView, write_bundle
from kdtr.kdtr_format.reader import _Region

TENSORS = {
    "expected/logits": np.full(1000, 7.0),
    "inputs/flags": np.array([True, False]),
    "inputs/empty": np.zeros((0, 2), np.float32),
    "inputs/prompt": np.arange(5, dtype=np.int32),
    "weights/w": np.arange(-4, 5).astype(ml_dtypes.int4).reshape(3, 3),
}


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "case.kdtr", TENSORS, {"case": "chain", "sizes": [1, 2]})
    return tmp_path / "case.kdtr"


@pytest.fixture
def bundle(path):
    with Bundle.open(path) as bundle:
        yield bundle


def test_a_bundle_is_a_sorted_mapping(bundle):
    assert tuple(sorted(TENSORS)) == bundle.names() == tuple(bundle)
    assert 5 == len(bundle)
    assert "inputs/prompt" in bundle
    assert "inputs/promp" not in bundle
    assert 3 not in bundle
    assert bundle.get("nothing") is None
    assert [0, 1, 2, 3, 4] == bundle.get("inputs/prompt").tolist()
    assert {"case": "chain", "sizes": [1, 2]} == bundle.metadata
    assert (1, 0) == bundle.version
    assert sorted(TENSORS) == list(dict(bundle.items()))
    assert bundle == bundle


def test_reading_copies_nothing_and_cannot_write(bundle):
    first, second = bundle["expected/logits"], bundle["expected/logits"]

    assert first.ctypes.data == second.ctypes.data
    assert 0 == first.ctypes.data % 256
    with pytest.raises(ValueError, match="WRITEABLE"):
        first.setflags(write=True)
    assert not bundle["weights/w"].flags.writeable


def test_an_unknown_name_is_answered_with_the_closest(bundle):
    with pytest.raises(
        BundleError, match="no tensor 'input/prompt' among 5; the closest are 'inputs/prompt'"
    ):
        bundle["input/prompt"]
    with pytest.raises(
        BundleError, match="no tensor 'zzz' among 5; the first are 'expected/logits', "
    ):
        bundle.payload("zzz")


def test_a_mapping_around_a_bundle_works_as_around_a_dict(bundle):
    chained = ChainMap({}, bundle)

    assert [0, 1, 2, 3, 4] == chained["inputs/prompt"].tolist()
    assert chained.get("nothing") is None
    with pytest.raises(KeyError):
        bundle.view("inputs/")["nothing"]


def test_opening_reads_no_payload(path):
    damaged = bytearray(path.read_bytes())
    with Bundle.open(path) as bundle:
        entry = bundle.entries[0]
    damaged[entry.offset + 8] ^= 1
    path.write_bytes(damaged)
    text = (
        r"case.kdtr: tensor 'expected/logits' has checksum \w{8}, its 8000 bytes at \d+ give \w{8}"
    )

    with Bundle.open(path) as bundle:
        assert [1, 0] == bundle["inputs/flags"].tolist()  # the others are still good
        with pytest.raises(BundleError, match=text):
            bundle["expected/logits"]
        with pytest.raises(BundleError, match=text):
            bundle.payload("expected/logits")
        with pytest.raises(BundleError, match=text):
            bundle.verify()
        with pytest.raises(BundleError, match=text):
            bundle.get("expected/logits")


def test_arrays_outlive_the_bundle_which_is_closed(path):
    with Bundle.open(path) as bundle:
        view = bundle.view("inputs/")
        kept = bundle["inputs/prompt"]

    assert [0, 1, 2, 3, 4] == kept.tolist()
    bundle.close()
    for use in (
        lambda: bundle["inputs/prompt"],
        lambda: view["inputs/prompt"],
        bundle.verify,
        bundle.sha256,
    ):
        with pytest.raises(BundleError, match="the bundle is closed; read its tensors before"):
            use()


def test_the_file_is_released_with_the_last_array(path):
    gc.disable()  # by reference counting alone: a cycle would keep large files mapped
    try:
        bundle = Bundle.open(path)
        view, array = bundle.view("inputs/"), bundle["inputs/prompt"]
        del bundle, view

        assert str(path) in Path("/proc/self/maps").read_text()
        assert [0, 1, 2, 3, 4] == array.tolist()
        del array
        assert str(path) not in Path("/proc/self/maps").read_text()
    finally:
        gc.enable()


def test_a_view_holds_only_its_prefixes(bundle):
    view = bundle.view("inputs/", "weights/")

    assert ("inputs/empty", "inputs/flags", "inputs/prompt", "weights/w") == view.names()
    assert view.names() == tuple(entry.name for entry in view.entries)
    assert [0, 1, 2, 3, 4] == view["inputs/prompt"].tolist()
    assert [0xDC, 0xFE, 0x10, 0x32, 0x04] == view.payload("weights/w").tolist()
    assert 0 == len(bundle.view())
    assert 0 == len(bundle.view("nothing/"))
    with pytest.raises(BundleError, match="the prefix '' selects every tensor"):
        bundle.view("inputs/", "")


def test_a_view_refuses_without_naming_what_it_hides(bundle):
    with pytest.raises(BundleError) as refusal:
        bundle.view("inputs/")["expected/logits"]

    assert "no tensor 'expected/logits' among 3; the first are 'inputs/empty'" in str(refusal.value)
    assert "case.kdtr" not in str(refusal.value)
    with pytest.raises(BundleError):
        bundle.view("inputs/").payload("expected/logits")


def test_no_public_attribute_leads_from_a_view_to_the_rest(bundle, path):
    """Four steps along attributes without an underscore: array bases, buffers, iterators, flags."""
    view = bundle.view("inputs/")
    reached = [view, *view.values(), *(view.payload(name) for name in view)]
    step = reached
    for _ in range(4):
        step = [found for thing in step for found in public_attributes(thing)]
        reached += step

    kinds = {type(thing) for thing in reached}
    assert {TensorView, np.ndarray, memoryview, _Region} <= kinds  # the walk does go deep
    assert not kinds & {Bundle, mmap.mmap, type(path)}
    assert not [thing for thing in reached if isinstance(thing, str) and "case.kdtr" in thing]
    assert (
        max(thing.nbytes for thing in reached if isinstance(thing, np.ndarray | memoryview)) <= 20
    )


def public_attributes(thing):
    if isinstance(thing, int | float | str | bytes | type | np.generic | np.dtype):
        return []
    found = []
    for name in dir(thing):
        if not name.startswith("_"):
            with contextlib.suppress(Exception):  # some of NumPy's attributes refuse
                found.append(getattr(thing, name))
    return [value for value in found if not callable(value)]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "the file is empty; expected a KDTR file"),
        (
            b"\x89KDT",
            "not a KDTR file: it has only 4 bytes, the file was cut; expected it to start with 89",
        ),
        (b"\x89KDTR\r\n\x1a" + bytes(20), "the file has 28 bytes, the header alone takes 128"),
        (
            b"\x89KDTR\n\x1a" + bytes(200),
            "its first bytes .* were damaged, as a text-mode transfer does",
        ),
        (
            b"GGUF\x03\0\0\0",
            "it looks like GGUF; expected it to start with 89 4b 44 54 52 0d 0a 1a",
        ),
        (b"\x93NUMPY\x01\0", "it looks like a NumPy .npy array"),
        (b"version https://git-lfs.github.com/spec/v1\n", "it looks like a Git LFS pointer"),
        (b'{"a": 1}', "it looks like JSON"),
        (b"\x02\0\0\0\0\0\0\0{}", "it looks like safetensors"),
        (b"hello, world", "not a KDTR file: it starts with 68 65 6c 6c 6f 2c 20 77; expected"),
    ],
)
def test_a_foreign_or_cut_file_is_named_for_what_it_is(tmp_path, content, text):
    (tmp_path / "x.kdtr").write_bytes(content)

    with pytest.raises(BundleError, match=f"x.kdtr: .*{text}"):
        Bundle.open(tmp_path / "x.kdtr")


def test_zip_and_npz_are_told_apart(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(1))
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.txt", "")

    with pytest.raises(BundleError, match=r"it looks like a NumPy .npz archive"):
        Bundle.open(tmp_path / "a.npz")
    with pytest.raises(BundleError, match="it looks like a zip archive"):
        Bundle.open(tmp_path / "a.zip")


def test_what_is_no_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")

    for name, text in (
        ("none", "none: no such file; expected a KDTR file"),
        ("", "is a directory; expected a KDTR file"),
        ("pipe", "pipe: is not a regular file; expected a KDTR file"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("x" * 300, "cannot be read: File name too long"),
    ):
        with pytest.raises(BundleError, match=text):
            Bundle.open(tmp_path / name)


def test_every_truncation_is_refused(path):
    whole = path.read_bytes()
    for length in [*range(0, 1400, 7), *range(len(whole) - 20, len(whole))]:
        path.write_bytes(whole[:length])

        with pytest.raises(BundleError, match=r"cut|empty"):
            Bundle.open(path)
