"""The latent cache, twice: append-then-compact and scratch. From outside nobody can tell.

Rows that hold nothing yet are NaN, so a read of one shows (MASK-3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kdtr.contract import CacheError, LogicalCache, ModelConfig


class LatentCache(Protocol):
    """Committed rows 0..committed_len-1, and the rows of the forward under way behind them."""

    @property
    def committed_len(self) -> int: ...

    def begin(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        """Room for the rows of a forward; drops those of the last one.

        Raises CacheError over capacity, before anything changes (SLOT-3).
        """
        ...

    def append(self, layer: int, c_kv: np.ndarray, k_pe: np.ndarray) -> None:
        """Write the forward's rows of one layer: c_kv [n, c], k_pe [n, r] (SLOT-1)."""
        ...

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """c_kv [L + n, c] and k_pe [L + n, r] of one layer."""
        ...

    def commit(self, path: tuple[int, ...]) -> None:
        """Keep the forward's rows `path`, in order, as slots L.. (COMMIT-1, COMMIT-2)."""
        ...

    def snapshot(self) -> LogicalCache:
        """A copy of the committed rows."""
        ...


NewCache = Callable[[ModelConfig, int], LatentCache]


class AppendCache:
    """Append-then-compact: the forward writes behind the committed rows, a commit closes gaps."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        layers = config.num_hidden_layers
        self._committed_len = 0
        self._n = 0  # rows of the forward under way
        self._max_len = max_len
        self._tokens = np.full(max_len, -1)
        self._positions = np.full(max_len, -1)
        self._c_kv = np.full((layers, max_len, config.kv_lora_rank), np.nan)
        self._k_pe = np.full((layers, max_len, config.qk_rope_head_dim), np.nan)

    @property
    def committed_len(self) -> int:
        return self._committed_len

    def begin(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        check_capacity(self.committed_len, len(tokens), self._max_len)
        self._n = len(tokens)
        self._tokens[self._fresh()] = tokens
        self._positions[self._fresh()] = positions

    def append(self, layer: int, c_kv: np.ndarray, k_pe: np.ndarray) -> None:
        self._c_kv[layer, self._fresh()] = c_kv
        self._k_pe[layer, self._fresh()] = k_pe

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        end = self.committed_len + self._n
        return self._c_kv[layer, :end], self._k_pe[layer, :end]

    def commit(self, path: tuple[int, ...]) -> None:
        source = self.committed_len + np.array(path)
        target = slice(self.committed_len, self.committed_len + len(path))
        # The right side is a copy: no row is overwritten before it is read.
        self._tokens[target] = self._tokens[source]
        self._positions[target] = self._positions[source]
        self._c_kv[:, target] = self._c_kv[:, source]
        self._k_pe[:, target] = self._k_pe[:, source]
        self._committed_len += len(path)
        self._n = 0

    def snapshot(self) -> LogicalCache:
        end = self.committed_len
        return LogicalCache(
            tokens=self._tokens[:end].copy(),
            positions=self._positions[:end].copy(),
            c_kv=self._c_kv[:, :end].copy(),
            k_pe=self._k_pe[:, :end].copy(),
        )

    def _fresh(self) -> slice:
        return slice(self.committed_len, self.committed_len + self._n)


class ScratchCache:
    """Scratch: the forward's rows live in a side buffer, and only accepted ones enter the cache."""

    def __init__(self, config: ModelConfig, max_len: int) -> None:
        layers = config.num_hidden_layers
        self._max_len = max_len
        self._committed = LogicalCache(
            tokens=np.empty(0, dtype=np.int64),
            positions=np.empty(0, dtype=np.int64),
            c_kv=np.empty((layers, 0, config.kv_lora_rank)),
            k_pe=np.empty((layers, 0, config.qk_rope_head_dim)),
        )
        self._scratch = self._committed

    @property
    def committed_len(self) -> int:
        return len(self._committed.tokens)

    def begin(self, tokens: np.ndarray, positions: np.ndarray) -> None:
        n = len(tokens)
        check_capacity(self.committed_len, n, self._max_len)
        layers, _, c = self._committed.c_kv.shape
        self._scratch = LogicalCache(
            tokens=np.array(tokens),
            positions=np.array(positions),
            c_kv=np.full((layers, n, c), np.nan),
            k_pe=np.full((layers, n, self._committed.k_pe.shape[-1]), np.nan),
        )

    def append(self, layer: int, c_kv: np.ndarray, k_pe: np.ndarray) -> None:
        self._scratch.c_kv[layer] = c_kv
        self._scratch.k_pe[layer] = k_pe

    def rows(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.concatenate([self._committed.c_kv[layer], self._scratch.c_kv[layer]]),
            np.concatenate([self._committed.k_pe[layer], self._scratch.k_pe[layer]]),
        )

    def commit(self, path: tuple[int, ...]) -> None:
        kept, old, new = list(path), self._committed, self._scratch
        self._committed = LogicalCache(
            tokens=np.concatenate([old.tokens, new.tokens[kept]]),
            positions=np.concatenate([old.positions, new.positions[kept]]),
            c_kv=np.concatenate([old.c_kv, new.c_kv[:, kept]], axis=1),
            k_pe=np.concatenate([old.k_pe, new.k_pe[:, kept]], axis=1),
        )

    def snapshot(self) -> LogicalCache:
        held = self._committed
        return LogicalCache(
            held.tokens.copy(), held.positions.copy(), held.c_kv.copy(), held.k_pe.copy()
        )


def check_capacity(committed_len: int, n: int, max_len: int) -> None:
    """SLOT-3: legal up to equality, in both strategies.

    >>> check_capacity(126, 4, 128)
    Traceback (most recent call last):
    kdtr.contract.errors.CacheError: a forward of 4 rows at committed_len 126 needs 130 slots, \
the session has 128; open it with max_len >= 130
    """
    if committed_len + n > max_len:
        raise CacheError(
            f"a forward of {n} rows at committed_len {committed_len} needs {committed_len + n} "
            f"slots, the session has {max_len}; open it with max_len >= {committed_len + n}"
        )
