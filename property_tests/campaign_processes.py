"""A campaign over processes of this machine.

Every worker is an executor with one process, so that it is known which unit a process died of. A
pool of many would end with the first process that does, and leave open whose fault it was.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

from kdtr.conformance.parent_process import end_with_parent
from kdtr.contract import EngineError, EngineInfo
from kdtr.property_tests.campaign_crew import TRIES, Lost
from kdtr.property_tests.campaign_plan import Setup, Unit
from kdtr.property_tests.campaign_unit import Outcome
from kdtr.property_tests.campaign_worker import THREADS, Worker

_GRACE_S = 5.0  # for an idle worker to close its engine

_worker: Worker | None = None


def _start(setup: Setup) -> EngineInfo:
    """The first task of a process: loads the engine."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign's own process ends its workers
    end_with_parent()
    _worker = Worker(setup)
    return _worker.describe()


def _run(unit: Unit) -> Outcome:
    assert _worker is not None
    return _worker.run(unit)


def _leave() -> None:
    """The last task of a process: an engine may have a process and files of its own."""
    if _worker is not None:
        _worker.close()


class _Lane:
    """One process at a time, and what it does."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self.unit: Unit | None = None
        self.info: EngineInfo | None = None  # None until the engine is loaded
        self.failed_starts = 0
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(max_workers=1, mp_context=context)
        before = set(multiprocessing.active_children())
        self.info, self.unit = None, None
        self._since, self.killed = time.monotonic(), False
        self.future: Future[Any] = self._executor.submit(_start, self._setup)
        started = set(multiprocessing.active_children()) - before
        self.process = started.pop() if started else None

    def give(self, unit: Unit) -> bool:
        """Whether the process took the unit: it may have died while it was idle."""
        try:
            self.future = self._executor.submit(_run, unit)
        except BrokenProcessPool:
            self._executor.shutdown(wait=True)
            self.start()
            return False
        self.unit, self._since = unit, time.monotonic()
        return True

    @property
    def idle(self) -> bool:
        return self.info is not None and self.unit is None

    def left_s(self, limit_s: float | None) -> float | None:
        """Until the unit has taken too long."""
        if limit_s is None or self.unit is None or self.killed:
            return None
        return self._since + limit_s - time.monotonic()

    def kill(self) -> None:
        if self.process is not None and not self.killed:
            groups = _groups_below(self.process.pid)
            self.process.kill()
            for group in groups:
                with suppress(OSError):
                    os.killpg(group, signal.SIGKILL)
        self.killed = True

    def lost(self) -> Lost:
        """How the process ended, once its future is broken."""
        self._executor.shutdown(wait=True)
        code = None if self.process is None else self.process.exitcode
        return Lost(_ending(code), self.killed)

    def close(self) -> None:
        if self.idle and not self.killed:
            with suppress(Exception):  # it is ended in any case
                self._executor.submit(_leave).result(_GRACE_S)
        self.kill()
        self._executor.shutdown(wait=True, cancel_futures=True)


def _groups_below(pid: int | None) -> list[int]:
    """The process groups of a process's children that lead one: engines behind stdio.

    Of Linux alone; elsewhere they end when their standard input does.
    """
    groups = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            children = [int(word) for word in path.read_text().split()]
            groups += [child for child in children if os.getpgid(child) == child]
    return groups


def _ending(code: int | None) -> str:
    """How a process ended: its exit code as `multiprocessing` tells it, in words."""
    if code is None:
        return "an unknown cause"
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"signal {-code} ({signal.Signals(-code).name})"
    return f"signal {-code}"


class Processes:
    """A crew of worker processes (`campaign_crew.Crew`).

    limit_s  seconds that a unit may take once its process has loaded the engine; None: any
    """

    def __init__(self, setup: Setup, workers: int, limit_s: float | None = None) -> None:
        for name, value in THREADS.items():
            os.environ.setdefault(name, value)
        self._setup = setup
        self._limit_s = limit_s
        self._workers = workers
        self._lanes = [_Lane(setup)]

    @property
    def pids(self) -> list[int]:
        """Of the worker processes, as they are now."""
        found = [lane.process.pid for lane in self._lanes if lane.process is not None]
        return [pid for pid in found if pid is not None]

    def describe(self) -> EngineInfo:
        lane = self._lanes[0]
        while lane.info is None:
            wait([lane.future])
            self._settled(lane)
        return lane.info

    def outcomes(self, units: Iterable[Unit]) -> Iterator[Outcome]:
        waiting = deque(units)
        losses: Counter[Unit] = Counter()
        while len(self._lanes) < min(self._workers, len(waiting)):
            self._lanes.append(_Lane(self._setup))
        while waiting or any(lane.unit for lane in self._lanes):
            for lane in self._lanes:
                if waiting and lane.idle and lane.give(waiting[0]):
                    waiting.popleft()
            busy = [lane for lane in self._lanes if not lane.idle]
            self._wait(busy)
            for lane in busy:
                if not lane.future.done():
                    continue
                unit = lane.unit
                ended = self._settled(lane)
                if isinstance(ended, Outcome):
                    yield ended
                elif unit is not None and ended is not None:
                    losses[unit] += 1
                    if losses[unit] < TRIES:
                        waiting.append(unit)
                    else:
                        yield ended.outcome(unit, self._setup, self._limit_s)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _wait(self, busy: list[_Lane]) -> None:
        """Until a lane is done; kills those whose time is up."""
        left = [s for lane in busy if (s := lane.left_s(self._limit_s)) is not None]
        wait([lane.future for lane in busy], max(0.0, min(left)) if left else None, FIRST_COMPLETED)
        for lane in busy:
            left_s = lane.left_s(self._limit_s)
            if left_s is not None and left_s <= 0 and not lane.future.done():
                lane.kill()

    def _settled(self, lane: _Lane) -> Outcome | Lost | None:
        """What a lane's done future gave: an outcome, a lost worker, or None for a new engine."""
        unit, lane.unit = lane.unit, None
        try:
            result = lane.future.result()
        except BrokenProcessPool:
            lost = lane.lost()
            lane.failed_starts += unit is None
            if lane.failed_starts == TRIES:
                raise EngineError(
                    f"engine {self._setup.engine}: the process that loads it ended by {lost.how}, "
                    f"{TRIES} times; expected an engine"
                ) from None
            lane.start()
            return None if unit is None else lost
        if isinstance(result, EngineInfo):
            lane.info, lane.failed_starts = result, 0
            return None
        if lane.killed:  # it was done the moment before
            lane.lost()
            lane.start()
        return result
