"""Tests that need a CUDA device (`make gate-gpu`); elsewhere each is skipped, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_pair import DTYPES, Pair

from kdtr.contract import ModelConfig, UnsupportedError
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_modules import import_cupy
from kdtr.engine.model import TreeModel


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


@pytest.fixture(scope="session")
def cuda_load(
    small: ModelConfig, weights_of: Callable[[ModelConfig], dict[str, np.ndarray]]
) -> Callable[..., TreeModel]:
    """cuda_load(config=SMALL, **engine options): the model of the engine's tests on the device."""

    def load(config: ModelConfig = small, **options: Any) -> TreeModel:
        return make_cuda_engine(**options).load((config, weights_of(config)))

    return load


@pytest.fixture(params=DTYPES)
def pair(cuda_sets: dict[str, Any], request: pytest.FixtureRequest) -> Pair:
    return Pair(cuda_sets[request.param], request.param)
