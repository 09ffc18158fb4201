"""What callers hand to a verb, as fields of a request.

A request is well formed whatever the caller gave: what JSON or KDTR cannot say is refused here,
in the class in which engines refuse it. Ranges are the engine's to check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any

import numpy as np

from kdtr.contract import (
    Acceptance,
    Array,
    DraftTree,
    EmitLimit,
    InputError,
    KdtrError,
    TreeError,
    check_bits,
)
from kdtr.kdtr_format.layout import DTYPE_BY_NUMPY

_NO_SEQUENCE = (str, bytes, bytearray, memoryview, Mapping, Set)
_WIDENED = ("int16", "uint16")  # by stdio_tensors.write_tensors


def number(what: str, value: object, error: type[KdtrError] = InputError) -> int:
    """An integer of 64 bits; a bool is none."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        found = index(value)  # type: ignore[arg-type]  # the TypeError is the check
    except TypeError:
        raise error(f"{what} = {value!r}; expected an integer") from None
    check_bits(what, found, error)
    if not -(2**63) <= found < 2**63:
        raise error(f"{what} = {found}; expected an integer of 64 bits")
    return found


def numbers(what: str, values: Iterable[object], error: type[KdtrError] = InputError) -> list[int]:
    try:
        items = None if isinstance(values, _NO_SEQUENCE) else list(values)
    except TypeError:
        items = None
    if items is None:
        raise error(f"{what} = {values!r}; expected a sequence of integers")
    return [number(f"{what}[{i}]", value, error) for i, value in enumerate(items)]


def tree_fields(tree: DraftTree) -> dict[str, Any]:
    if not isinstance(tree, DraftTree):
        raise TreeError(f"tree is {type(tree).__name__}; expected a DraftTree")
    return {
        "tokens": numbers("tokens", tree.tokens, TreeError),
        "parents": numbers("parents", tree.parents, TreeError),
    }


def limit_fields(limit: EmitLimit) -> dict[str, Any]:
    if not isinstance(limit, EmitLimit):
        raise InputError(f"limit is {type(limit).__name__}; expected an EmitLimit")
    most = limit.max_emitted
    return {
        "stop_tokens": numbers("stop_tokens", sorted(limit.stop_tokens)),
        "max_emitted": None if most is None else number("max_emitted", most),
    }


def walk_fields(acceptance: Acceptance) -> dict[str, Any]:
    if not isinstance(acceptance, Acceptance):
        raise InputError(f"acceptance is {type(acceptance).__name__}; expected an Acceptance")
    return {
        "path": numbers("path", acceptance.path),
        "bonus": number("bonus", acceptance.bonus),
    }


def host_array(what: str, values: Array) -> np.ndarray:
    """An array that a KDTR file holds."""
    try:
        is_foreign = hasattr(values, "__dlpack__") and not hasattr(values, "__array__")
        array = np.asarray(np.from_dlpack(values) if is_foreign else values)
    except Exception as error:  # a caller's object may raise anything
        raise InputError(f"{what} is {type(values).__name__}, which is no array: {error}") from None
    if array.dtype.newbyteorder("=") not in DTYPE_BY_NUMPY and array.dtype.name not in _WIDENED:
        raise InputError(f"{what} has dtype {array.dtype}; expected numbers")
    return array
