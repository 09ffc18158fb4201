"""Standard output and error as they were when the command began: the verdict goes there.

An engine that runs in this process may close them, or put others in their places.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_NAMES = ("stdout", "stderr")
_kept: dict[str, tuple[Any, int | None]] = {}  # the stream, and a descriptor of the same file


@contextmanager
def kept() -> Iterator[None]:
    """Keep both streams while this lasts, for `reopen` and `put_back`."""
    if _kept:
        yield
        return
    for name in _NAMES:
        stream = getattr(sys, name)
        _kept[name] = (stream, _copy(stream))
    try:
        yield
    finally:
        for _, copy in _kept.values():
            if copy is not None:
                os.close(copy)
        _kept.clear()


def reopen() -> list[str]:
    """Streams that are closed are opened again; returns the names of these."""
    closed = [name for name in _kept if getattr(getattr(sys, name), "closed", False)]
    for name in closed:
        _open(name)
    return [f"sys.{name}" for name in closed]


def put_back() -> None:
    """The streams of the beginning, whatever is in their places now."""
    for name, (stream, _) in _kept.items():
        if stream is not None and stream.closed:
            _open(name)
        else:
            setattr(sys, name, stream)


def _open(name: str) -> None:
    stream, copy = _kept[name]
    if not stream.closed:
        setattr(sys, name, stream)
    elif copy is not None:
        again = open(  # noqa: SIM115  as long as the process
            os.dup(copy), "w", encoding=stream.encoding, errors="backslashreplace"
        )
        _kept[name] = (again, copy)
        setattr(sys, name, again)


def _copy(stream: Any) -> int | None:
    with suppress(OSError, ValueError, AttributeError):  # closed before, or no file at all
        return os.dup(stream.fileno())
    return None
