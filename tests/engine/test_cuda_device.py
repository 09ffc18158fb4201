"""Whose turn it is on the device: the engine's own device and stream, one thread at a time."""

from __future__ import annotations

import sys
from threading import Event, Thread, get_ident

import numpy as np
import pytest
from cuda_stand_in import StandIn

from kdtr.contract import SILENT
from kdtr.engine.cuda_device import Turn
from kdtr.engine.cuda_kernels import CudaKernels
from kdtr.engine.cuda_launcher import _Key

NAMED = _Key("round", 1, 256, 0, False)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_an_operation_runs_on_the_engines_device_and_stream(cupy: StandIn) -> None:
    """Whatever is current where it is called from, and that is current again afterwards."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    cupy.events.clear()

    kernels.upload(np.zeros(3))
    assert ["enter stream", "leave stream"] == cupy.events

    cupy.events.clear()
    cupy.current += 1
    kernels.upload(np.zeros(3))
    assert ["enter device", "enter stream", "leave stream", "leave device"] == cupy.events


def test_operations_of_a_program_are_of_its_turn(cupy: StandIn) -> None:
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    cupy.events.clear()

    kernels.launch(lambda _: kernels.upload(np.zeros(3)), SILENT, NAMED)

    assert ["enter stream", "leave stream"] == cupy.events


def test_no_thread_launches_while_another_captures(cupy: StandIn) -> None:
    """What it launched on the stream would be part of the graph."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    begun, order = Event(), []

    def other() -> None:
        begun.wait()
        kernels.upload(np.zeros(3))
        order.append("the other's")

    thread = Thread(target=other)
    thread.start()

    def program() -> None:
        begun.set()
        thread.join(timeout=0.2)  # long enough to get in, if it could
        order.append("captured")

    kernels.capture(program, NAMED)
    thread.join()

    assert ["captured", "the other's"] == order


def test_the_turn_is_given_back_after_an_error(cupy: StandIn) -> None:
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    with pytest.raises(ZeroDivisionError):
        kernels.launch(lambda _: 1 // 0, SILENT, NAMED)

    thread = Thread(target=lambda: kernels.upload(np.zeros(3)))
    thread.start()
    thread.join(timeout=10)

    assert not thread.is_alive()


def test_a_device_that_cannot_be_made_current_leaves_the_turn_free(cupy: StandIn) -> None:
    turn = Turn(cupy)
    cupy.current += 1

    def fail() -> None:
        raise RuntimeError("no such device any more")

    turn.device.__class__ = type("Lost", (), {"__enter__": lambda self: fail()})
    with pytest.raises(RuntimeError, match="no such device"), turn:
        pass

    assert turn._lock.acquire(blocking=False)
    assert 0 == turn._depth


def test_every_engine_counts_for_itself_from_zero_on_its_stream(cupy: StandIn) -> None:
    """An engine that is gone may have left off in the middle of a launch."""
    first = CudaKernels("bfloat16", graphs=True, guarded=False)
    assert ["enter stream", "zeros", "leave stream"] == cupy.events[-3:]

    first._arrived[0] = 1
    second = CudaKernels("bfloat16", graphs=True, guarded=False)
    assert [0] == list(second._arrived)


def test_a_device_is_bound_to_each_thread_once(cupy: StandIn) -> None:
    """A launch needs it; which device is current is known without."""
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    times: list[int] = []
    kernels.turn._bind = lambda: times.append(get_ident())
    here = get_ident()

    def work() -> None:
        for _ in range(3):
            kernels.upload(np.zeros(3))

    work()
    thread = Thread(target=work)
    thread.start()
    thread.join()

    assert here in cupy.bound  # when the engine was made
    assert [thread.ident] == times


def test_a_capture_that_is_interrupted_as_it_begins_ends(cupy: StandIn) -> None:
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    begin = kernels.turn.stream.begin_capture

    def interrupted() -> None:
        begin()
        raise KeyboardInterrupt

    kernels.turn.stream.begin_capture = interrupted
    cupy.events.clear()
    with pytest.raises(KeyboardInterrupt):
        kernels.capture(lambda: None, NAMED)

    assert ["enter stream", "begin capture", "end capture", "leave stream"] == cupy.events
    kernels.turn.stream.begin_capture = begin
    kernels.capture(lambda: None, NAMED)


@pytest.mark.parametrize("reads_pageable", [False, True])
def test_an_upload_is_waited_for_where_the_device_reads_the_hosts_memory(
    monkeypatch: pytest.MonkeyPatch, reads_pageable: bool
) -> None:
    """There nothing copies the source before a call returns, and the caller may reuse it."""
    module = StandIn(reads_pageable=reads_pageable)
    monkeypatch.setitem(sys.modules, "cupy", module)
    kernels = CudaKernels("float32", graphs=True, guarded=False)
    array = kernels.upload(np.zeros(3))
    module.events.clear()

    kernels.upload(np.ones(3))
    kernels.overwrite(array, np.ones(3))

    assert 2 * reads_pageable == module.events.count("wait for stream")
