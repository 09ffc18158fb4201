"""A launch's arguments and attributes, without a device."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_stand_in import StandIn, driver_that_answers

from kdtr.engine import cuda_launch


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", StandIn())
    monkeypatch.setattr(cuda_launch, "_driver", lambda: driver_that_answers(0))


def kernel(shared: int = 0) -> Any:
    return SimpleNamespace(
        name="k", kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=shared
    )


@pytest.mark.parametrize("number", [1 << 31, 1 << 32, -(1 << 31) - 1])
def test_an_int_of_more_than_32_bits_is_refused(number: int) -> None:
    with pytest.raises(OverflowError, match=f"^{number} as a launch's argument of 32 bits$"):
        cuda_launch.launch(kernel(), (1, 1, 1), 32, 0, [number])


@pytest.mark.parametrize("number", [(1 << 31) - 1, -(1 << 31)])
def test_an_int_of_32_bits_is_none_too_large(number: int) -> None:
    cuda_launch.launch(kernel(), (1, 1, 1), 32, 0, [number])


def test_what_a_kernel_may_take_is_raised_and_never_lowered() -> None:
    k = kernel()
    found = []
    for shared in (1_000, 60_000, 90_000, 60_000):
        cuda_launch.launch(k, (1, 1, 1), 32, shared, [])
        found.append(k.max_dynamic_shared_size_bytes)

    assert [0, 60_000, 90_000, 90_000] == found


def test_another_engine_that_raises_it_meanwhile_is_not_undone() -> None:
    """Between the first look and the second, a kernel's attribute has become larger."""

    class Shared:
        looks = 0

        def __get__(self, *_: Any) -> int:
            Shared.looks += 1
            return 0 if Shared.looks == 1 else 90_000

        def __set__(self, _: Any, value: int) -> None:
            raise AssertionError(f"lowered to {value}")

    class Kernel:
        name, kernel = "k", SimpleNamespace(ptr=1)
        max_dynamic_shared_size_bytes = Shared()

    cuda_launch.launch(Kernel(), (1, 1, 1), 32, 60_000, [])

    assert 2 == Shared.looks
