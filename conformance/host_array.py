"""An engine's array as the judge keeps it: a copy on the host, of a dtype that was asked for.

What is of another dtype is told here, by name: behind this door nobody need doubt it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from operator import index
from typing import Any

import numpy as np

from kdtr.conformance.engine_call import EngineCall
from kdtr.contract import Array, EngineError, Stage

_FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


class Numbers(Enum):
    """What may be asked for. A bool is no integer, and an integer is no floating-point number."""

    INTEGERS = "integers"
    VISIBILITY = "bool, or integers 0 and 1"
    ANY = "numbers"
    FLOATING = f"floating-point numbers: {', '.join(_FLOATING[:-1])} or {_FLOATING[-1]}"

    @classmethod
    def of(cls, stage: Stage) -> Numbers:
        """What an engine shows of the stage."""
        if not stage.exact:
            return cls.FLOATING
        return cls.VISIBILITY if stage.name == "mask" else cls.INTEGERS

    def allow(self, dtype: np.dtype) -> bool:
        if dtype.name in _FLOATING:
            return self in (Numbers.FLOATING, Numbers.ANY)
        if self is Numbers.FLOATING:
            return False
        return dtype.kind in ("iu" if self is Numbers.INTEGERS else "iub")


def host_copy(what: str, array: Array, wanted: Numbers) -> np.ndarray:
    """A copy in host memory, of a mask as bool. EngineError for no plain array of these numbers."""
    if isinstance(array, np.ma.MaskedArray):  # np.array() would show what its mask hides
        raise EngineError(
            f"{what} is a masked array; expected a plain one, in which every element is shown"
        )
    try:
        with EngineCall(what):  # its copy may wait for a device
            copy = np.array(array if hasattr(array, "__array__") else np.from_dlpack(array))
    except Exception as error:
        raise EngineError(f"{what} is {kind_of(array)}, which is no array: {error}") from error
    if not wanted.allow(copy.dtype):
        raise EngineError(f"{what} is {copy.dtype}; expected {wanted.value}")
    return _as_bool(what, copy) if wanted is Numbers.VISIBILITY else copy


def host_integers(what: str, values: Any) -> np.ndarray:
    """A sequence of integers as int64 [n]. Raises EngineError for anything else.

    A set or a mapping has no order, an iterator can be read once, and text is no numbers.
    """
    ordered = hasattr(values, "__len__") and hasattr(values, "__getitem__")
    if not ordered or isinstance(values, str | bytes | bytearray | Mapping | np.ma.MaskedArray):
        raise EngineError(f"{what} are {kind_of(values)}; expected a sequence of integers")
    try:
        # By number: what has no IndexError in it would never end.
        return np.array([_index(values[i]) for i in range(len(values))], dtype=np.int64)
    except TypeError:
        raise EngineError(f"{what} are {_shown(values)}; expected integers") from None
    except OverflowError:
        raise EngineError(f"{what} are {_shown(values)}; expected integers of 64 bits") from None


def host_integer(what: str, value: Any) -> int:
    """A token or a length. Raises EngineError for what is no integer of 64 bits."""
    try:
        return int(np.int64(_index(value)))
    except TypeError:
        raise EngineError(f"{what} returned {kind_of(value)}; expected an integer") from None
    except OverflowError:
        raise EngineError(f"{what} gave {_shown(value)}; expected an integer of 64 bits") from None


def _as_bool(what: str, mask: np.ndarray) -> np.ndarray:
    """What is 1 is visible; 3 is more likely a mistake than a yes."""
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.size:
        raise EngineError(f"{what} holds {wrong[0]}; expected {Numbers.VISIBILITY.value}")
    return mask.astype(bool)


def _shown(values: Any) -> str:
    """The dtype and shape of an array, of anything else what Python shows."""
    if isinstance(values, np.ndarray):
        return f"{values.dtype} {list(values.shape)}"
    try:
        return repr(values)
    except Exception:  # an integer of 5000 digits has no text, and a repr may raise anything
        return kind_of(values)


def _index(value: Any) -> int:
    """Python would take a bool for an integer, the judge does not."""
    if isinstance(value, bool | np.bool_):
        raise TypeError
    return index(value)


def kind_of(value: Any) -> str:
    """What a value of the wrong kind is called."""
    return "None" if value is None else f"a {type(value).__name__}"
