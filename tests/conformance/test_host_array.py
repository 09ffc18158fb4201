"""What an engine hands over is copied, and of numbers that were asked for, or refused by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.host_array import Numbers, host_copy, host_integer, host_integers
from kdtr.contract import STAGES, EngineError, Source

FLOATING = (
    "floating-point numbers: float64, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2"
)


def refusal(call: Any, *words: Any) -> str:
    with pytest.raises(EngineError) as refused:
        call(*words)
    return str(refused.value)


def test_an_array_is_copied() -> None:
    array = np.arange(3)

    copy = host_copy("x", array, Numbers.INTEGERS)
    array[0] = 9

    assert [0, 1, 2] == copy.tolist()


class OnDevice:
    """An array that only DLPack can read."""

    def __dlpack__(self, **rest: Any) -> Any:
        return np.arange(3.0).__dlpack__(**rest)

    def __dlpack_device__(self) -> Any:
        return np.arange(3.0).__dlpack_device__()


def test_an_array_of_another_library_is_read_by_dlpack() -> None:
    assert [0.0, 1.0, 2.0] == host_copy("x", OnDevice(), Numbers.FLOATING).tolist()


@pytest.mark.parametrize(
    ("numbers", "dtypes"),
    [
        (Numbers.INTEGERS, [np.int8, np.uint8, np.int64, np.uint64, ">i4"]),
        (
            Numbers.FLOATING,
            [
                float,
                ">f4",
                np.float16,
                ml_dtypes.bfloat16,
                ml_dtypes.float8_e4m3fn,
                ml_dtypes.float8_e5m2,
            ],
        ),
        (Numbers.ANY, [bool, np.int8, float, ml_dtypes.bfloat16]),
    ],
)
def test_what_is_taken(numbers: Numbers, dtypes: list[Any]) -> None:
    for dtype in dtypes:
        array = np.ones((2, 3)).astype(dtype)

        assert array.dtype == host_copy("x", array, numbers).dtype


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64])
def test_a_mask_is_bool_whatever_shows_it(dtype: Any) -> None:
    mask = host_copy("x", np.array([[1, 0], [1, 1]], dtype), Numbers.VISIBILITY)

    assert np.dtype(bool) == mask.dtype
    assert [[True, False], [True, True]] == mask.tolist()


@pytest.mark.parametrize("value", [3, -1])
def test_a_mask_of_other_numbers(value: int) -> None:
    array = np.array([[1, 0], [value, 1]])

    text = refusal(host_copy, "trace of mask", array, Numbers.VISIBILITY)

    assert f"trace of mask holds {value}; expected bool, or integers 0 and 1" == text


@pytest.mark.parametrize(
    ("numbers", "dtypes", "wanted"),
    [
        (Numbers.INTEGERS, [bool, float, ml_dtypes.bfloat16, object, "U3", complex], "integers"),
        (Numbers.VISIBILITY, [float, object], "bool, or integers 0 and 1"),
        (Numbers.FLOATING, [bool, int, np.longdouble, ml_dtypes.float8_e4m3fnuz, "m8"], FLOATING),
        (Numbers.ANY, [object, "U3", complex, np.longdouble, ml_dtypes.int4], "numbers"),
    ],
)
def test_what_is_refused(numbers: Numbers, dtypes: list[Any], wanted: str) -> None:
    for dtype in dtypes:
        array = np.ones((2, 3)).astype(dtype)

        text = refusal(host_copy, "trace of x", array, numbers)

        assert f"trace of x is {array.dtype}; expected {wanted}" == text


def test_what_a_stage_asks_for() -> None:
    for stage in STAGES:
        if stage.source is not Source.JUDGE:
            wanted = Numbers.INTEGERS if stage.exact else Numbers.FLOATING
            wanted = Numbers.VISIBILITY if stage.name == "mask" else wanted

            assert wanted is Numbers.of(stage), stage.name


def test_what_is_no_array() -> None:
    assert refusal(host_copy, "x", None, Numbers.ANY).startswith("x is None, which is no array: ")
    assert refusal(host_copy, "x", [1], Numbers.ANY).startswith("x is a list, which is no array: ")
    text = "x is a masked array; expected a plain one, in which every element is shown"
    assert text == refusal(host_copy, "x", np.ma.array([1]), Numbers.ANY)


@pytest.mark.parametrize(
    "values", [(1, 2), [1, 2], range(1, 3), np.array([1, 2]), np.array([1, 2], np.uint8)]
)
def test_sequences_of_integers(values: Any) -> None:
    found = host_integers("x", values)

    assert ([1, 2], np.dtype(np.int64)) == (found.tolist(), found.dtype)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (iter([1]), "are a list_iterator; expected a sequence of integers"),
        ({1}, "are a set; expected a sequence of integers"),
        ({0: 1}, "are a dict; expected a sequence of integers"),
        (b"1", "are a bytes; expected a sequence of integers"),
        ("1", "are a str; expected a sequence of integers"),
        (None, "are None; expected a sequence of integers"),
        (np.ma.array([1]), "are a MaskedArray; expected a sequence of integers"),
        ([True], "are [True]; expected integers"),
        (np.array([True]), "are bool [1]; expected integers"),
        (np.array([1.0]), "are float64 [1]; expected integers"),
        (np.array([[1]]), "are int64 [1, 1]; expected integers"),
        ([2**63], "are [9223372036854775808]; expected integers of 64 bits"),
        ([10**5000], "are a list; expected integers of 64 bits"),
    ],
)
def test_what_is_no_sequence_of_integers(values: Any, text: str) -> None:
    assert f"x {text}" == refusal(host_integers, "x", values)


def test_a_sequence_ends_where_it_says() -> None:
    """Python would go on until an IndexError comes."""

    class Endless:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> int:
            return i

    assert [0, 1] == host_integers("x", Endless()).tolist()


def test_one_integer() -> None:
    assert 3 == host_integer("x", np.uint8(3))
    assert "x() returned a bool; expected an integer" == refusal(host_integer, "x()", True)
    assert "x() returned None; expected an integer" == refusal(host_integer, "x()", None)
    assert "x() gave a int; expected an integer of 64 bits" == refusal(
        host_integer, "x()", 10**5000
    )
    assert f"x() gave {2**63}; expected an integer of 64 bits" == refusal(
        host_integer, "x()", 2**63
    )
