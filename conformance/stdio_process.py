"""An engine's process: requests go in, replies come out, and nothing of it is left behind.

What breaks the exchange (a crash, no reply in time, noise) ends the process and all that it has
started; the ExchangeError says what happened and ends with the last lines of its stderr.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from kdtr.conformance.process_end import how_it_ended
from kdtr.conformance.stdio_protocol import (
    ExchangeError,
    Reply,
    encode,
    read_envelope,
    read_reply,
)
from kdtr.contract import EngineError

MAX_REPLY = 16 * 1024 * 1024  # bytes of a line: ids only, the tensors are in files
_CHUNK = 65536
_GRACE_S = 2.0  # between the end of stdin and the kill
_LOOK_S = 0.2  # between two looks at whether the process is there
_TAIL = 8192  # bytes of stderr that are kept
_LINES, _WIDTH = 10, 200  # of stderr that are told


class _Stderr:
    """Reads all of it, so that a chatty engine never blocks, and keeps the end."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._tail = b""
        self._stream = stream
        self._thread = threading.Thread(target=self._read, name="engine stderr", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with suppress(OSError):
            while chunk := os.read(self._stream.fileno(), _CHUNK):
                self._tail = (self._tail + chunk)[-_TAIL:]

    def close(self) -> None:
        """After the process: what it wrote last is read. A daemon of its own may keep it open."""
        self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._stream.close()

    def told(self) -> str:
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        if not lines:
            return "; it wrote nothing to stderr"
        shown = ["".join(c if c.isprintable() else " " for c in line) for line in lines[-_LINES:]]
        return "; its stderr ends with: " + " | ".join(line[:_WIDTH].strip() for line in shown)


class EngineProcess:
    """One run of the command. `ended` says how it ended, and is None while it lives."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self.ended: str | None = None
        self._timeout_s = timeout_s
        self._count = 0
        self._buffer = bytearray()
        try:
            self._child = subprocess.Popen(
                command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its own group: ended as a whole, and Ctrl-C is ours
            )
        except (OSError, ValueError) as error:  # ValueError: a NUL in the command
            why = getattr(error, "strerror", None) or error  # without the name once more
            raise EngineError(f"{command[0]} cannot be started: {why}") from error
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        self._stdin, self._stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._stderr = _Stderr(self._child.stderr)
        self._end = weakref.finalize(self, _end, self._child, self._stderr, graceful=True)

    def ask(self, verb: str, fields: Mapping[str, Any]) -> Reply:
        """Send a request and wait for its reply, for `timeout_s` in all."""
        if self.ended is not None:
            raise ExchangeError(f"{verb}(): the engine's process is gone, {self.ended}")
        self._count += 1
        line = encode({"id": self._count, "verb": verb, **fields})
        try:
            deadline = time.monotonic() + self._timeout_s
            self._check_silence()
            self._send(line, deadline)
            envelope = read_envelope(self._receive(deadline), self._count)
        except EngineError as error:
            self._kill(f"since {verb}() failed")
            raise ExchangeError(f"{verb}(): {error}{self._stderr.told()}") from None
        except BaseException:  # Ctrl-C: the reply may still come, and would answer the next request
            self._kill(f"since {verb}() was interrupted")
            raise
        try:
            return read_reply(verb, envelope)
        except EngineError as error:  # the line was whole: the process may go on
            raise ExchangeError(f"{verb}(): {error}") from None

    def close(self) -> None:
        """Let it end, by the end of its stdin; what is still there after 2 s is killed."""
        self.ended = self.ended or "since it was closed"
        self._end()

    def _kill(self, why: str) -> None:
        self.ended = why
        if self._end.detach() is not None:
            _end(self._child, self._stderr, graceful=False)

    def _check_silence(self) -> None:
        """Nothing may be there before the request: it would be taken for the reply."""
        with suppress(BlockingIOError):
            self._buffer += os.read(self._stdout, _CHUNK)
        if self._buffer:
            raise EngineError(
                f"the engine wrote to stdout without being asked: {_shown(self._buffer)}; expected "
                "one line for each request, and logs on stderr"
            )

    def _send(self, line: bytes, deadline: float) -> None:
        rest = memoryview(line)
        while rest:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._stdin, rest[:_CHUNK]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise EngineError(f"{self._how_it_ended()} before it read the request") from None

    def _receive(self, deadline: float) -> bytes:
        """One line, without its end."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > MAX_REPLY:
                break
            self._wait(self._stdout, select.POLLIN, deadline)
            try:
                chunk = os.read(self._stdout, _CHUNK)
            except BlockingIOError:
                continue
            if not chunk:
                raise EngineError(self._cut_short())
            self._buffer += chunk
        if max(end, len(self._buffer) if end < 0 else 0) > MAX_REPLY:
            raise EngineError(
                f"the reply is longer than {MAX_REPLY} bytes, it begins {_shown(self._buffer)}; "
                "expected ids only, and tensors in the file that the request names"
            )
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _wait(self, stream: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(stream, event)
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(min(left, _LOOK_S) * 1000):
                return
            if self._child.poll() is not None and not poll.poll(0):
                raise EngineError(self._cut_short())  # a child of its own holds the pipes open
        got = f", only {len(self._buffer)} bytes without a newline" if self._buffer else ""
        raise EngineError(
            f"no reply within timeout_s = {self._timeout_s:g} s{got}; the engine was stopped"
        )

    def _cut_short(self) -> str:
        how = self._how_it_ended()
        if not self._buffer:
            return f"{how} before it replied"
        n = len(self._buffer)
        return f"{how} within a reply, after {n} bytes without a newline: {_shown(self._buffer)}"

    def _how_it_ended(self) -> str:
        """After one of its streams did."""
        try:
            code = self._child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "the engine closed its stdin or stdout"
        return f"the engine {how_it_ended(code)}"


def _end(child: subprocess.Popen[bytes], stderr: _Stderr, *, graceful: bool) -> None:
    """End the process and its group; both pipes are closed and it is waited for."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.close()
    if graceful:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    with suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies is not ours
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    stderr.close()


def _shown(line: bytes | bytearray) -> str:
    text = bytes(line[:100]).decode(errors="replace")
    return repr(text) + ("..." if len(line) > len(text) else "")
