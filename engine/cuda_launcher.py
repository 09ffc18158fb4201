"""How a session launches its forwards on a GPU: fixed buffers, buckets, captured graphs.

A tree's programs are padded to a bucket of rows and launched for a bucket of slots, and each shape
is captured once as a CUDA graph, with and without a trace. A replay reads L, the rows that count
and the tree from the session's inbox, so nothing is captured again as the sequence grows. Prefill
and forward_tokens run as they come.

A trace is complete after the run: its arrays are the graph's own buffers, shown without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kdtr.contract import SILENT, STAGE, Array, Trace
from kdtr.engine.kernel_set import Rows

if TYPE_CHECKING:
    from kdtr.engine.cuda_graphs import Graph
    from kdtr.engine.cuda_kernels import CudaKernels
    from kdtr.engine.paging import PagedCache

T = TypeVar("T")

_ROW_BUCKETS = (1, 5, 9, 17, 33, 65, 129)  # then multiples of 128, plus the root
_LEAST_SLOTS = 256
_MOST_GRAPHS = 32  # of a session; each holds the buffers of its own
_HEADER = 4  # count, committed_len, n_slots, max_emitted
_NOTHING = -1


class _Key(NamedTuple):
    """What the shape of everything launched depends on."""

    name: str
    n: int
    max_slots: int
    n_stops: int
    traced: bool

    def __str__(self) -> str:
        return f"{self.name} of {self.n} rows over up to {self.max_slots} slots"


class _Inbox(NamedTuple):
    """What is staged of a bucket of rows, and its parts: to slice it anew costs 30 us a round.

    rows  for any max_slots: that is the launch's
    """

    array: Array
    rows: Rows


class _Captured(NamedTuple):
    """A graph, and the buffers in it that a trace is shown."""

    graph: Graph[Any]
    shown: list[tuple[str, int | None, Array]]


def row_bucket(n: int) -> int:
    """Rows that are launched for a tree of n nodes."""
    for bucket in _ROW_BUCKETS:
        if n <= bucket:
            return bucket
    return -(-(n - 1) // 128) * 128 + 1


def slot_bucket(n_slots: int) -> int:
    """An upper bound of n_slots: the next power of two, and not below 256."""
    return max(_LEAST_SLOTS, 1 << (n_slots - 1).bit_length())


class CudaLauncher:
    """A `Launcher` of one session.

    cache  that its graphs hold the addresses of
    warm   shapes that some session of the same model has run, which are captured at once; None:
           nothing is captured
    """

    row_bucket = staticmethod(row_bucket)

    def __init__(self, kernels: CudaKernels, cache: PagedCache, warm: set[_Key] | None) -> None:
        self._kernels = kernels
        self._cache = cache
        self._warm = warm
        self._inboxes: dict[tuple[int, int], _Inbox] = {}  # by rows and stop tokens
        self._graphs: dict[_Key, _Captured] = {}  # the one used longest ago first
        self._extent = (0, 0)  # rows that count and slots they may see, of what was staged last

    def stage(
        self,
        committed_len: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        max_emitted: int = 1,
    ) -> Rows:
        """One copy to the device, into the inbox of the bucket; a tree is padded."""
        self._forget_outgrown(slot_bucket(committed_len + 1))
        count = len(tokens)
        n = count if parents is None else self.row_bucket(count)
        n_stops = len(stop_tokens) and max(8, 1 << (len(stop_tokens) - 1).bit_length())
        self._extent = (count, committed_len + count)
        host = np.full(_HEADER + 3 * n + n_stops, _NOTHING, np.int64)
        host[:_HEADER] = count, committed_len, committed_len + count, max_emitted
        to_tokens, to_slots, to_parents, to_stops = _parts(host, n)
        to_tokens[:] = 0  # a valid id, for padding too
        to_tokens[:count] = tokens
        to_slots[:count] = np.arange(committed_len, committed_len + count)
        if parents is not None:
            to_parents[:count] = parents
        to_stops[: len(stop_tokens)] = stop_tokens
        max_slots = slot_bucket(committed_len + count)
        if parents is None:
            return _rows(self._kernels.upload(host), n, max_slots)._replace(parents=None)
        return self._delivered(host, n, n_stops)._replace(max_slots=max_slots)

    def run(self, name: str, rows: Rows, program: Callable[[Trace], T], trace: Trace) -> T:
        """Now, or as the replay of a graph; the trace afterwards, on the host."""
        extent = self._extent
        key = _Key(name, rows.n, rows.max_slots, len(rows.stop_tokens), trace is not SILENT)
        if rows.parents is None or self._warm is None or key not in self._warm:
            shown: list[tuple[str, int | None, Array]] = []
            result = self._kernels.launch(program, _collecting(shown, trace), key)
            if self._warm is not None and rows.parents is not None:
                self._warm.add(key)
        else:
            graph, shown = self._graph(key, program, trace)
            result = self._kernels.replay(graph, key)
        if self._kernels.guarded:
            self._kernels.check_rows(self._cache.rows)
        for stage, layer, array in shown:
            trace(stage, layer, self._without_padding(stage, array, extent))
        return result

    def close(self) -> None:
        self._graphs.clear()
        self._inboxes.clear()

    def _delivered(self, host: np.ndarray, n: int, n_stops: int) -> Rows:
        """On the device, at the address that the bucket's graphs read."""
        inbox = self._inboxes.get((n, n_stops))
        if inbox is None:
            array = self._kernels.upload(host)
            inbox = self._inboxes[n, n_stops] = _Inbox(array, _rows(array, n, _LEAST_SLOTS))
        else:
            self._kernels.overwrite(inbox.array, host)
        return inbox.rows

    def _graph(self, key: _Key, program: Callable[[Trace], Any], trace: Trace) -> _Captured:
        """The key's, as the one used last; captured now, if it is new."""
        captured = self._graphs.pop(key, None) or self._capture(key, program, trace)
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[key] = captured
        return captured

    def _capture(self, key: _Key, program: Callable[[Trace], Any], trace: Trace) -> _Captured:
        shown: list[tuple[str, int | None, Array]] = []

        def captured() -> Any:
            shown.clear()
            return program(_collecting(shown, trace))

        return _Captured(self._kernels.capture(captured, key), shown)

    def _forget_outgrown(self, least: int) -> None:
        """Graphs of smaller slot buckets: L grows, and after a reset they are captured anew."""
        for key in [key for key in self._graphs if key.max_slots < least]:
            del self._graphs[key]

    def _without_padding(self, stage: str, array: Array, extent: tuple[int, int]) -> np.ndarray:
        """The rows that count, and the slots they may see (PAD-1)."""
        sizes = dict(zip("ns", extent, strict=True))
        cut = tuple(slice(sizes.get(axis)) for axis in STAGE[stage].axes)
        return self._kernels.to_host(array[cut])


def _parts(inbox: Array, n: int) -> tuple[Array, Array, Array, Array]:
    """Behind the header: tokens, slots and parents [n], stop tokens; on either side."""
    ends = [_HEADER + part * n for part in range(4)]
    tokens, slots, parents = (inbox[a:b] for a, b in pairwise(ends))
    return tokens, slots, parents, inbox[ends[-1] :]


def _rows(inbox: Array, n: int, max_slots: int) -> Rows:
    count, committed_len, n_slots, max_emitted = (inbox[i : i + 1] for i in range(_HEADER))
    tokens, slots, parents, stop_tokens = _parts(inbox, n)
    return Rows(
        n=n,
        count=count,
        committed_len=committed_len,
        n_slots=n_slots,
        max_slots=max_slots,
        tokens=tokens,
        slots=slots,
        parents=parents,
        stop_tokens=stop_tokens,
        max_emitted=max_emitted,
    )


def _collecting(shown: list[tuple[str, int | None, Array]], trace: Trace) -> Trace:
    """Keeps what is shown until the kernels have run."""
    if trace is SILENT:
        return SILENT
    return lambda stage, layer, array: shown.append((stage, layer, array))
