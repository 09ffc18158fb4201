"""Standard output and error as they were when the command began: the verdict goes there.

An engine that runs in this process may close them, detach them, put others in their places, or
other files behind their descriptors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

_NAMES = ("stdout", "stderr")


class _Kept(NamedTuple):
    """The stream; its descriptor, and another of the same file: None where it is no file."""

    stream: Any
    number: int | None
    copy: int | None


_kept: dict[str, _Kept] = {}
_replaced: list[Any] = []  # a wrapper that nobody holds closes what it wraps


@contextmanager
def kept() -> Iterator[None]:
    """Keep both streams while this lasts, for `reopen` and `put_back`."""
    if _kept:
        yield
        return
    for name in _NAMES:
        _kept[name] = _copied(getattr(sys, name))
    try:
        yield
    finally:
        for one in _kept.values():
            if one.copy is not None:
                with suppress(OSError):  # an engine may have closed it
                    os.close(one.copy)
        _kept.clear()


def reopen() -> list[str]:
    """Streams that are closed are opened again; returns the names of these."""
    closed = [name for name in _kept if _is_closed(getattr(sys, name, None))]
    for name in closed:
        _open(name)
    return [f"sys.{name}" for name in closed]


def put_back() -> None:
    """The streams of the beginning, to the files of the beginning, whatever is in their places."""
    for name, one in _kept.items():
        now = getattr(sys, name, None)
        if now is not one.stream:
            _replaced.append(now)
        if one.number is not None and one.copy is not None and not _same(one.number, one.copy):
            with suppress(OSError):
                os.dup2(one.copy, one.number)
        if _is_closed(one.stream):
            _open(name)
        else:
            setattr(sys, name, one.stream)


def _open(name: str) -> None:
    stream, number, copy = _kept[name]
    if not _is_closed(stream):
        setattr(sys, name, stream)
    elif copy is not None:
        again = open(  # noqa: SIM115  as long as the process
            os.dup(copy), "w", encoding=_encoding(stream), errors="backslashreplace"
        )
        _kept[name] = _Kept(again, number, copy)
        setattr(sys, name, again)


def _is_closed(stream: Any) -> bool:
    """Or detached from its file, so that it cannot be written to any more."""
    try:
        return bool(getattr(stream, "closed", False))
    except ValueError:
        return True


def _encoding(stream: Any) -> str:
    try:
        return stream.encoding or "utf-8"
    except (AttributeError, ValueError):  # the latter: detached
        return "utf-8"


def _same(number: int, copy: int) -> bool:
    """Whether two descriptors are of one file. A closed one is of none."""
    try:
        return os.path.sameopenfile(number, copy)
    except OSError:
        return False


def _copied(stream: Any) -> _Kept:
    with suppress(OSError, ValueError, AttributeError):  # closed before, or no file at all
        number = stream.fileno()
        return _Kept(stream, number, os.dup(number))
    return _Kept(stream, None, None)
