"""Work over processes that share nothing: one thread each, as the cores are shared by the work."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, TypeVar

from kdtr.conformance.parent_process import end_with_parent

T = TypeVar("T")
K = TypeVar("K")


@contextmanager
def processes(
    workers: int, begin: Callable[..., None], *args: Any
) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes, each of which has called begin(*args); they end with this one."""
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when a worker loads NumPy
    try:
        with ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),
            initializer=_begun,
            initargs=(begin, *args),
        ) as pool:
            try:
                yield pool
            except BaseException:  # an interrupt too: what has not begun need not begin
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        if threads is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = threads


def _begun(begin: Callable[..., None], *args: Any) -> None:
    end_with_parent()
    begin(*args)


def in_any_order(
    pool: ProcessPoolExecutor, work: Callable[..., T], tasks: Iterable[tuple[K, tuple[Any, ...]]]
) -> Iterator[tuple[K, T]]:
    """(key, work(*args)) of every (key, args), as they end."""
    waiting = {pool.submit(work, *args): key for key, args in tasks}
    for done in as_completed(waiting):
        yield waiting[done], done.result()
