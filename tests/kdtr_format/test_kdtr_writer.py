"""What write_bundle writes, and what it refuses before it writes anything."""

import hashlib
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.kdtr_format.layout import DTYPE_BY_NUMPY, DTYPES

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def arrays(draw):
    """An array of any dtype with random bits, NaN payloads too; sometimes strided or big-endian."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(SHAPES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bits = rng.integers(0, 256, (*shape, dtype.numpy.itemsize), np.uint8)
    if dtype.name == "i4x2":
        bits &= 0x0F
    if dtype.name == "bool":
        bits &= 1
    array = np.frombuffer(bits.tobytes(), dtype.numpy).reshape(shape)
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()):
        array = array[::-1] if array.ndim else array
    if draw(st.booleans()) and dtype.numpy.kind in "fiu":
        array = array.astype(array.dtype.newbyteorder(">"))
    return array


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=23)


def bits_of(array):
    native = np.asarray(array, dtype=array.dtype.newbyteorder("="), order="C")
    return native.tobytes()


@settings(deadline=None, max_examples=150, database=None)
@given(tensors=st.dictionaries(NAMES, arrays(), max_size=5))
def test_every_array_comes_back_bit_for_bit(tensors, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round-trip.kdtr"

    sha256 = write_bundle(path, tensors, {})

    with Bundle.open(path) as bundle:
        bundle.verify()
        assert sorted(tensors, key=str.encode) == list(bundle)
        for name, array in tensors.items():
            assert array.shape == bundle[name].shape
            assert array.dtype.newbyteorder("=") == bundle[name].dtype
            assert bits_of(array) == bundle[name].tobytes()
            assert not bundle[name].flags.writeable
        assert sha256 == bundle.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1, 1, 1, 1, 1, 1, 1, 2)]
)
def test_each_dtype_and_shape_round_trips(tmp_path, dtype, shape):
    n = int(np.prod(shape))
    array = (np.arange(n) % 2).reshape(shape).astype(dtype.numpy)

    write_bundle(tmp_path / "a.kdtr", {"x": array}, {})

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        entry = bundle.entries[0]
        assert ("x", dtype.name, shape) == (entry.name, entry.dtype, entry.shape)
        assert (n * dtype.bits + 7) // 8 == entry.n_bytes == bundle.payload("x").size
        assert DTYPE_BY_NUMPY[bundle["x"].dtype] == dtype
        np.testing.assert_array_equal(array, bundle["x"])


def test_the_order_of_insertion_and_the_layout_in_memory_change_no_byte(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = {"b": matrix, "a": np.int32([1]), "é": np.array([True]), "B": np.int64(4)}
    same = {
        "é": np.array([2], np.uint8).view(np.bool_),  # a true with another byte
        "B": np.array(4, dtype=">i8"),
        "a": np.array([9, 1, 9], np.int32)[1::2],
        "b": np.asfortranarray(matrix),
    }

    first = write_bundle(tmp_path / "1", tensors, {"x": 1, "a": [True, None]})
    second = write_bundle(tmp_path / "2", same, {"a": (True, None), "x": 1})

    assert first == second
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_the_bytes_are_the_ones_of_version_1(tmp_path):
    """A change of this hash is a change of the format, and needs a new number."""
    tensors = {
        "w": np.arange(-4, 5).astype(ml_dtypes.int4).reshape(3, 3),
        "config/theta": np.float64(10000.0),
        "logits": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "none": np.zeros((0, 4), np.uint8),
    }

    sha256 = write_bundle(tmp_path / "a.kdtr", tensors, {"case": "Größe", "seed": 7})

    assert sha256 == "8afb2626d51ddbd5389323e6f91e236515524927c25fa38166fddb95cc49216c"


def test_payloads_start_at_multiples_of_the_alignment_and_empty_ones_at_the_running_end(tmp_path):
    tensors = {
        "a": np.zeros(3, np.uint8),
        "b": np.zeros(0),
        "c": np.zeros(1),
        "d": np.zeros((4, 0)),
    }

    write_bundle(tmp_path / "a.kdtr", tensors, {}, alignment=1024)

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        assert [1024, 1027, 2048, 2056] == [entry.offset for entry in bundle.entries]
    assert 2056 == (tmp_path / "a.kdtr").stat().st_size


def test_int4_packs_element_0_into_the_low_nibble(tmp_path):
    write_bundle(tmp_path / "a.kdtr", {"w": np.array([1, -1, -8]).astype(ml_dtypes.int4)}, {})

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        assert [0xF1, 0x08] == bundle.payload("w").tolist()
        assert [1, -1, -8] == bundle["w"].astype(int).tolist()


def test_the_high_nibble_of_an_int4_in_memory_is_ignored(tmp_path):
    dirty = np.array([0x71, 0xF2, 0x83], np.uint8).view(ml_dtypes.int4)

    write_bundle(tmp_path / "a.kdtr", {"w": dirty}, {})

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        assert [0x21, 0x03] == bundle.payload("w").tolist()
        bundle.verify()


def test_a_bundle_can_be_written_from_an_open_bundle(tmp_path):
    tensors = {"w": np.arange(5).astype(ml_dtypes.int4), "x": np.zeros((2, 2), np.float16)}
    first = write_bundle(tmp_path / "1", tensors, {"k": 1})

    with Bundle.open(tmp_path / "1") as bundle:
        second = write_bundle(tmp_path / "2", bundle, bundle.metadata)

    assert first == second


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"x": np.zeros(2, complex)}, "tensor 'x' has dtype complex128; expected one of f64 f32"),
        ({"x": np.array([None])}, "tensor 'x' has dtype object; expected one of"),
        ({"x": np.zeros(2, np.int16)}, "tensor 'x' has dtype int16; expected one of"),
        ({"x": np.zeros(2, "V2")}, r"tensor 'x' has dtype \|V2; expected one of"),
        ({"x": np.zeros(2, "M8[s]")}, r"tensor 'x' has dtype datetime64\[s\]; expected one of"),
        ({"x": [1, 2]}, "tensor 'x' is a list; expected a NumPy array"),
        (
            {"x": np.ma.masked_array([1.0], [True])},
            "tensor 'x' is a MaskedArray; expected a NumPy array",
        ),
        ({"x": np.zeros((1,) * 9)}, "tensor 'x' has 9 dimensions; at most 8"),
        (
            {"x": np.zeros((2**50, 0), np.int8)},
            "has shape .*; at most 2\\*\\*48 elements, zeros counted",
        ),
        ({"": np.zeros(1)}, "tensor name '' takes 0 bytes of UTF-8; expected 1 to 95 and no NUL"),
        ({"é" * 48: np.zeros(1)}, "takes 96 bytes of UTF-8; expected 1 to 95"),
        ({"a\0b": np.zeros(1)}, "expected 1 to 95 and no NUL"),
        ({"\ud800": np.zeros(1)}, r"tensor name '\\ud800' has a lone surrogate"),
        ({3: np.zeros(1)}, "tensor name 3 is a int; expected str"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_writing(tmp_path, tensors, text):
    with pytest.raises(BundleError, match=text):
        write_bundle(tmp_path / "a.kdtr", {"fine": np.zeros(1), **tensors}, {})

    assert [] == os.listdir(tmp_path)


@pytest.mark.parametrize("alignment", [0, -64, 32, 96, 2**17])
def test_an_alignment_that_is_no_power_of_two_in_range_is_refused(tmp_path, alignment):
    with pytest.raises(
        BundleError, match=f"alignment is {alignment}; expected a power of two from 64"
    ):
        write_bundle(tmp_path / "a.kdtr", {}, {}, alignment=alignment)


class FailsOnSecondUse(dict):
    """A lazy mapping whose tensor can be described, but not read when its turn comes."""

    def __init__(self, tensors, answer):
        super().__init__(tensors)
        self.answer, self.asked = answer, []

    def __getitem__(self, name):
        if name == "b" and name in self.asked:
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer
        self.asked.append(name)
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("answer", "raised", "text"),
    [
        (RuntimeError("disk on fire"), RuntimeError, "disk on fire"),
        (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
        (OSError(28, "No space left on device"), BundleError, "cannot be written: .*No space left"),
        (
            np.zeros(3),
            BundleError,
            r"tensor 'b' is \[3\] f64, when first asked for it was \[2\] f64",
        ),
    ],
)
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(
    tmp_path, answer, raised, text
):
    path = tmp_path / "a.kdtr"
    write_bundle(path, {"old": np.zeros(3)}, {})
    before = path.read_bytes()

    with pytest.raises(raised, match=text):
        write_bundle(path, FailsOnSecondUse({"a": np.zeros(9), "b": np.zeros(2)}, answer), {})

    assert before == path.read_bytes()
    assert ["a.kdtr"] == os.listdir(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(BundleError, match="is a directory; expected the path of a file"):
        write_bundle(tmp_path, {}, {})
    with pytest.raises(
        BundleError, match=r"none/a.kdtr: cannot be written: No such file or directory$"
    ):
        write_bundle(tmp_path / "none" / "a.kdtr", {}, {})
    with pytest.raises(BundleError, match=r"file/a.kdtr: cannot be written: Not a directory$"):
        write_bundle(tmp_path / "file" / "a.kdtr", {}, {})


def test_an_open_bundle_keeps_its_content_when_its_file_is_replaced(tmp_path):
    write_bundle(tmp_path / "a.kdtr", {"x": np.zeros(3)}, {})

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        write_bundle(tmp_path / "a.kdtr", {"x": np.ones(3)}, {})

        assert [0, 0, 0] == bundle["x"].tolist()
