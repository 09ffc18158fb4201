"""What the CUDA engine says where it cannot run: the device and the libraries are stand-ins."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.contract import EngineError, UnsupportedError
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_modules import Modules, import_cupy


class CUDARuntimeError(Exception):
    pass


class CompileException(Exception):
    pass


def cupy(
    devices: int | Exception = 1,
    capability: str = "90",
    log: str = "",
) -> Any:
    """As much of CuPy as the refusals touch."""

    def count() -> int:
        if isinstance(devices, Exception):
            raise devices
        return devices

    class RawModule:
        def __init__(self, **_: Any) -> None:
            pass

        def compile(self) -> None:
            if log:
                raise CompileException(log)

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=count,
        driverGetVersion=lambda: 11080,
        runtimeGetVersion=lambda: 12090,
    )
    return SimpleNamespace(
        RawModule=RawModule,
        cuda=SimpleNamespace(
            runtime=runtime,
            Device=lambda: SimpleNamespace(compute_capability=capability),
            compiler=SimpleNamespace(CompileException=CompileException),
        ),
    )


def refused(monkeypatch: pytest.MonkeyPatch, module: Any) -> str:
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(UnsupportedError) as refusal:
        import_cupy()
    return str(refusal.value)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refused(monkeypatch, None)

    assert told.startswith("engine cuda needs CuPy, which cannot be imported (")
    assert told.endswith(
        "; install 'kdtr[cupy-cuda12x]' or 'kdtr[cupy-cuda13x]', whichever your driver serves, or "
        "use engine host"
    )


def test_a_driver_older_than_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver is old")

    assert (
        "engine cuda: CUDA finds no usable device (cudaErrorInsufficientDriver: CUDA driver is old"
        "). The driver serves CUDA 11.8, CuPy was built for CUDA 12.9; install the "
        "CuPy of your driver's major version, or use engine host"
    ) == refused(monkeypatch, cupy(devices=error))


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "engine cuda: this machine has no CUDA device; use engine host" == refused(
        monkeypatch, cupy(devices=0)
    )


@pytest.mark.parametrize(
    ("dtype", "capability", "told"),
    [
        ("float32", "75", "compute capability 7.5; the kernels need 8.0 or later"),
        ("bfloat16", "89", "compute capability 8.9; the kernels need 9.0 or later"),
    ],
)
def test_a_device_that_is_too_old(dtype: str, capability: str, told: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        Modules(cupy(capability=capability), dtype)

    assert f"engine cuda, dtype = {dtype!r}: this device has {told}" == str(refusal.value)


@pytest.mark.parametrize("capability", ["90", "100", "120"])
def test_capabilities_of_two_and_three_digits(capability: str) -> None:
    Modules(cupy(capability=capability), "bfloat16")


def test_a_kernel_that_does_not_compile_is_named_with_file_and_line() -> None:
    with pytest.raises(EngineError) as refusal:
        Modules(cupy(log="rows.cu(12): error: expected a ;"), "float32")

    assert (
        "kernels/rows.cu does not compile for sm_90 with dtype = 'float32':\n"
        "rows.cu(12): error: expected a ;"
    ) == str(refusal.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "float16"}, "dtype = 'float16'; expected 'float32' or 'bfloat16'"),
        ({"graphs": 1}, "graphs = 1; expected True or False"),
        ({"guarded": "yes"}, "guarded = 'yes'; expected True or False"),
        ({"page_size": 0}, "page_size = 0; expected at least 1"),
        ({"split_size": -1}, "split_size = -1; expected at least 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineError) as refusal:
        make_cuda_engine(**options)

    assert told == str(refusal.value)
