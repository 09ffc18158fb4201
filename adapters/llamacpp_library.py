"""llama.cpp through llama-cpp-python's ctypes: the module, its log, and how a tensor is read."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kdtr.contract import EngineError, UnsupportedError

F32, F16 = 0, 1  # ggml_type; the numbers are those of ggml.h
_I32, _I64 = 26, 27
_DTYPES: dict[int, np.dtype[Any]] = {
    F32: np.dtype(np.float32),
    F16: np.dtype(np.float16),
    _I32: np.dtype(np.int32),
    _I64: np.dtype(np.int64),
}
_N_DIMS, _N_SOURCES, _N_PARAMS = 4, 10, 16


class GgmlTensor(ctypes.Structure):
    """`struct ggml_tensor` of ggml.h, which llama-cpp-python hands over as a bare pointer.

    ne is the shape, fastest axis first; nb the strides in bytes; src what it was computed from.
    """


_TensorPointer = ctypes.POINTER(GgmlTensor)
GgmlTensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * _N_DIMS),
    ("nb", ctypes.c_size_t * _N_DIMS),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * _N_PARAMS),
    ("flags", ctypes.c_int32),
    ("src", _TensorPointer * _N_SOURCES),
    ("view_src", _TensorPointer),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]
_OBJECT_BYTES = 32  # sizeof(struct ggml_object), which ggml_tensor_overhead() adds


class Library(NamedTuple):
    """llama_cpp's ctypes functions, its version, the words of an operation, and the last log lines.

    operation  ggml_op_name: the number of a tensor's `op` to its name, "MUL_MAT"
    """

    api: Any
    version: str
    operation: Callable[[int], str]
    log: deque[str]


@cache
def library() -> Library:
    """Raises UnsupportedError where llama-cpp-python cannot be imported."""
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    except (ImportError, OSError, RuntimeError) as error:  # the package raises all three
        raise UnsupportedError(
            f"the llamacpp engine needs llama-cpp-python, which cannot be imported ({error}); "
            "expected it: pip install 'kdtr[llamacpp]'"
        ) from error
    log: deque[str] = deque(maxlen=20)

    def listen(_: int, text: bytes, __: Any) -> None:
        log.append(text.decode(errors="replace").strip())

    _KEPT.append(api.llama_log_callback(listen))  # called for as long as the process lives
    api.llama_log_set(_KEPT[-1], ctypes.c_void_p(0))
    api.llama_backend_init()
    refuse_layout(int(api._lib.ggml_tensor_overhead()), llama_cpp.__version__)
    op_name = api._lib.ggml_op_name
    op_name.restype, op_name.argtypes = ctypes.c_char_p, [ctypes.c_int]
    return Library(api, llama_cpp.__version__, lambda op: op_name(op).decode(), log)


_KEPT: list[Any] = []


def refuse_layout(overhead: int, version: str) -> None:
    """A tensor of another version is read wrongly, or not at all: its size tells.

    overhead  ggml_tensor_overhead(), bytes
    """
    found, wanted = overhead - _OBJECT_BYTES, ctypes.sizeof(GgmlTensor)
    if found != wanted:
        raise UnsupportedError(
            f"llama-cpp-python {version} has tensors of {found} bytes; expected {wanted}, as in "
            "0.3.36: install that"
        )


def failure(what: str) -> EngineError:
    """What llama.cpp said last, in its own words."""
    said = [line for line in library().log if line]
    return EngineError(f"{what}: {'; '.join(said[-3:]) or 'it said nothing'}")


def read(tensor: GgmlTensor) -> np.ndarray:
    """A copy [slowest axis .., fastest], always four axes; float16 keeps its dtype."""
    dtype = _DTYPES.get(tensor.type)
    if dtype is None or not tensor.data:
        name = tensor.name.decode()
        raise EngineError(f"llama.cpp's tensor {name} has ggml_type {tensor.type} or no data")
    shape, strides = list(tensor.ne), list(tensor.nb)
    if 0 in shape:
        return np.zeros(shape[::-1], dtype)
    n_bytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    flat = np.frombuffer((ctypes.c_char * n_bytes).from_address(tensor.data), np.uint8)
    view = np.lib.stride_tricks.as_strided(
        flat[: dtype.itemsize].view(dtype), shape[::-1], strides[::-1]
    )
    return np.array(view)


def half_split(pairs: np.ndarray) -> np.ndarray:
    """[.., r] in pairs (2i, 2i+1) -> first members, then second members (MLA-7)."""
    return np.concatenate([pairs[..., 0::2], pairs[..., 1::2]], axis=-1)
