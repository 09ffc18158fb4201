"""One launch, through the driver: CuPy cannot ask for launches that overlap, and costs more."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from threading import Lock
from typing import Any

_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID
MOST_BLOCKS = 65_535  # of a grid's second and third dimension
_STATIC_LIMIT = 48 * 1024  # bytes of shared memory that need no attribute
_RAISING = Lock()  # engines of a process share kernels and their attributes


class LaunchError(RuntimeError):
    """The driver refused a launch; `status` is its CUresult."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("n_attributes", ctypes.c_uint),
    ]


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    block: int,
    shared: int,
    arguments: Sequence[Any],
    overlap: bool = False,
) -> None:
    """On the current stream.

    kernel     a cupy.RawKernel
    shared     bytes of dynamic shared memory
    arguments  arrays (None: a null pointer), int as 32 bits, ctypes values or structures
    overlap    the kernel may start before the one ahead of it has ended, and itself waits for it
               before it reads anything (griddepcontrol.wait)
    Raises LaunchError when the driver refuses.
    """
    import cupy

    if shared > _STATIC_LIMIT and kernel.max_dynamic_shared_size_bytes < shared:
        with _RAISING:
            if kernel.max_dynamic_shared_size_bytes < shared:  # still: it is never lowered
                kernel.max_dynamic_shared_size_bytes = shared
    values = [_argument(argument) for argument in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION)
    attribute.value[0] = 1
    config = _Config(
        grid=(ctypes.c_uint * 3)(*grid),
        block=(ctypes.c_uint * 3)(block, 1, 1),
        shared=shared,
        stream=cupy.cuda.get_current_stream().ptr,
        attributes=ctypes.pointer(attribute),
        n_attributes=int(overlap),
    )
    status = _driver().cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(kernel.kernel.ptr), pointers, None
    )
    if status:
        raise LaunchError(
            f"launch of {kernel.name} with grid {grid}, block {block}, {shared} bytes of shared "
            f"memory failed: CUDA driver error {status}, {_error_name(status)}",
            status,
        )


def _argument(argument: Any) -> Any:
    if argument is None:
        return ctypes.c_void_p(0)
    if isinstance(argument, int):
        if not -(1 << 31) <= argument < 1 << 31:  # ctypes would drop its upper bits
            raise OverflowError(f"{argument} as a launch's argument of 32 bits")
        return ctypes.c_int(argument)
    if isinstance(argument, (ctypes._SimpleCData, ctypes.Structure)):
        return argument
    return ctypes.c_void_p(argument.data.ptr)


def _error_name(status: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(status, ctypes.byref(name))
    return (name.value or b"which has no name").decode()


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
