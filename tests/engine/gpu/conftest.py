"""Tests that need a CUDA device: `make test-gpu`. Elsewhere each is skipped, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from kdtr.contract import UnsupportedError
from kdtr.engine.cuda_modules import import_cupy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    try:
        import_cupy()
    except UnsupportedError as reason:
        for item in items:
            if "tests/engine/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason=str(reason).split(";")[0]))


@pytest.fixture(scope="session")
def cuda_sets() -> dict[str, Any]:
    """A kernel set by storage dtype; compiling takes seconds, so once."""
    from kdtr.engine.cuda_kernels import CudaKernels

    return {
        dtype: CudaKernels(dtype, graphs=True, guarded=False) for dtype in ("float32", "bfloat16")
    }
