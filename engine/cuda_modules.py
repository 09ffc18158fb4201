"""The compiled kernels of one device: NVRTC through CuPy, once per file and storage type.

Every file of `kernels/` is compiled when the engine is made, not when a kernel first runs: a
kernel that does not compile is refused before a model is loaded. CuPy keeps the binaries on disk
(CUPY_CACHE_DIR).
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from kdtr.contract import EngineError, UnsupportedError
from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_memory import CLOSE, memory_error, ran_out

KERNELS = Path(__file__).with_name("kernels")

# Compiled for both storage types, and for bfloat16 alone. The names of their files.
FILES = ("rows", "latents", "tree", "best_first", "linear", "router", "experts", "verify_attn")
BFLOAT16_FILES = ("verify_attn_mma",)
# For bfloat16 on Hopper, with instructions that no other architecture has.
HOPPER_FILES: tuple[str, ...] = ("verify_attn_wgmma", "linear_wgmma")

# The oldest architecture that the kernels are compiled for and were tried on, and the first whose
# launches may overlap.
OLDEST = (9, 0)
CUDA_DTYPES = ("float32", "bfloat16")


def options(dtype: str) -> tuple[str, ...]:
    """NVRTC's, without the architecture: one set for all that is compiled, by whom it may be.

    CuPy adds -ftz=true by itself, to its own; and it knows a binary on disk by the options and the
    text of the file, not by the headers: so an option names these.
    """
    storage = ("-DSTORE_BF16",) if dtype == "bfloat16" else ()
    return ("-std=c++17", "-ftz=true", f"-I{KERNELS}", f"-DHEADERS={_headers(KERNELS)}", *storage)


@cache
def _headers(folder: Path) -> str:
    """A name of what they hold."""
    texts = [header.read_bytes() for header in sorted(folder.glob("*.cuh"))]
    return "h" + sha256(b"\0".join(texts)).hexdigest()


def files(dtype: str) -> tuple[str, ...]:
    """What is compiled for a storage type."""
    return FILES + BFLOAT16_FILES if dtype == "bfloat16" else FILES


def import_cupy() -> Any:
    """CuPy with a device that answers, or the reason why not, as an UnsupportedError."""
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(
            f"engine cuda needs CuPy, which cannot be imported ({error}); install "
            "'kdtr[cupy-cuda12x]' or 'kdtr[cupy-cuda13x]', whichever your driver serves, or use "
            "engine host"
        ) from None
    runtime = cupy.cuda.runtime
    try:
        n_devices = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        served = runtime.driverGetVersion()
        if served == 0:
            raise UnsupportedError(
                f"engine cuda: CUDA finds no driver ({error}); use engine host"
            ) from None
        raise UnsupportedError(
            f"engine cuda: CUDA finds no usable device ({error}). The driver serves CUDA "
            f"{_version(served)}, CuPy was built for CUDA "
            f"{_version(runtime.runtimeGetVersion())}; install the CuPy of your driver's major "
            "version, or use engine host"
        ) from None
    if n_devices == 0:
        raise UnsupportedError("engine cuda: this machine has no CUDA device; use engine host")
    return cupy


class Modules:
    """Kernels by file and name, for the current device.

    Raises UnsupportedError for a device that is too old, EngineError for a kernel that does not
    compile or load, MemoryError without room for it.
    """

    def __init__(self, cupy: Any, dtype: str) -> None:
        device = cupy.cuda.Device()
        found = (int(device.compute_capability[:-1]), int(device.compute_capability[-1]))
        if found < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise UnsupportedError(
                f"engine cuda, dtype = {dtype!r}: this device has compute capability "
                f"{found[0]}.{found[1]}; the kernels need {oldest} or later"
            )
        hopper = HOPPER_FILES if dtype == "bfloat16" and found == cuda_hopper.HOPPER else ()
        self._modules = {
            name: self._compiled(cupy, name, dtype, found) for name in (*files(dtype), *hopper)
        }
        self._kernels: dict[tuple[str, str], Any] = {}

    def has(self, file: str) -> bool:
        """Whether kernels/<file>.cu serves this device and storage type."""
        return file in self._modules

    def kernel(self, file: str, name: str) -> Any:
        """The entry point `name` of kernels/<file>.cu: a cupy.RawKernel."""
        key = file, name
        if key not in self._kernels:
            self._kernels[key] = self._modules[file].get_function(name)
        return self._kernels[key]

    @staticmethod
    def _compiled(cupy: Any, name: str, dtype: str, capability: tuple[int, int]) -> Any:
        code = (KERNELS / f"{name}.cu").read_text()
        suffix = "a" if name in HOPPER_FILES else ""
        target = f"sm_{capability[0]}{capability[1]}{suffix} with dtype = {dtype!r}"
        try:
            if name in HOPPER_FILES:
                return cuda_hopper.compiled(cupy, code, f"{name}.cu", options(dtype))
            module = cupy.RawModule(code=code, options=options(dtype))
            module.compile()
        except cupy.cuda.compiler.CompileException as error:
            raise EngineError(
                f"kernels/{name}.cu does not compile for {target}:\n{error}"
            ) from None
        except cupy.cuda.driver.CUDADriverError as error:
            if ran_out(cupy, error):
                raise memory_error(cupy, error, f"kernels/{name}.cu", CLOSE) from None
            runtime = cupy.cuda.runtime
            served, built = runtime.driverGetVersion(), runtime.runtimeGetVersion()
            raise EngineError(
                f"kernels/{name}.cu compiles for {target}, and the driver does not load it "
                f"({error}). The driver serves CUDA {_version(served)}, CuPy was built for CUDA "
                f"{_version(built)}; install a driver as new as CuPy, or a CuPy that knows the "
                "device"
            ) from None
        return module


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
