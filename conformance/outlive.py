"""A parent that outlives the engine: the exit code is of whoever knows whether there is a verdict.

An engine in Python runs in the judge's own process, and may end it: by os._exit(0), by exit(0) in
C, by a fault. The judge would be gone without a verdict, and with an exit code that reads as one.
So the process forks before anything heavy is loaded. The child works, with the terminal, the
debugger and all else that it would have had; the parent waits and says how it ended.
"""

from __future__ import annotations

import mmap
import os
import shlex
import signal
import sys
from contextlib import suppress
from types import FrameType

from kdtr.conformance import running
from kdtr.conformance.parent_process import end_with_forker
from kdtr.conformance.plain_text import printable
from kdtr.conformance.process_end import how_it_ended

NO_VERDICT = 2
_PATIENCE_S = 2.0  # between Ctrl-C and a word that nothing came of it
_TOLD = "what it had to tell is told"
_TERMINAL = "\r\x1b[2K\x1b[?25h"  # clear the line, show the cursor: a progress line was cut short


def outlived() -> int | None:
    """None in the child, which goes on; in the parent, when the child has ended, the exit code.

    The child tells its own by `running.settle`: it ended as it should where it exits with that.
    A debugger or tracer of Python that is at work sees one process: None, and no child. So does a
    system without fork.
    """
    if sys.gettrace() is not None or not hasattr(os, "fork"):
        return None
    memory = memoryview(mmap.mmap(-1, running.SIZE))
    parent = os.getpid()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before
        stream.flush()  # or both would write what is waiting
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it takes the child's end away
    child = os.fork()
    if child == 0:
        end_with_forker(parent)
        running.share(memory)
        return None
    return _Parent(child, memory).wait()


class _Parent:
    def __init__(self, child: int, memory: memoryview) -> None:
        self._child = child
        self._memory = memory
        self._signal: int | None = None  # that was to end all of it

    def wait(self) -> int:
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._tell_that_it_goes_on)
        _, status = os.waitpid(self._child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return self._told(os.waitstatus_to_exitcode(status))

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        from_keyboard = number in (signal.SIGINT, signal.SIGQUIT) and _has_terminal()
        if not from_keyboard:  # else the terminal has told the child too
            with suppress(ProcessLookupError):
                os.kill(self._child, number)
        if number == signal.SIGINT:
            signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
        else:
            self._signal = number

    def _tell_that_it_goes_on(self, *_: object) -> None:
        doing = running.read_shared(self._memory)
        if doing.inside and doing.code is None:
            _say(
                f"{doing.where()} has not returned for {doing.seconds()} s and does not hear of "
                f"the interrupt; to end it: kill -9 {self._child}"
            )

    def _told(self, code: int) -> int:
        """Say what is to be said; returns the exit code, or ends as the child was told to end."""
        doing = running.read_shared(self._memory)
        if self._signal is not None and code < 0:
            name = signal.Signals(self._signal).name
            told = f"ended by {name}{doing.told()}; no verdict"
            _say(told if doing.code is None else f"{_TOLD}, but then it went on until {name}")
            signal.signal(self._signal, signal.SIG_DFL)
            os.kill(os.getpid(), self._signal)
        if code == -signal.SIGINT:  # before it could say so itself
            _say("interrupted")
            return 128 + signal.SIGINT
        if doing.code is None:
            _say(no_verdict(doing, code))
            return NO_VERDICT
        if doing.code != code:
            _say(f"{_TOLD}, but then the process {how_it_ended(code)}")
            return doing.code or NO_VERDICT
        return code


def no_verdict(doing: running.Doing, code: int) -> str:
    """The sentence on a process that ended in the middle of its work."""
    where, how = doing.where(), how_it_ended(code)
    if not doing.inside:
        return f"no verdict: {where}{': ' * bool(where)}the process {how} before it was done"
    text = f"no verdict: {where}: the engine {how} before it returned"
    if code == -signal.SIGKILL:
        text += ", as the kernel does it when memory runs out"
    if not doing.engine or shlex.split(doing.engine)[0].startswith("stdio:"):
        return text
    served = shlex.quote(f"stdio:kdtr serve-engine --engine {doing.engine}")
    return (
        f"{text}; in a process of its own that is a finding, and the other cases are judged: "
        f"--engine {served}"
    )


def _has_terminal() -> bool:
    """Whether this process is in the foreground of a terminal, and its child with it."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _say(text: str) -> None:
    if sys.stderr is None:
        return
    start = _TERMINAL if sys.stderr.isatty() else ""
    with suppress(OSError):
        print(f"{start}kdtr: {printable(text)}", file=sys.stderr, flush=True)
