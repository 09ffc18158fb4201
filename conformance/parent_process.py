"""A process that does not outlive the one that started it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.process import BaseProcess

_LOOK_S = 0.5  # between two looks at who the parent is
_PR_SET_PDEATHSIG = 1  # prctl(2): the signal that the kernel sends when the parent ends


def end_with_parent() -> None:
    """In a worker, first of all: end it when the process that started it has ended.

    One that was killed, by SIGTERM too, tells its workers nothing: they would wait for tasks for
    ever. What a worker does is given up, without a word.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "the process that was started first has no parent"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def end_with_forker(parent: int) -> None:
    """The same in a process that os.fork() made, of a parent with this id.

    On Linux the kernel does it: a thread would wait for ever for an engine that hangs in C code.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it ended before that
            os._exit(1)
    else:
        threading.Thread(target=_end_without, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
