"""Workers of `kdtr mutants` end with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

PROC = Path("/proc")
WORKERS = 2
LIMIT_S = 60.0  # that something has happened by then; it takes two seconds


def children(pid: int) -> list[int]:
    """Of all its threads, and theirs; gone while it is read: none."""
    found: list[int] = []
    for path in PROC.glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for word in path.read_text().split():
                found += [int(word), *children(int(word))]
    return found


def has_opened(pid: int, file: Path) -> bool:
    with suppress(OSError):
        return str(file) in (PROC / str(pid) / "maps").read_text()
    return False


def is_there(pid: int) -> bool:
    """A process that has ended and was not yet waited for by anybody is not there."""
    with suppress(OSError):
        return (PROC / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    return False


def until(happened: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if happened():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def mutants(small: Path) -> Iterator[subprocess.Popen[bytes]]:
    kdtr = Path(sys.executable).with_name("kdtr")
    command = [kdtr, "mutants", small, "--workers", str(WORKERS)]
    started = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield started
    started.kill()
    started.wait()


@pytest.mark.skipif(not PROC.is_dir(), reason="no /proc, where children are read")
@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_no_worker_is_left_behind(mutants: subprocess.Popen[bytes], small: Path, end: str) -> None:
    """They have begun: each has the bundle open."""
    at_work: list[int] = []

    def have_begun() -> bool:
        at_work[:] = [pid for pid in children(mutants.pid) if has_opened(pid, small)]
        return len(at_work) == WORKERS

    assert until(have_begun), f"{len(at_work)} workers begun, exit code {mutants.poll()}"
    family = children(mutants.pid)

    getattr(mutants, end)()
    mutants.wait()

    ended = until(lambda: not any(map(is_there, family)))
    left = [pid for pid in family if is_there(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (True, []) == (ended, left)
