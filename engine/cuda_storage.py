"""What lies on a CUDA device: arrays to it and from it, weights, a session's cache rows.

An array of the storage dtype bfloat16 is an array of its bits, uint16, so that nothing but our
kernels can compute with it.
"""

from __future__ import annotations

from math import prod

import ml_dtypes
import numpy as np

from kdtr.contract import Array
from kdtr.engine.cuda_device import BLOCK, CudaDevice, i64, in_turn, launching
from kdtr.engine.cuda_guard import Guard, check_bands
from kdtr.engine.cuda_memory import CLOSE, LESS_WEIGHTS
from kdtr.engine.kernel_set import DeviceInt
from kdtr.engine.paging import PagedCache


class StorageOperations(CudaDevice):
    """The part of a `KernelSet` that the session's data comes and goes through."""

    @in_turn
    def upload(self, host: np.ndarray) -> Array:
        return self._uploaded(host)

    def device_int(self, value: int) -> DeviceInt:
        return self.upload(np.array([value], np.int64))

    @in_turn
    def upload_weight(self, host: np.ndarray) -> Array:
        with self._needing(f"weights of shape {list(host.shape)}", LESS_WEIGHTS):
            if self._real == np.uint16:
                return self._uploaded(host.astype(ml_dtypes.bfloat16).view(np.uint16))
            return self._uploaded(host)

    @in_turn
    def overwrite(self, array: Array, host: np.ndarray) -> None:
        self._set(array, host)

    @in_turn
    def to_host(self, array: Array) -> np.ndarray:
        return _numbers(self._cupy.asnumpy(array))

    @in_turn
    def all_to_host(self, *arrays: Array) -> tuple[np.ndarray, ...]:
        """The copies are asked for while the device is still at work."""
        hosts = [self._page_locked(array.shape, array.dtype) for array in arrays]
        try:
            for array, host in zip(arrays, hosts, strict=True):
                array.get(out=host, blocking=False)
        finally:  # what is asked for must have come before the memory is another's
            self.turn.stream.synchronize()
        return tuple(_numbers(host.copy()) for host in hosts)

    def _page_locked(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Of the host, from a pool: what the device can write to while the host goes on."""
        n = prod(shape)
        memory = self._cupy.cuda.alloc_pinned_memory(n * dtype.itemsize)
        return np.frombuffer(memory, dtype, n).reshape(shape)

    @in_turn
    def new_rows(self, n_layers: int, n_rows: int, row_len: int) -> Array:
        """Between guard bands, if guarded: `check_rows`."""
        shape = (n_layers, n_rows, row_len)
        with self._needing(f"cache rows of shape {list(shape)}", CLOSE):
            if not self.guarded or not prod(shape):
                return self._empty(shape, self._real)
            guard = Guard(self._cupy, self._cupy.get_default_memory_pool().malloc)
            with self._cupy.cuda.using_allocator(guard.malloc):
                return self._empty(shape, self._real)

    @in_turn
    def check_rows(self, rows: Array) -> None:
        """Raises EngineError if a kernel wrote beside the rows; nothing without guards."""
        if self.guarded and rows.size:
            self.turn.stream.synchronize()
            check_bands(rows.data, rows.nbytes, "the cache rows")

    @launching
    def poison_rows(self, rows: Array, first: int, count: int) -> None:
        n_layers, _, row_len = rows.shape
        n = count * row_len
        grid = (min(1024, -(-n // BLOCK)), n_layers, 1)
        self._launch(
            "latents", "poison_rows", grid, BLOCK, rows, *i64(rows[0].size, first * row_len, n)
        )

    @launching
    def read_rows(self, cache: PagedCache, n_slots: int) -> np.ndarray:
        n_layers, _, row_len = cache.rows.shape
        out = self._empty((n_layers, n_slots, row_len), self._real)
        if n_slots:
            self._launch(
                "latents",
                "read_rows",
                (n_slots, n_layers, 1),
                BLOCK,
                *(cache.rows, *i64(cache.rows[0].size), cache.page_table, cache.page_size),
                *(out, row_len, int(self._swizzled(cache))),
            )
        return self.to_host(out)


def _numbers(host: np.ndarray) -> np.ndarray:
    """Bits of bfloat16 as float32; anything else as it is."""
    if host.dtype == np.uint16:
        return host.view(ml_dtypes.bfloat16).astype(np.float32)
    return host
