"""A worker process that does not outlive the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess


def end_with_parent() -> None:
    """In a worker, first of all: end it when the process that started it has ended.

    One that was killed, by SIGTERM too, tells its workers nothing: they would wait for tasks for
    ever. What a worker does is given up, without a word.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "the process that was started first has no parent"
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
