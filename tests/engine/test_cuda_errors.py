"""What the CUDA engine says where it cannot run: the device and the libraries are stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_stand_in import CompileException, CUDADriverError, CUDARuntimeError, StandIn

from kdtr.contract import (
    DraftTree,
    EngineError,
    InputError,
    ModelConfig,
    TreeError,
    UnsupportedError,
)
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_kernels import CudaKernels
from kdtr.engine.cuda_launcher import row_bucket
from kdtr.engine.cuda_modules import Modules, import_cupy
from kdtr.engine.cuda_shared import MOST_NODES
from kdtr.engine.model import TreeModel


def refused(monkeypatch: pytest.MonkeyPatch, module: Any) -> str:
    monkeypatch.setitem(sys.modules, "cupy", module)
    with pytest.raises(UnsupportedError) as refusal:
        import_cupy()
    return str(refusal.value)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    told = refused(monkeypatch, None)

    assert told.startswith("engine cuda needs CuPy, which cannot be imported (")
    assert told.endswith(
        "; install 'kdtr[cupy-cuda12x]' or 'kdtr[cupy-cuda13x]', whichever your driver serves, or "
        "use engine host"
    )


def test_a_driver_older_than_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CUDARuntimeError("cudaErrorInsufficientDriver: CUDA driver is old")

    assert (
        "engine cuda: CUDA finds no usable device (cudaErrorInsufficientDriver: CUDA driver is old"
        "). The driver serves CUDA 11.8, CuPy was built for CUDA 12.9; install the "
        "CuPy of your driver's major version, or use engine host"
    ) == refused(monkeypatch, StandIn(devices=error, driver=11080))


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    error = CUDARuntimeError("cudaErrorInsufficientDriver: none")

    assert (
        "engine cuda: CUDA finds no driver (cudaErrorInsufficientDriver: none); use engine host"
    ) == refused(monkeypatch, StandIn(devices=error, driver=0))


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "engine cuda: this machine has no CUDA device; use engine host" == refused(
        monkeypatch, StandIn(devices=0)
    )


@pytest.mark.parametrize(
    ("dtype", "capability", "told"),
    [
        ("float32", "75", "compute capability 7.5; the kernels need 9.0 or later"),
        ("bfloat16", "89", "compute capability 8.9; the kernels need 9.0 or later"),
    ],
)
def test_a_device_that_is_too_old(dtype: str, capability: str, told: str) -> None:
    with pytest.raises(UnsupportedError) as refusal:
        Modules(StandIn(capability=capability), dtype)

    assert f"engine cuda, dtype = {dtype!r}: this device has {told}" == str(refusal.value)


@pytest.mark.parametrize("capability", ["90", "100", "120"])
def test_capabilities_of_two_and_three_digits(capability: str) -> None:
    Modules(StandIn(capability=capability), "bfloat16")


@pytest.mark.parametrize(
    ("capability", "dtype", "has"),
    [("90", "bfloat16", True), ("90", "float32", False), ("120", "bfloat16", False)],
)
def test_what_is_for_hopper_alone(capability: str, dtype: str, has: bool) -> None:
    assert has == Modules(StandIn(capability=capability), dtype).has("verify_attn_wgmma")


def test_a_kernel_for_hopper_that_does_not_compile_is_named() -> None:
    with pytest.raises(EngineError) as refusal:
        Modules(StandIn(hopper_log="verify_attn_wgmma.cu(7): error: no"), "bfloat16")

    assert (
        "kernels/verify_attn_wgmma.cu does not compile for sm_90a with dtype = 'bfloat16':\n"
        "verify_attn_wgmma.cu(7): error: no"
    ) == str(refusal.value)


def test_a_kernel_that_does_not_compile_is_named_with_file_and_line() -> None:
    with pytest.raises(EngineError) as refusal:
        Modules(StandIn(on_load=CompileException("rows.cu(12): error: expected a ;")), "float32")

    assert (
        "kernels/rows.cu does not compile for sm_90 with dtype = 'float32':\n"
        "rows.cu(12): error: expected a ;"
    ) == str(refusal.value)


def test_a_kernel_that_the_driver_does_not_load_names_both_versions() -> None:
    """A device that the compiler did not know, or a driver that is older than the compiler."""
    error = CUDADriverError("CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image")
    with pytest.raises(EngineError) as refusal:
        Modules(StandIn(capability="120", on_load=error), "bfloat16")

    assert (
        "kernels/rows.cu compiles for sm_120 with dtype = 'bfloat16', and the driver does not load "
        "it (CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image). The driver serves CUDA 12.8, CuPy was "
        "built for CUDA 12.9; install a driver as new as CuPy, or a CuPy that knows the device"
    ) == str(refusal.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dtype": "float16"}, "dtype = 'float16'; expected 'float32' or 'bfloat16'"),
        ({"graphs": 1}, "graphs = 1; expected True or False"),
        ({"guarded": "yes"}, "guarded = 'yes'; expected True or False"),
        ({"page_size": 0}, "page_size = 0; expected at least 1"),
        ({"split_size": -1}, "split_size = -1; expected at least 1"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineError) as refusal:
        make_cuda_engine(**options)

    assert told == str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "most"),
    [("n_routed_experts", 514, 512), ("num_experts_per_tok", 17, 16), ("kv_lora_rank", 1025, 1024)],
)
def test_a_model_beyond_the_kernels_is_refused_by_field(
    small: ModelConfig, field: str, value: int, most: int
) -> None:
    fitting = {"n_routed_experts": 64, "n_group": 1, "topk_group": 1}
    config = small.replace(**{**fitting, field: value})

    with pytest.raises(UnsupportedError) as refusal:
        CudaKernels.check_model(config)

    assert f"{field} = {value}; the CUDA kernels take at most {most}: use engine host" == str(
        refusal.value
    )


def test_a_tree_beyond_the_kernels_is_refused_before_anything_is_lost() -> None:
    CudaKernels.check_tree(9985)
    with pytest.raises(TreeError) as refusal:
        CudaKernels.check_tree(9986)

    assert (
        "a tree of 9986 nodes; the CUDA kernels lay out at most 9985: split it, or use engine host"
    ) == str(refusal.value)
    assert row_bucket(9985) == MOST_NODES


def test_a_refused_tree_leaves_the_pending_verify(
    load: Callable[..., TreeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load()
    session = model.open(max_len=20)
    session.set_root(7)
    tree = DraftTree((7, 1), (-1, 0))
    verified = session.verify(tree)

    def refuse(n_nodes: int) -> None:
        raise TreeError("too many nodes")

    monkeypatch.setattr(model._forward.kernels, "check_tree", refuse)
    for verb in (session.verify, session.round):
        with pytest.raises(TreeError, match="too many nodes"):
            verb(tree)

    assert session.accept(tree).bonus in verified.targets


@pytest.mark.parametrize(("hidden_size", "most"), [(256, 524_280), (7_168, 299_593)])
def test_more_rows_than_the_kernels_are_launched_for(hidden_size: int, most: int) -> None:
    config = ModelConfig.tiny().replace(hidden_size=hidden_size)
    CudaKernels.check_row_count("prefill", most, config)
    with pytest.raises(InputError) as refusal:
        CudaKernels.check_row_count("prefill", most + 1, config)

    assert (
        f"prefill of {most + 1} rows; the CUDA kernels take at most {most} of this model at once: "
        "prefill in chunks of no more"
    ) == str(refusal.value)


@pytest.mark.parametrize("verb", ["prefill", "forward_tokens", "build"])
def test_what_the_kernels_cannot_be_launched_for_is_refused_before_they_are(
    load: Callable[..., TreeModel], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    model = load()
    session = model.open(max_len=20)
    session.prefill([1, 2, 3])
    root = session.root

    def too_many(verb: str, n_rows: int, config: ModelConfig) -> None:
        raise InputError(f"{verb} of {n_rows}")

    def too_many_nodes(n_nodes: int) -> None:
        raise TreeError(f"build of {n_nodes - 1}")

    monkeypatch.setattr(model._forward.kernels, "check_row_count", too_many)
    monkeypatch.setattr(model._forward.kernels, "check_tree", too_many_nodes)
    calls = {
        "prefill": lambda: session.prefill([1, 2]),
        "forward_tokens": lambda: session.forward_tokens(
            [1, 2], np.array([3, 4]), np.ones((2, 5), bool)
        ),
        "build": lambda: session.build(np.zeros((4, model.config.vocab_size)), 2),
    }
    with pytest.raises((InputError, TreeError), match=f"^{verb} of 2$"):
        calls[verb]()

    assert (3, root) == (session.committed_len, session.root)
