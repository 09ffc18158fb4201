"""Where device memory runs out: what was asked for, what is free, and what to lower.

CuPy and the driver say so in four ways: an allocation of CuPy's, a call of the runtime (a graph is
instantiated), one of the driver (a module is loaded), a launch. All of them become a MemoryError.
"""

from __future__ import annotations

from typing import Any

from kdtr.engine.cuda_launch import LaunchError

_MEMORY_ALLOCATION = 2  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY

CLOSE = "close sessions and models that are not needed"
LESS_WEIGHTS = f"load a smaller model, store it as bfloat16, or {CLOSE}"
LESS_GRAPHS = f"{CLOSE}, verify smaller trees, or make the engine with graphs=False"
_FEWER_ROWS = {
    "prefill": "prefill the prompt in shorter chunks",
    "forward_tokens": "give fewer rows at a time",
    "verify": "verify a smaller tree",
    "round": "verify a smaller tree",
}


def fewer_rows(program: str) -> str:
    """What to lower when a program of this name finds no memory to run in."""
    return f"{_FEWER_ROWS[program]}, or {CLOSE}"


def ran_out(cupy: Any, error: BaseException) -> bool:
    """Whether this is device memory that ran out, and not yet told as a MemoryError of ours."""
    if isinstance(error, cupy.cuda.memory.OutOfMemoryError):
        return True
    of_cuda = (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, LaunchError)
    return isinstance(error, of_cuda) and error.status == _MEMORY_ALLOCATION


def memory_error(cupy: Any, error: BaseException, what: str, lower: str) -> MemoryError:
    """The error to raise in place of one that `ran_out`; numbers are those of the current device.

    what   needed the memory
    lower  what the caller can do
    """
    runtime = cupy.cuda.runtime
    name = runtime.getDeviceProperties(runtime.getDevice())["name"].decode()
    free, total = runtime.memGetInfo()
    size, limit = getattr(error, "_size", None), getattr(error, "_limit", 0)
    asked = f"the driver found no memory ({error})" if size is None else f"{size} bytes asked for"
    held = f"CuPy's pool may hold {limit} bytes and " if limit else ""
    return MemoryError(
        f"{what}: {asked}, {held}{free} of the {total} bytes of {name} are free; {lower}"
    )
