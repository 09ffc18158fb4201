"""The device that an engine computes on: one stream, whose turn it is there, and launches.

All operations of a kernel set run on one stream of one device, in the order in which they are
called: a counter between blocks and graphs rely on it. A graph cannot be captured
on the default stream; and what another thread launched on a stream while it is captured would
become part of the graph. So whoever operates takes the turn: the device that was current when the
engine was made and its stream are current meanwhile, whatever the caller has made current, and
other threads wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import RLock, local
from typing import Any, TypeVar

import numpy as np

from kdtr.contract import Array
from kdtr.engine import cuda_attention, cuda_cuts
from kdtr.engine.cuda_guard import Guard
from kdtr.engine.cuda_launch import launch
from kdtr.engine.cuda_memory import CLOSE, memory_error, ran_out
from kdtr.engine.cuda_modules import Modules, import_cupy
from kdtr.engine.kernel_set import DeviceInt, Rows
from kdtr.engine.paging import PagedCache

Operation = TypeVar("Operation", bound=Callable[..., Any])

BLOCK = 256


class Turn:
    """The device and the stream, as a context that one thread has at a time; it may have it again.

    Entering says whether it is the outermost one. The device is bound to each thread that enters:
    which one is current is known without that, and a launch is refused without it.
    """

    def __init__(self, cupy: Any) -> None:
        self.device = cupy.cuda.Device()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._current_device = cupy.cuda.runtime.getDevice
        self._elsewhere = False  # whether the caller had another device current
        self._bind = partial(cupy.cuda.runtime.setDevice, self.device.id)
        self._bound = local()
        self._lock = RLock()
        self._depth = 0

    def __enter__(self) -> bool:
        self._lock.acquire()
        try:
            if not self._depth:
                self._make_current()
            self._depth += 1
        except BaseException:
            self._lock.release()
            raise
        return self._depth == 1

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._depth == 1:
                self.stream.__exit__(*exception)
                if self._elsewhere:
                    self.device.__exit__(*exception)
        finally:
            self._depth -= 1
            self._lock.release()

    def _make_current(self) -> None:
        self._elsewhere = self._current_device() != self.device.id
        if self._elsewhere:  # to enter costs more than to ask
            self.device.__enter__()
        if not hasattr(self._bound, "yes"):
            self._bind()
            self._bound.yes = True
        self.stream.__enter__()


def in_turn(operation: Operation) -> Operation:
    """The operation has the turn while it runs; memory that runs out is told, under its name."""

    @wraps(operation)
    def run(self: CudaDevice, *args: Any, **kwargs: Any) -> Any:
        with self.turn as outermost:
            try:
                return operation(self, *args, **kwargs)
            except Exception as error:
                # Within another operation that one knows what it was for.
                if not outermost or not ran_out(self._cupy, error):
                    raise
                what = operation.__name__.strip("_").replace("_", " ")
                raise memory_error(self._cupy, error, what, CLOSE) from None

    return run  # type: ignore[return-value]


def launching(operation: Operation) -> Operation:
    """`in_turn`, for what launches kernels: outside of a program it is guarded by itself."""

    @wraps(operation)
    def run(self: CudaDevice, *args: Any, **kwargs: Any) -> Any:
        with self.turn as outermost:
            if outermost and self.guarded:
                return self._under_guard(lambda: operation(self, *args, **kwargs))
            return operation(self, *args, **kwargs)

    return in_turn(run)  # type: ignore[return-value]


class CudaDevice:
    """What the operations of a kernel set share. `rows` is set by `over`.

    guarded  whether buffers lie between guard bands that are compared after each run
    Raises UnsupportedError without a usable device, EngineError for a kernel that does not compile
    or load, MemoryError without room for the kernels.
    """

    def __init__(self, dtype: str, *, guarded: bool) -> None:
        self._cupy = import_cupy()
        self._modules = Modules(self._cupy, dtype)
        self._real = np.dtype(np.float32 if dtype == "float32" else np.uint16)
        self.guarded = guarded
        self.turn = Turn(self._cupy)
        # Elsewhere the driver copies pageable memory to its own before a call returns.
        self._reads_pageable = bool(
            self.turn.device.attributes["PageableMemoryAccessUsesHostPageTables"]
        )
        self._rows: Rows | None = None
        self._ones: dict[int, Array] = {}
        self._arrived = self._zeros((1,), np.int32)  # the router's blocks count with it
        properties = self._cupy.cuda.runtime.getDeviceProperties(self.turn.device.id)
        self.device = properties["name"].decode()

    @in_turn
    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.zeros(shape, dtype)

    @contextmanager
    def _needing(self, what: str, lower: str) -> Iterator[None]:
        """Memory that runs out within is told as what was asked for this."""
        try:
            yield
        except Exception as error:
            if not ran_out(self._cupy, error):
                raise
            raise memory_error(self._cupy, error, what, lower) from None

    def _launch(
        self,
        file: str,
        name: str,
        grid: tuple[int, int, int],
        block: int,
        *arguments: Any,
        shared: int = 0,
    ) -> None:
        launch(self._modules.kernel(file, name), grid, block, shared, arguments, overlap=True)

    def _hopper(self, file: str) -> Callable[[str], Any] | None:
        """Entry points of a file that Hopper alone has, by name."""
        return partial(self._modules.kernel, file) if self._modules.has(file) else None

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.empty(shape, dtype)

    def _under_guard(self, compute: Callable[[], Any]) -> Any:
        guard = Guard(self._cupy, self._cupy.get_default_memory_pool().malloc)
        with self._cupy.cuda.using_allocator(guard.malloc):
            result = compute()
        guard.check()
        return result

    def _bound(self) -> Rows:
        assert self._rows is not None, "an operation over rows, outside of `over`"
        return self._rows

    def _count(self, n: int) -> DeviceInt:
        """Rows that count: of the rows bound, or all n."""
        if self._rows is not None and self._rows.n == n:
            return self._rows.count
        if n not in self._ones:
            self._ones[n] = self._uploaded(np.array([n], np.int64))
        return self._ones[n]

    def _uploaded(self, host: np.ndarray) -> Array:
        array = self._empty(host.shape, host.dtype)
        self._set(array, host)
        return array

    def _set(self, array: Array, host: np.ndarray) -> None:
        """The caller may reuse `host` afterwards."""
        array.set(np.ascontiguousarray(host))
        if self._reads_pageable:
            self.turn.stream.synchronize()

    def _swizzled(self, cache: PagedCache) -> bool:
        """Whether rows are stored as the tensor cores' attention loads them."""
        sizes = cache.latent_len, cache.rows.shape[-1] - cache.latent_len
        fast = sizes == (cuda_attention.SWIZZLED_LATENT, cuda_attention.SWIZZLED_ROPE)
        whole_tiles = cache.page_size % cuda_cuts.TILE == 0
        return bool(self._real == np.uint16 and fast and whole_tiles)


def i64(*numbers: int) -> list[ctypes.c_longlong]:
    """Arguments of 64 bits."""
    return [ctypes.c_longlong(number) for number in numbers]
