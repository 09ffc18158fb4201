"""Every mutant before the judge, over processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from kdtr.conformance.mutants.mutant import Mutant
from kdtr.conformance.mutants.trial import Court, Trial
from kdtr.conformance.mutants.zoo import MUTANTS, make_engine

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class KillRow:
    """One mutant's trials: with all stages shown, and with logits alone."""

    mutant: Mutant
    shown: Trial
    logits_only: Trial


def run_mutants(
    numbers: Sequence[str],
    bundles: Sequence[str],
    *,
    engine: str = "host",
    workers: int = 2,
    progress: Progress = lambda _: None,
) -> list[KillRow]:
    """Try these mutants of the engine against the bundles, in the order given.

    Workers are fresh processes with one thread each: the cores are shared by mutants.
    """
    with Court(bundles):
        pass  # a file that is no bundle is refused here, and not in each worker
    trials: dict[tuple[str, bool], Trial] = {}
    threads = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when a worker loads NumPy
    try:
        with ProcessPoolExecutor(
            workers,
            multiprocessing.get_context("spawn"),
            initializer=_open_court,
            initargs=(tuple(bundles),),
        ) as pool:
            waiting = {
                pool.submit(_try, number, engine, shown): (number, shown)
                for number in numbers
                for shown in (True, False)
            }
            try:
                for done in as_completed(waiting):
                    trials[waiting[done]] = done.result()
                    progress(f"{len(trials)} of {len(waiting)} trials")
            except BaseException:  # an interrupt too: what has not begun need not begin
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        if threads is None:
            del os.environ["OPENBLAS_NUM_THREADS"]
        else:
            os.environ["OPENBLAS_NUM_THREADS"] = threads
    return [
        KillRow(MUTANTS[number], trials[number, True], trials[number, False]) for number in numbers
    ]


_COURT: list[Court] = []  # of a worker, for all its trials


def _open_court(bundles: tuple[str, ...]) -> None:
    _COURT[:] = [Court(bundles)]


def _try(number: str, engine: str, shown: bool) -> Trial:
    made = make_engine(number, engine)
    court = _COURT[0]
    trial = court.try_shown if shown else court.try_logits_only
    return trial(MUTANTS[number], made)
