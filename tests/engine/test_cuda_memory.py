"""Where device memory runs out: what the CUDA engine says then, and that it goes on afterwards.

The device is a stand-in with a thousand bytes; tests/engine/gpu has the real one's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_stand_in import CUDADriverError, CUDARuntimeError, StandIn, driver_that_answers

from kdtr.contract import SILENT, CacheError, EngineError, ModelConfig
from kdtr.engine import cuda_launch, make_cuda_engine
from kdtr.engine.cuda_kernels import CudaKernels
from kdtr.engine.cuda_launch import LaunchError
from kdtr.engine.cuda_modules import Modules
from kdtr.engine.kernel_set import Rows

CLOSE = "close sessions and models that are not needed"
FREE = "100 of the 1000 bytes of Stand-in are free"
Told = Callable[[Callable[[], Any]], str]


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def told(cupy: StandIn) -> Told:
    """What is said where 100 bytes are left."""

    def told(call: Callable[[], Any]) -> str:
        cupy.left = 100
        with pytest.raises(MemoryError) as refusal:
            call()
        cupy.left = None
        return str(refusal.value)

    return told


def launcher_of(config: ModelConfig, *, captures: bool = False) -> tuple[Any, Rows]:
    """A launcher, and three rows of a tree; with `captures` their program has run once."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    cache = SimpleNamespace(page_size=64, rows=np.zeros((1, 1, 1)))
    launcher = kernels.launcher(cache, config)  # type: ignore[arg-type]
    rows = launcher.stage(40, [1, 2, 3], [-1, 0, 0])
    if captures:
        launcher.run("round", rows, lambda trace: None, SILENT)
    return launcher, rows


def test_weights(
    cupy: StandIn, told: Told, small: ModelConfig, small_weights: dict[str, np.ndarray]
) -> None:
    engine = make_cuda_engine()

    assert (
        "weights of shape [37, 20]: 2960 bytes asked for, "
        f"{FREE}; load a smaller model, store it as bfloat16, or {CLOSE}"
    ) == told(lambda: engine.load((small, small_weights)))


def test_a_cache(cupy: StandIn, small: ModelConfig, small_weights: dict[str, np.ndarray]) -> None:
    model = make_cuda_engine().load((small, small_weights))
    cupy.left = 100
    with pytest.raises(CacheError) as refusal:
        model.open(max_len=70)

    assert (
        "max_len = 70 needs 13440 bytes of cache, more than there are (cache rows of shape "
        f"[3, 128, 16]: 24576 bytes asked for, {FREE}; {CLOSE}); open it with a smaller max_len"
    ) == str(refusal.value)


def test_an_upload(cupy: StandIn, told: Told) -> None:
    kernels = CudaKernels("float32", graphs=True, guarded=False)

    assert f"upload: 104 bytes asked for, {FREE}; {CLOSE}" == told(
        lambda: kernels.upload(np.zeros(13))
    )


@pytest.mark.parametrize(
    ("program", "lower"),
    [
        ("prefill", "prefill the prompt in shorter chunks"),
        ("forward_tokens", "give fewer rows at a time"),
        ("verify", "verify a smaller tree"),
        ("round", "verify a smaller tree"),
    ],
)
def test_a_program_that_is_launched(
    cupy: StandIn, told: Told, small: ModelConfig, program: str, lower: str
) -> None:
    launcher, rows = launcher_of(small)

    assert (
        f"{program} of 5 rows over up to 256 slots: 800 bytes asked for, {FREE}; {lower}, "
        f"or {CLOSE}"
    ) == told(lambda: launcher.run(program, rows, lambda _: cupy.empty((100,), np.float64), SILENT))


def test_a_launch_that_the_driver_refuses(
    cupy: StandIn, told: Told, small: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_launch, "_driver", lambda: driver_that_answers(2))
    launcher, rows = launcher_of(small)
    kernels = launcher._kernels

    def program(_: Any) -> None:
        kernels._launch("rows", "embed", (5, 1, 1), 256, 7, shared=16)

    assert (
        "verify of 5 rows over up to 256 slots: the driver found no memory (launch of embed with "
        "grid (5, 1, 1), block 256, 16 bytes of shared memory failed: CUDA driver error 2, "
        f"CUDA_ERROR_OUT_OF_MEMORY), {FREE}; verify a smaller tree, or {CLOSE}"
    ) == told(lambda: launcher.run("verify", rows, program, SILENT))


