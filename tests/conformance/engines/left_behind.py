"""What a process engine leaves behind: its processes and its files."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kdtr.conformance import stdio_process, stdio_tensors


def in_folder(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """All temporary files of a test go here."""
    monkeypatch.setattr(stdio_tensors, "_MEMORY", folder)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are started from here on."""
    pids: list[int] = []
    original = subprocess.Popen

    def started(*args: Any, **kwargs: Any) -> Any:
        child = original(*args, **kwargs)
        if kwargs.get("start_new_session"):
            pids.append(child.pid)
        return child

    monkeypatch.setattr(stdio_process.subprocess, "Popen", started)
    return pids


def group_lives(pid: int) -> bool:
    """Whether a process of the group runs; a zombie that init has not waited for does not.

    One that was killed may be seen for a moment more: it has a second to go.
    """
    deadline = time.monotonic() + 1
    while lives := _listed(pid):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return lives


def _listed(pid: int) -> bool:
    listed = subprocess.run(
        ["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return any(group == str(pid) and not state.startswith("Z") for group, state in rows)
