"""Canonical JSON: one spelling for each value, and refusals for values without one."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format import metadata as module
from kdtr.kdtr_format.metadata import decode_metadata, encode_metadata

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(st.characters(codec="utf-8"))
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=5)
VALUES = st.recursive(
    LEAVES, lambda v: st.lists(v, max_size=4) | st.dictionaries(KEYS, v, max_size=4)
)


@settings(deadline=None, database=None)
@given(metadata=st.dictionaries(KEYS, VALUES, max_size=5))
def test_metadata_comes_back_and_has_one_spelling(metadata):
    encoded = encode_metadata(metadata)

    assert metadata == decode_metadata(encoded)
    assert encoded == encode_metadata(dict(reversed(metadata.items())))
    assert metadata == json.loads(encoded)


@settings(deadline=None, database=None)
@given(encoded=st.binary() | st.text(alphabet='{}[]",:0123456789.eE+-\\u tfn').map(str.encode))
def test_any_bytes_are_decoded_exactly_or_refused(encoded):
    try:
        metadata = decode_metadata(encoded)
    except BundleError:
        return
    assert encoded == encode_metadata(metadata)


def nested(depth):
    value = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("metadata", "text"),
    [
        (
            {"a": {"b": [0, 0.1]}},
            r"metadata\['a'\]\['b'\]\[1\] is the float 0.1, .* '0x1.999999999999ap-4'",
        ),
        ({"a": float("nan")}, r"metadata\['a'\] is the float nan"),
        ({"a": np.float64(0.5)}, r"metadata\['a'\] is the float 0.5"),
        (
            {"a": np.int64(1)},
            r"metadata\['a'\] is a int64; expected dict, list, str, int, bool or None",
        ),
        ({"a": b"x"}, r"metadata\['a'\] is a bytes; expected dict"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1; expected a string"),
        ({"a": 2**64}, r"metadata\['a'\] is an integer of 65 bits; expected int64 or uint64"),
        ({"a": -(2**63) - 1}, "expected int64 or uint64"),
        ({"a": "\ud800"}, r"metadata\['a'\] has the lone surrogate '\\ud800'"),
        ({"\ud800": 1}, "a key of metadata has the lone surrogate"),
        ([1], "metadata is a list; expected a dict"),
        (nested(32), "metadata nests deeper than 32 levels"),
    ],
)
def test_what_has_no_canonical_form_is_refused(metadata, text):
    with pytest.raises(BundleError, match=text):
        encode_metadata(metadata)


def test_31_nested_objects_with_a_leaf_are_stored():
    assert nested(31) == decode_metadata(encode_metadata(nested(31)))


@pytest.mark.parametrize(
    ("encoded", "text"),
    [
        (b"", "metadata is not JSON"),
        (b"\xff{}", "metadata is not UTF-8: invalid start byte at byte 0"),
        (b"\xef\xbb\xbf{}", "metadata is not JSON"),
        (b"{", "metadata is not JSON: .* at character 1"),
        (b"[]", "metadata is a JSON list; expected an object"),
        (b"{} ", r"metadata is not canonical JSON: byte 2 starts b' ', expected b''"),
        (b'{"b":1,"a":2}', "metadata is not canonical JSON: byte 2"),
        (b'{"a": 1}', "metadata is not canonical JSON: byte 5"),
        (b'{"a":-0}', "metadata is not canonical JSON"),
        (rb'{"a":"\u0041"}', "metadata is not canonical JSON"),
        (rb'{"a":"\/"}', "metadata is not canonical JSON"),
        (rb'{"a":"\ud800"}', "lone surrogate"),
        (b'{"a":1,"a":1}', "metadata has the key 'a' twice in one object"),
        (b'{"a":1.0}', "metadata has the float 1.0; expected a string made by float.hex"),
        (b'{"a":1e400}', "metadata has the float 1e400"),
        (b'{"a":NaN}', "metadata has the float NaN"),
        (b'{"a":-Infinity}', "metadata has the float -Infinity"),
        (b'{"a":' + b"9" * 5000 + b"}", "metadata has an integer of 5000 characters"),
        (b'{"a":99999999999999999999}', "expected int64 or uint64"),
        (b'{"a":' * 33 + b"1" + b"}" * 33, "metadata nests deeper than 32 levels"),
        (b'{"a":' + b"[" * 100_000, "metadata nests deeper than 32 levels"),
    ],
)
def test_bytes_that_are_not_canonical_are_refused(encoded, text):
    with pytest.raises(BundleError, match=text):
        decode_metadata(encoded)


def test_metadata_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(module, "MAX_META_SIZE", 10)

    with pytest.raises(BundleError, match="metadata takes 11 bytes; at most 10 are stored"):
        encode_metadata({"abc": "x" * 1})