def test_a_graph_that_is_captured(cupy: StandIn, told: Told, small: ModelConfig) -> None:
    """Twice: the first time the common pool may hold what is missing."""
    launcher, rows = launcher_of(small, captures=True)
    cupy.events.clear()

    assert (
        f"graph of a round of 5 rows over up to 256 slots: 800 bytes asked for, {FREE}; {CLOSE}, "
        "verify smaller trees, or make the engine with graphs=False"
    ) == told(lambda: launcher.run("round", rows, lambda _: cupy.empty((100,), np.float64), SILENT))
    assert 2 == cupy.events.count("begin capture") == cupy.events.count("end capture")
    assert 1 == cupy.events.count("free_all_blocks")
    assert 0 == cupy.events.count("replay")

    launcher.run("round", rows, lambda _: cupy.empty((100,), np.float64), SILENT)
    assert 1 == cupy.events.count("replay"), "and captured when there is room again"


def test_a_graph_finds_what_the_common_pool_held(cupy: StandIn, small: ModelConfig) -> None:
    launcher, rows = launcher_of(small, captures=True)
    cupy.on_end = [CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)]

    launcher.run("round", rows, lambda _: None, SILENT)

    assert ["free_all_blocks"] == [event for event in cupy.events if event == "free_all_blocks"]
    assert "replay" == [event for event in cupy.events if " " not in event][-1]


def test_a_graph_that_is_instantiated(cupy: StandIn, told: Told, small: ModelConfig) -> None:
    launcher, rows = launcher_of(small, captures=True)
    cupy.on_end = 2 * [CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)]

    assert (
        "graph of a round of 5 rows over up to 256 slots: the driver found no memory "
        f"(cudaErrorMemoryAllocation: out of memory), {FREE}; {CLOSE}, verify smaller trees, or "
        "make the engine with graphs=False"
    ) == told(lambda: launcher.run("round", rows, lambda _: None, SILENT))


def test_a_graph_that_is_replayed(cupy: StandIn, told: Told, small: ModelConfig) -> None:
    launcher, rows = launcher_of(small, captures=True)
    cupy.on_replay = CUDARuntimeError("cudaErrorMemoryAllocation: out of memory", 2)

    assert told(lambda: launcher.run("round", rows, lambda _: None, SILENT)).startswith(
        "graph of a round of 5 rows over up to 256 slots: the driver found no memory "
        f"(cudaErrorMemoryAllocation: out of memory), {FREE}; {CLOSE}"
    )


def test_a_module() -> None:
    cupy = StandIn(on_load=CUDADriverError("CUDA_ERROR_OUT_OF_MEMORY: out of memory", 2))
    cupy.left = 100
    with pytest.raises(MemoryError) as refusal:
        Modules(cupy, "float32")

    assert (
        "kernels/rows.cu: the driver found no memory "
        f"(CUDA_ERROR_OUT_OF_MEMORY: out of memory), {FREE}; {CLOSE}"
    ) == str(refusal.value)


def test_a_pool_with_a_limit(cupy: StandIn, told: Told) -> None:
    """Free memory alone would not explain the refusal."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    cupy.limit = 90

    assert (
        f"upload: 104 bytes asked for, CuPy's pool may hold 90 bytes and {FREE}; {CLOSE}"
    ) == told(lambda: kernels.upload(np.zeros(13)))


@pytest.mark.parametrize(
    "error",
    [
        CUDARuntimeError("cudaErrorIllegalAddress", 700),
        CUDADriverError("CUDA_ERROR_LAUNCH_FAILED", 719),
        LaunchError("launch of x failed", 1),
        EngineError("a kernel wrote outside of its buffer"),
    ],
)
def test_other_errors_stay_as_they_are(cupy: StandIn, small: ModelConfig, error: Exception) -> None:
    for captures in (False, True):
        launcher, rows = launcher_of(small, captures=captures)

        def program(_: Any) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            launcher.run("round", rows, program, SILENT)
        assert error is raised.value
