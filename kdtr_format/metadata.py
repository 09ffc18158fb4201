"""Canonical JSON, the metadata part of a KDTR file: one value has exactly one spelling.

Object keys sorted by code point, no spaces, UTF-8, no floats (two writers print them differently;
store float.hex()), integers of 64 bits, at most 32 levels deep. This is json.dumps(value,
sort_keys=True, separators=(",", ":"), ensure_ascii=False) for the values that it is defined for.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format.layout import MAX_META_SIZE

MAX_DEPTH = 32
MIN_INT, MAX_INT = -(2**63), 2**64 - 1  # int64 and uint64


def encode_metadata(metadata: Mapping[str, Any]) -> bytes:
    """The canonical bytes; BundleError names the key whose value has no canonical form.

    >>> encode_metadata({"seed": 7, "case": "chain"})
    b'{"case":"chain","seed":7}'
    >>> encode_metadata({"model": {"theta": 0.5}})
    Traceback (most recent call last):
    kdtr.contract.errors.BundleError: metadata['model']['theta'] is the float 0.5, and floats have \
no canonical spelling; store the string '0x1.0000000000000p-1', its float.hex()
    """
    if not isinstance(metadata, Mapping):
        raise BundleError(f"metadata is a {type(metadata).__name__}; expected a dict")
    encoded = _dump(_checked(metadata, "metadata", 1))
    if len(encoded) > MAX_META_SIZE:
        raise BundleError(
            f"metadata takes {len(encoded)} bytes; at most {MAX_META_SIZE} are stored"
        )
    return encoded


def decode_metadata(encoded: bytes) -> dict[str, Any]:
    """The metadata of `encoded`; BundleError unless these are the canonical bytes of an object."""
    try:
        text = encoded.decode("utf-8")
        metadata = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=_parse_int,
            parse_float=_refuse_float,
            parse_constant=_refuse_float,
        )
    except UnicodeDecodeError as error:
        raise BundleError(f"metadata is not UTF-8: {error.reason} at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise BundleError(f"metadata is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise BundleError(f"metadata nests deeper than {MAX_DEPTH} levels") from None
    if not isinstance(metadata, dict):
        raise BundleError(f"metadata is a JSON {type(metadata).__name__}; expected an object")
    canonical = _dump(_checked(metadata, "metadata", 1))
    if canonical != encoded:
        same = next(
            (i for i, (a, b) in enumerate(zip(encoded, canonical, strict=False)) if a != b),
            min(len(encoded), len(canonical)),
        )
        raise BundleError(
            f"metadata is not canonical JSON: byte {same} starts {encoded[same : same + 12]!r}, "
            f"expected {canonical[same : same + 12]!r} (sorted keys, no spaces, shortest escapes)"
        )
    return metadata


def _dump(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8")


def _checked(value: Any, where: str, depth: int) -> Any:
    """`value` in plain dicts and lists, or a BundleError that says where it is not storable."""
    if depth > MAX_DEPTH:
        raise BundleError(f"metadata nests deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if type(key) is not str:
                raise BundleError(f"{where} has the key {key!r}; expected a string")
            _check_text(key, f"a key of {where}")
        return {key: _checked(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_checked(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, float):
        raise BundleError(
            f"{where} is the float {float(value)!r}, and floats have no canonical spelling; "
            f"store the string {float(value).hex()!r}, its float.hex()"
        )
    if type(value) is int and not MIN_INT <= value <= MAX_INT:
        raise BundleError(
            f"{where} is an integer of {value.bit_length()} bits; expected int64 or uint64"
        )
    if type(value) is str:
        _check_text(value, where)
    elif value is not None and type(value) not in (bool, int):
        raise BundleError(
            f"{where} is a {type(value).__name__}; expected dict, list, str, int, bool or None"
        )
    return value


def _check_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BundleError(
            f"{where} has the lone surrogate {text[error.start]!r}, which UTF-8 does not encode"
        ) from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique: dict[str, Any] = {}
    for key, value in pairs:
        if key in unique:
            raise BundleError(f"metadata has the key {key!r} twice in one object")
        unique[key] = value
    return unique


def _parse_int(digits: str) -> int:
    if len(digits) > 20:  # before int(): a long one is slow, and past 4300 digits a ValueError
        raise BundleError(
            f"metadata has an integer of {len(digits)} characters; expected int64 or uint64"
        )
    return int(digits)


def _refuse_float(text: str) -> NoReturn:
    raise BundleError(f"metadata has the float {text[:32]}; expected a string made by float.hex()")
