"""What Hopper alone has: kernels of its own instructions (sm_90a), and tensor maps for its copies.

CuPy compiles for the architecture that all of a generation share, which lacks both; so kernels for
sm_90a are compiled through its NVRTC binding. A tensor map is what a copy of a tile reads its
sizes and strides from; the driver writes it, and it is an argument of the launch.
"""

from __future__ import annotations

import ctypes
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

HOPPER = (9, 0)
ARCHITECTURE = "sm_90a"
TILE = 64  # slots; page sizes are multiples of it
ROWS = 64  # of the query, a block
THREADS = 256
SHARED_BYTES = 229_728  # dynamic, of verify_attn_wgmma; the .cu asserts the same number

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion
_UINT16, _SWIZZLE_128_BYTES, _PROMOTE_256_BYTES = 1, 3, 3
_MOST_MAPS = 4_096  # kept, by address and sizes
_MAP_WORDS = 16
_GROUPS = 3  # of columns, a copy

# Binaries of this process, by NVRTC, source, name and options. CuPy keeps what it has loaded, by
# path, for good.
_BINARIES: dict[tuple[Any, ...], tuple[Any, Path]] = {}


class TensorMap(ctypes.Structure):
    """A CUtensorMap: 128 bytes, as the driver wrote them."""

    _fields_ = (("words", ctypes.c_uint64 * _MAP_WORDS),)


def tile_map(rows: Any) -> TensorMap:
    """Of rows [physical rows, 576], 2 bytes each: a copy takes 64 rows and three times 64 columns.

    Raises RuntimeError when the driver refuses.
    """
    n_rows, row_len = rows.shape
    return _tile_map(rows.data.ptr, n_rows, row_len)


@lru_cache(_MOST_MAPS)
def _tile_map(address: int, n_rows: int, row_len: int) -> TensorMap:
    sizes, strides = (64, n_rows, row_len // 64), (2 * row_len, 128)  # rows, groups of columns
    box = (64, TILE, _GROUPS)
    return _encoded(address, sizes, strides, box)  # no swizzle beside the cache's own


def matrix_map(matrix: Any, box_rows: int) -> TensorMap:
    """Of a matrix [rows, i], 2 bytes each, its rows any multiple of 16 bytes apart.

    A copy takes box_rows rows by 64 elements, swizzled; 0 for those that are not there.
    Raises RuntimeError when the driver refuses.
    """
    n_rows, i = matrix.shape
    return _matrix_map(matrix.data.ptr, n_rows, i, matrix.strides[0], box_rows)


@lru_cache(_MOST_MAPS)
def _matrix_map(address: int, n_rows: int, i: int, stride: int, box_rows: int) -> TensorMap:
    return _encoded(address, (i, n_rows), (stride,), (64, box_rows), _SWIZZLE_128_BYTES)


def _encoded(
    address: int,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 0,
) -> TensorMap:
    """Sizes innermost first; strides in bytes, of all but the innermost."""
    memory = (ctypes.c_uint64 * (_MAP_WORDS + 8))()  # the driver writes to multiples of 64 bytes
    start = -ctypes.addressof(memory) % 64
    written, rank = TensorMap.from_buffer(memory, start), len(sizes)
    status = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.byref(written),
        _UINT16,
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * len(strides))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *(0, swizzle, _PROMOTE_256_BYTES, 0),  # not interleaved; 0 beyond the sizes
    )
    if status:
        raise RuntimeError(f"a tensor map of sizes {sizes}: CUDA driver error {status}")
    return TensorMap.from_buffer_copy(written)


def compiled(cupy: Any, source: str, name: str, options: tuple[str, ...]) -> Any:
    """A cupy.RawModule for sm_90a, compiled once in a process.

    Raises cupy.cuda.compiler.CompileException.
    """
    nvrtc = cupy.cuda.nvrtc
    key = id(nvrtc), source, name, options
    if key not in _BINARIES:
        path = Path(_folder().name) / f"{len(_BINARIES)}-{name}.cubin"
        path.write_bytes(_binary(cupy, source, name, options))
        _BINARIES[key] = nvrtc, path
    module = cupy.RawModule(path=str(_BINARIES[key][1]))
    module.compile()  # reads the file
    return module


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Until the process ends: CuPy may read a binary again."""
    return tempfile.TemporaryDirectory()


def _binary(cupy: Any, source: str, name: str, options: tuple[str, ...]) -> bytes:
    nvrtc = cupy.cuda.nvrtc
    program = nvrtc.createProgram(source, name, (), ())
    options = (f"-arch={ARCHITECTURE}", *options)
    try:
        nvrtc.compileProgram(program, options)
        binary: bytes = nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError:
        log = nvrtc.getProgramLog(program)
        failure = cupy.cuda.compiler.CompileException
        raise failure(log, source, name, options, "nvrtc") from None
    finally:
        nvrtc.destroyProgram(program)
    return binary
