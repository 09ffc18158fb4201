"""As much of CuPy as a kernel set, its launcher and its refusals touch, without a device.

Arrays are NumPy's; kernels do nothing. Memory is counted: what is allocated beyond `left` bytes is
refused as CuPy refuses it. What a test wants to see is written down in `events`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import numpy as np

_NUMBERS = count(1)  # of devices: sizes are kept by device


class CUDARuntimeError(RuntimeError):
    def __init__(self, text: str, status: int = 35) -> None:
        super().__init__(text)
        self.status = status


class CUDADriverError(RuntimeError):
    def __init__(self, text: str, status: int = 209) -> None:
        super().__init__(text)
        self.status = status


class OutOfMemoryError(MemoryError):
    """CuPy's, with its fields."""

    def __init__(self, size: int, total: int, limit: int) -> None:
        super().__init__(f"Out of memory allocating {size} bytes")
        self._size, self._total, self._limit = size, total, limit


class CompileException(Exception):
    """CuPy's: the log, and what it was of."""

    def __str__(self) -> str:
        return str(self.args[0])


class NVRTCError(Exception):
    pass


class StandInArray(np.ndarray):
    """NumPy's, with what CuPy's has besides."""

    def set(self, host: np.ndarray) -> None:
        self[...] = host


class StandIn:
    """The module `cupy`.

    left      bytes that an allocation may take; None: any number
    limit     of CuPy's pool, as its errors tell it; 0: none
    on_load   raised when a module is compiled and loaded
    hopper_log  what NVRTC says of a kernel for sm_90a that does not compile
    on_end    raised when a capture ends, once per entry
    on_replay raised when a graph is launched
    current   the device that the caller has made current, by its number
    bound     threads that a device was bound to
    reads_pageable  whether the device reads the host's pageable memory by itself (GH200)
    """

    def __init__(
        self,
        *,
        devices: int | Exception = 1,
        capability: str = "90",
        driver: int = 12080,
        runtime: int = 12090,
        on_load: Exception | None = None,
        hopper_log: str = "",
        reads_pageable: bool = False,
    ) -> None:
        self.events: list[str] = []
        self.bound: set[int] = set()
        self.reads_pageable = int(reads_pageable)
        self.left: int | None = None
        self.limit = 0
        self.on_end: list[Exception] = []
        self.on_replay: Exception | None = None
        number = -next(_NUMBERS)
        self.current = number

        class RawModule:
            def __init__(self, **_: Any) -> None:
                pass

            def compile(self) -> None:
                if on_load:
                    raise on_load

            def get_function(self, name: str) -> Any:
                return SimpleNamespace(
                    name=name, kernel=SimpleNamespace(ptr=1), max_dynamic_shared_size_bytes=0
                )

        def get_device_count() -> int:
            if isinstance(devices, Exception):
                raise devices
            return devices

        def compile_program(*_: Any) -> None:
            if hopper_log:
                raise NVRTCError

        self.RawModule = RawModule
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(
                CUDARuntimeError=CUDARuntimeError,
                getDeviceCount=get_device_count,
                driverGetVersion=lambda: driver,
                runtimeGetVersion=lambda: runtime,
                getDevice=lambda: self.current,
                setDevice=lambda _: self.bound.add(get_ident()),
                getDeviceProperties=lambda _: {"name": b"Stand-in"},
                memGetInfo=lambda: (self.left, 1000),
            ),
            nvrtc=SimpleNamespace(
                NVRTCError=NVRTCError,
                createProgram=lambda *_: 1,
                compileProgram=compile_program,
                getCUBIN=lambda _: b"",
                getProgramLog=lambda _: hopper_log,
                destroyProgram=lambda _: None,
            ),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            compiler=SimpleNamespace(CompileException=CompileException),
            Device=lambda: _Device(self, number, capability),
            Stream=lambda **_: _Stream(self),
            MemoryPool=lambda: SimpleNamespace(malloc=self._malloc),
            get_current_stream=lambda: SimpleNamespace(ptr=1),
            using_allocator=self._using_allocator,
        )

    def empty(self, shape: tuple[int, ...], dtype: Any) -> StandInArray:
        array = np.zeros(shape, dtype).view(StandInArray)
        self._malloc(array.nbytes)
        return array

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Any:
        self.events.append("zeros")
        return np.zeros(shape, dtype)

    def asnumpy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def get_default_memory_pool(self) -> Any:
        return SimpleNamespace(
            malloc=self._malloc, free_all_blocks=lambda: self.events.append("free_all_blocks")
        )

    def _malloc(self, size: int) -> Any:
        if self.left is not None and size > self.left:
            raise OutOfMemoryError(size, 0, self.limit)
        return SimpleNamespace(size=size)

    @contextmanager
    def _using_allocator(self, malloc: Callable[[int], Any]) -> Iterator[None]:
        own, self._malloc = self._malloc, malloc
        try:
            yield
        finally:
            self._malloc = own


class _Context:
    """Writes down when it is entered and left."""

    def __init__(self, cupy: StandIn, name: str) -> None:
        self._cupy, self._name = cupy, name

    def __enter__(self) -> Any:
        self._cupy.events.append(f"enter {self._name}")
        return self

    def __exit__(self, *_: Any) -> None:
        self._cupy.events.append(f"leave {self._name}")

    def synchronize(self) -> None:
        self._cupy.events.append(f"wait for {self._name}")


class _Device(_Context):
    def __init__(self, cupy: StandIn, number: int, capability: str) -> None:
        super().__init__(cupy, "device")
        self.id, self.compute_capability = number, capability
        self.attributes = {"PageableMemoryAccessUsesHostPageTables": cupy.reads_pageable}


class _Stream(_Context):
    def __init__(self, cupy: StandIn) -> None:
        super().__init__(cupy, "stream")

    def begin_capture(self) -> None:
        self._cupy.events.append("begin capture")

    def end_capture(self) -> Any:
        self._cupy.events.append("end capture")
        if self._cupy.on_end:
            raise self._cupy.on_end.pop(0)
        return SimpleNamespace(launch=self._replay)

    def _replay(self, stream: Any) -> None:
        if self._cupy.on_replay:
            raise self._cupy.on_replay
        self._cupy.events.append("replay")


def driver_that_answers(status: int) -> Any:
    """libcuda, whose launches end so."""

    def name_of(_: int, name: Any) -> None:
        name._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"

    return SimpleNamespace(cuLaunchKernelEx=lambda *_: status, cuGetErrorName=name_of)
