"""Every kernel for every architecture it must run on, without a device (`make kernels`: a table).

What the compiler cannot say, numbers and speed, needs a GPU: `make gate-gpu`, `make bench-gpu`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from kdtr.engine.cuda_compile import (
    ARCHITECTURES,
    MAX_SHARED_BYTES,
    MAX_SPILL_BYTES,
    RESERVED_BYTES,
    CompileError,
    compiled_source,
)
from kdtr.engine.cuda_compile import compiled as compile_file
from kdtr.engine.cuda_modules import CUDA_DTYPES, KERNELS, files
from kdtr.engine.cuda_shared import _BYTES, dynamic_shared_bytes

pytest.importorskip("cupy", reason="NVRTC is called through CuPy: pip install 'kdtr[compile]'")

compiled = cache(compile_file)
EVERY = [(file, dtype) for dtype in CUDA_DTYPES for file in files(dtype)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("file", "dtype"), EVERY)
def test_within_the_limits_of_a_block(file: str, dtype: str, architecture: str) -> None:
    for kernel in compiled(file, dtype, architecture):
        shared = kernel.static_shared_bytes + dynamic_shared_bytes(kernel.kernel)
        print(f"{kernel}, {shared} bytes of shared memory in all")
        assert kernel.spill_bytes <= MAX_SPILL_BYTES, kernel
        assert shared + RESERVED_BYTES <= MAX_SHARED_BYTES, kernel


def test_every_file_is_compiled() -> None:
    assert {file for file, _ in EVERY} == {path.stem for path in KERNELS.glob("*.cu")}


def test_dynamic_shared_memory_is_that_of_kernels() -> None:
    """A kernel renamed in its file would otherwise count as taking none."""
    kernels = {
        kernel.kernel
        for file in files("bfloat16")
        for kernel in compiled(file, "bfloat16", ARCHITECTURES[0])
    }

    assert set(_BYTES) <= kernels


def test_an_instruction_of_another_architecture_fails() -> None:
    source = """
    extern "C" __global__ void f() { asm volatile("wgmma.fence.sync.aligned;"); }
    """
    with pytest.raises(CompileError, match=r"(?s)wrong\.cu, bfloat16, sm_120: .*wgmma"):
        compiled_source(source, "wrong.cu", "bfloat16", "sm_120")


def test_a_slip_is_told_with_its_line() -> None:
    with pytest.raises(CompileError, match=r"slip\.cu\(2\): error"):
        compiled_source("\nint f() { retrun 0; }\n", "slip.cu", "float32", "sm_90")


def test_spills_and_shared_memory_are_seen() -> None:
    """The gate can fail: a kernel that needs more registers than it may have."""
    source = """
    extern "C" __global__ void __launch_bounds__(1024) f(float* x) {
        __shared__ float s[1000];
        float a[120];
        for (int i = 0; i < 120; ++i) a[i] = x[i * 1024 + threadIdx.x];
        s[threadIdx.x % 1000] = a[0];
        __syncthreads();
        for (int j = 0; j < 9; ++j)
            for (int i = 0; i < 120; ++i) a[i] = a[i] * s[j] + a[(i + 1) % 120];
        for (int i = 0; i < 120; ++i) x[i * 1024 + threadIdx.x] = a[i];
    }
    """
    (found,) = compiled_source(source, "spills.cu", "float32", "sm_90")

    assert found.spill_bytes > MAX_SPILL_BYTES
    assert 4000 == found.static_shared_bytes


def test_extern_names_are_unique() -> None:
    """`Modules.kernel` finds a kernel by file, the table by name alone."""
    for dtype in CUDA_DTYPES:
        names = Counter(
            kernel.kernel
            for file in files(dtype)
            for kernel in compiled(file, dtype, ARCHITECTURES[0])
        )
        assert [] == [name for name, count in names.items() if count > 1]
