"""Every kernel for every architecture it must run on, without a device (`make kernels`: a table).

What the compiler cannot say, numbers and speed, needs a GPU: `make gate-gpu`, `make bench-gpu`.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from kdtr.engine import cuda_hopper, cuda_linear
from kdtr.engine.cuda_compile import (
    ARCHITECTURES,
    MAX_FRAME_BYTES,
    MAX_SPILL_BYTES,
    CompileError,
    compiled_source,
    everything,
    within_limits,
)
from kdtr.engine.cuda_compile import compiled as compile_file
from kdtr.engine.cuda_modules import CUDA_DTYPES, KERNELS, files
from kdtr.engine.cuda_shared import _BYTES, dynamic_shared_bytes

pytest.importorskip("cupy", reason="NVRTC is called through CuPy: pip install 'kdtr[compile]'")

compiled = cache(compile_file)


@pytest.mark.parametrize(("dtype", "file", "architecture"), [*everything()])
def test_within_the_limits_of_a_block(dtype: str, file: str, architecture: str) -> None:
    found = compiled(file, dtype, architecture)

    assert found, "no kernel in the file"
    for kernel in found:
        print(f"{kernel}, {dynamic_shared_bytes(kernel.kernel)} bytes of dynamic shared memory")
        assert within_limits(kernel, architecture), kernel


def test_every_file_is_compiled() -> None:
    assert {file for _, file, _ in everything()} == {path.stem for path in KERNELS.glob("*.cu")}


def test_dynamic_shared_memory_is_that_of_kernels() -> None:
    """A kernel renamed in its file would otherwise count as taking none."""
    kernels = {
        kernel.kernel
        for dtype, file, architecture in everything()
        if dtype == "bfloat16" and architecture not in ARCHITECTURES[1:]
        for kernel in compiled(file, dtype, architecture)
    }

    assert set(_BYTES) <= kernels


def test_every_kernel_that_a_projection_may_choose_is_compiled() -> None:
    there = {kernel.kernel for kernel in compiled("linear", "bfloat16", "sm_90")}
    there |= {
        kernel.kernel for kernel in compiled("linear_wgmma", "bfloat16", cuda_hopper.ARCHITECTURE)
    }

    assert set(cuda_linear.SHARED_BYTES) <= there


def test_shared_memory_of_hopper_is_too_much_elsewhere() -> None:
    """The limits differ: what is Hopper's alone would not fit a block of sm_120."""
    (kernel, _) = compiled("verify_attn_wgmma", "bfloat16", "sm_90a")

    assert within_limits(kernel, "sm_90a")
    assert not within_limits(kernel, "sm_120")


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


def test_an_array_in_local_memory_is_seen() -> None:
    """Nothing is spilled, and yet it is no register: a projection took a third longer with one."""
    source = """
    extern "C" __global__ void f(float* x, int n) {
        float a[32];
        for (int i = 0; i < 32; ++i) a[i] = x[i] * x[i + 32];
        for (int i = 0; i < n; ++i) a[i * i % 32] += a[i * 7 % 32];
        x[threadIdx.x] = a[n % 32];
    }
    """
    (found,) = compiled_source(source, "array.cu", "float32", "sm_90")

    assert 0 == found.spill_bytes
    assert found.frame_bytes > MAX_FRAME_BYTES
    assert not within_limits(found, "sm_90")


def test_extern_names_are_unique() -> None:
    """`Modules.kernel` finds a kernel by file, the table by name alone."""
    for dtype in CUDA_DTYPES:
        names = Counter(
            kernel.kernel
            for file in files(dtype)
            for kernel in compiled(file, dtype, ARCHITECTURES[0])
        )
        assert [] == [name for name, count in names.items() if count > 1]
