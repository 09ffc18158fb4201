"""The host engine, which ends or blocks the process that it runs in, in the verb `verb`."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from hostile_engines import Hostile


def _hang_in_c() -> None:
    """No thread of Python runs meanwhile, and no signal handler."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # it would end the sleep
    ctypes.PyDLL(None).sleep(600)


ENDS: dict[str, Callable[[], Any]] = {
    "_exit": lambda: os._exit(0),
    "exit in C": lambda: ctypes.CDLL(None).exit(0),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(600),
    "hangs in C": _hang_in_c,
    "no stdout": lambda: sys.stdout.close(),
    "no streams": lambda: (sys.stdout.close(), sys.stderr.close()),
    "descriptor 1 gone": lambda: os.close(1),
    "another stdout": lambda: setattr(sys, "stdout", open(os.devnull, "w")),  # noqa: SIM115
    "wrapped stdout": lambda: setattr(
        sys, "stdout", io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8")
    ),
    "detached stdout": lambda: sys.stdout.detach(),
    "detached stderr": lambda: sys.stderr.detach(),
    "silenced": lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 1),
    "borrowed": lambda: os.fdopen(1, "w").close(),
    "breaks": lambda: breakpoint(),
    "reads": lambda: print(f"read {input()}", file=sys.stderr),
    "goes elsewhere": lambda: os.chdir("/"),
    "hangs at exit": lambda: threading.Thread(target=time.sleep, args=(600,)).start(),
    "exits with 0 at exit": lambda: atexit.register(os._exit, 0),
    "segfault at exit": lambda: atexit.register(os.kill, os.getpid(), signal.SIGSEGV),
}


def make_engine(end: str, verb: str = "verify") -> Any:
    """end: one of ENDS. What happens goes to stderr first, for a test that waits for it."""

    def answer(original: Any, *args: Any, **kwargs: Any) -> Any:
        print("now", file=sys.stderr, flush=True)
        ENDS[end]()
        return original(*args, **kwargs)

    return Hostile({verb: answer})
