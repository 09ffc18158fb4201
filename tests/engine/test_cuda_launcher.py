"""What a launcher keeps: shapes that have run, graphs, inboxes. The device is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuda_stand_in import StandIn

from kdtr.contract import SILENT, ModelConfig
from kdtr.engine.cuda_kernels import CudaKernels
from kdtr.engine.cuda_launcher import _MOST_GRAPHS, row_bucket, slot_bucket


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def cache(page_size: int = 64) -> Any:
    return SimpleNamespace(page_size=page_size, rows=np.zeros((1, 1, 1)))


def ran(cupy: StandIn, launcher: Any, committed_len: int, n: int = 1, **limits: Any) -> str:
    """How a round of n rows at this length ran."""
    cupy.events.clear()
    rows = launcher.stage(committed_len, [0] * n, [-1] + [0] * (n - 1), **limits)
    launcher.run("round", rows, lambda _: None, SILENT)
    captured, replayed = ("begin capture" in cupy.events), ("replay" in cupy.events)
    assert replayed or not captured
    return "captured" if captured else "replayed" if replayed else "launched"


def test_buckets() -> None:
    assert [1, 5, 5, 9, 17, 129, 257, 257] == [
        row_bucket(n) for n in (1, 2, 5, 6, 17, 66, 130, 257)
    ]
    assert [256, 256, 512, 512, 1024] == [slot_bucket(n) for n in (1, 256, 257, 512, 513)]


def test_a_shape_is_launched_once_then_captured_then_replayed(
    cupy: StandIn, small: ModelConfig
) -> None:
    launcher = CudaKernels("float32", graphs=True, guarded=False).launcher(cache(), small)

    assert ["launched", "captured", "replayed", "replayed"] == [
        ran(cupy, launcher, 40) for _ in range(4)
    ]


def test_another_session_of_the_model_captures_at_once(cupy: StandIn, small: ModelConfig) -> None:
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    ran(cupy, kernels.launcher(cache(), small), 40)

    assert "captured" == ran(cupy, kernels.launcher(cache(), small), 40)


def test_another_model_or_page_size_has_run_nothing_yet(cupy: StandIn, small: ModelConfig) -> None:
    """Other kernels than those that were loaded may be launched for them."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    ran(cupy, kernels.launcher(cache(), small), 40)

    wide = small.replace(kv_lora_rank=512)
    assert "launched" == ran(cupy, kernels.launcher(cache(), wide), 40)
    assert "launched" == ran(cupy, kernels.launcher(cache(page_size=3), small), 40)


def test_graphs_of_outgrown_slot_buckets_are_forgotten(cupy: StandIn, small: ModelConfig) -> None:
    launcher = CudaKernels("float32", graphs=True, guarded=False).launcher(cache(), small)
    for n in (1, 5):
        for _ in range(2):
            ran(cupy, launcher, 200, n)
    for _ in range(2):
        ran(cupy, launcher, 254, 5)  # of the next bucket already
    assert 3 == len(launcher._graphs)

    assert "replayed" == ran(cupy, launcher, 255)
    assert 3 == len(launcher._graphs), "255 committed tokens and a root fit 256 slots"
    ran(cupy, launcher, 256, 5)
    assert [512] == [key.max_slots for key in launcher._graphs]
    assert "captured" == ran(cupy, launcher, 0, 1), "after a reset"


def test_a_session_holds_so_many_graphs_and_drops_the_one_used_longest_ago(
    cupy: StandIn, small: ModelConfig
) -> None:
    launcher = CudaKernels("float32", graphs=True, guarded=False).launcher(cache(), small)
    sizes = [1, 5, 9, 17, 33, *range(129, 129 + 128 * 30, 128)]
    for n in sizes:
        for _ in range(2):
            ran(cupy, launcher, 0, n)
        ran(cupy, launcher, 0, 1)  # used all the time

    assert _MOST_GRAPHS == len(launcher._graphs)
    assert {1, *sizes[-(_MOST_GRAPHS - 1) :]} == {key.n for key in launcher._graphs}


def test_prompts_are_never_captured_and_leave_nothing(cupy: StandIn, small: ModelConfig) -> None:
    """Else every length of a prompt would be remembered."""
    launcher = CudaKernels("float32", graphs=True, guarded=False).launcher(cache(), small)
    cupy.events.clear()
    for n in (3, 3, 3, 4):
        launcher.run("prefill", launcher.stage(0, [0] * n), lambda _: None, SILENT)

    assert "begin capture" not in cupy.events
    assert not launcher._warm
    assert not launcher._inboxes


def test_graphs_off(cupy: StandIn, small: ModelConfig) -> None:
    launcher = CudaKernels("float32", graphs=False, guarded=False).launcher(cache(), small)

    assert ["launched"] * 3 == [ran(cupy, launcher, 40) for _ in range(3)]


def test_a_closed_launcher_keeps_nothing(cupy: StandIn, small: ModelConfig) -> None:
    launcher = CudaKernels("float32", graphs=True, guarded=False).launcher(cache(), small)
    for _ in range(2):
        ran(cupy, launcher, 40)

    launcher.close()

    assert not launcher._graphs
    assert not launcher._inboxes
