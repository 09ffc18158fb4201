"""What this process is doing: which engine's code it runs, where in the run, and since when.

An engine in the judge's own process may end that process, or never return. Whoever is left to tell
it, the parent of `command.py` or Ctrl-C, reads it here. It is noted for every verb of every
session, in some 3 us: memory is written, and no file.
"""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass

_HEAD = struct.Struct("=idHH")  # exit code, since when, whether inside, bytes of text
_NO_CODE = -1
SIZE = 1024  # bytes that `share` needs
_SEPARATOR = "\0"


@dataclass(frozen=True, slots=True)
class Doing:
    """One moment of a process.

    engine  as it was asked for, with its options, for a shell; "" until one is loaded
    place   in the run: "base.kdtr: y-tree / stepwise / round0"
    call    of the engine's, the last one: "verify()", "import my_engine"; "" before the first
    inside  whether it has not returned
    since   when it was called, or returned (time.monotonic)
    code    with which the process will exit, once that is settled
    """

    engine: str = ""
    place: str = ""
    call: str = ""
    inside: bool = False
    since: float = 0.0
    code: int | None = None

    def seconds(self) -> int:
        return int(time.monotonic() - self.since)

    def where(self) -> str:
        """ "base.kdtr: y-tree / stepwise / round0: verify()", as far as it is known."""
        call = self.call if self.inside or not self.call else f"after {self.call}"
        return ": ".join(filter(None, (self.place, call)))

    def told(self) -> str:
        """The same as an adverb, with how long it has not returned."""
        where = self.where()
        if not where:
            return ""
        return f" at {where}" + (f", {self.seconds()} s after it was called" * self.inside)


class _Now:
    """The moment that is; a Doing is made of it where somebody asks."""

    engine = place = call = ""
    inside = False
    since = 0.0
    code: int | None = None


Call = tuple[str, bool, float]  # what is called, whether it has not returned, since when

_now = _Now()
_pid = os.getpid()
_shared: memoryview | None = None


def doing() -> Doing:
    return Doing(_now.engine, _now.place, _now.call, _now.inside, _now.since, _now.code)


def share(memory: memoryview) -> None:
    """From now on, write every moment of this process there too; not those of its children."""
    global _shared, _pid, _now
    _shared, _pid, _now = memory, os.getpid(), _Now()
    _note()


def read_shared(memory: memoryview) -> Doing:
    """The last moment of the process that shares the memory; what was cut short is left out."""
    code, since, inside, n_bytes = _HEAD.unpack_from(memory)
    text = bytes(memory[_HEAD.size : _HEAD.size + n_bytes]).decode(errors="ignore")
    call, engine, place, *_ = [*text.split(_SEPARATOR), "", "", ""]
    return Doing(engine, place, call, bool(inside), since, None if code == _NO_CODE else code)


def at(place: str) -> None:
    """The run goes on to there."""
    _now.place = place
    _note()


def load(engine: str) -> None:
    """The engine that is asked for; one that an engine loads in turn is a part of it."""
    if not _now.inside:
        _now.engine = engine
        _note()


def enter(call: str) -> Call:
    """The engine's code begins to run; returns what `leave` needs."""
    before = _now.call, _now.inside, _now.since
    _now.call, _now.inside, _now.since = call, True, time.monotonic()
    _note()
    return before


def leave(before: Call) -> None:
    """It has returned; a call around it, of an engine that calls another, goes on."""
    if before[1]:
        _now.call, _now.inside, _now.since = before
    else:
        _now.inside, _now.since = False, time.monotonic()
    _note()


def settle(code: int | None) -> None:
    """The work is done and told, and the process will exit with this code; None: it is not yet."""
    _now.code = code
    _note()


def _note() -> None:
    if _shared is None or os.getpid() != _pid:
        return
    told = _SEPARATOR.join((_now.call, _now.engine, _now.place))
    # A file's name may hold bytes that are no UTF-8, and is then half a surrogate pair.
    text = told.encode(errors="backslashreplace")[: SIZE - _HEAD.size]
    code = _NO_CODE if _now.code is None else _now.code
    _HEAD.pack_into(_shared, 0, code, _now.since, _now.inside, len(text))
    _shared[_HEAD.size : _HEAD.size + len(text)] = text
