"""Programs on a CUDA device: launched as they come, or captured once as a graph and replayed.

A program is given a trace and launches kernels; `CudaLauncher` decides which of the two it is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from kdtr.contract import Trace
from kdtr.engine.cuda_device import CudaDevice, in_turn
from kdtr.engine.cuda_guard import Guard
from kdtr.engine.cuda_memory import LESS_GRAPHS, fewer_rows, memory_error, ran_out

T = TypeVar("T")


class Named(Protocol):
    """What a program is called, alone and with its sizes (`str`): for errors."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Graph(Generic[T]):
    """A captured program, what a replay leaves, and the memory that both live in."""

    graph: Any
    result: T
    memory: Any
    guard: Guard | None


class GraphOperations(CudaDevice):
    """The part of the set that a launcher runs its programs through."""

    @in_turn
    def launch(self, program: Callable[[Trace], T], trace: Trace, named: Named) -> T:
        """The program as it comes."""
        with self._needing(str(named), fewer_rows(named.name)):
            if self.guarded:
                result: T = self._under_guard(lambda: program(trace))
                return result
            return program(trace)

    @in_turn
    def capture(self, program: Callable[[], T], named: Named) -> Graph[T]:
        """The program as a graph; nothing has run yet. It may be called twice.

        A graph's memory comes from a pool of its own. When that finds nothing more, what the common
        pool holds unused is given back, and the graph is captured anew.
        """
        try:
            return self._captured(program)
        except Exception as error:
            if not ran_out(self._cupy, error):
                raise
        self._cupy.get_default_memory_pool().free_all_blocks()
        with self._needing(f"graph of a {named}", LESS_GRAPHS):
            return self._captured(program)

    def _captured(self, program: Callable[[], T]) -> Graph[T]:
        pool, kept = self._cupy.cuda.MemoryPool(), []
        guard = Guard(self._cupy, pool.malloc) if self.guarded else None

        def malloc(size: int) -> Any:
            """What a graph has captured stays: a pool that runs short frees what looks unused."""
            kept.append(pool.malloc(size))
            return kept[-1]

        stream = self.turn.stream
        with self._cupy.cuda.using_allocator(malloc if guard is None else guard.malloc):
            try:
                stream.begin_capture()
                result = program()
            except BaseException:
                with suppress(Exception):  # a capture is invalid: the first error is the one
                    stream.end_capture()
                raise
            graph = stream.end_capture()
        return Graph(graph, result, kept, guard)

    @in_turn
    def replay(self, graph: Graph[T], named: Named) -> T:
        """Runs it; the result's arrays are those of every replay."""
        try:
            graph.graph.launch(self.turn.stream)
        except Exception as error:  # not `_needing`: this is every round's way
            if not ran_out(self._cupy, error):
                raise
            raise memory_error(self._cupy, error, f"graph of a {named}", LESS_GRAPHS) from None
        if graph.guard is not None:
            graph.guard.check()
        return graph.result
