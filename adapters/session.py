"""One sequence over a library's forward: the verbs and their books, the same for every adapter.

What a library can do stands behind `Backend`: one forward over rows, keeping some of them, and, if
its cache can be read, the committed latents. A refused call changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kdtr.adapters import checks
from kdtr.adapters.walk import emitted_tokens, greedy_walk, visible_nodes
from kdtr.contract import (
    NO_LIMIT,
    SILENT,
    Acceptance,
    Array,
    DraftTree,
    EmitLimit,
    EngineError,
    LogicalCache,
    ModelConfig,
    Round,
    SessionError,
    Trace,
    UnsupportedError,
    Verified,
)

# By (stage, layer), in the order in which they were computed.
Stages = dict[tuple[str, int | None], np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What one forward computes.

    committed_len  L: rows before these
    tokens         [n]
    positions      [n]
    mask           [n, L + n] bool, true where visible
    tree           whose nodes the rows are; None: tokens of a prefill, or of forward_tokens
    """

    committed_len: int
    tokens: tuple[int, ...]
    positions: np.ndarray
    mask: np.ndarray
    tree: DraftTree | None


class Backend(Protocol):
    """One sequence in the library's own cache; rows of a forward stay until the next.

    moves_rows  whether keep() moves rows to slots L.. (COMMIT-1), or only forgets the others
    """

    @property
    def moves_rows(self) -> bool: ...

    def forward(self, rows: Rows, stages: Stages | None) -> np.ndarray:
        """Logits [n, w]; rows of an earlier forward that were not kept are dropped first.

        stages  receives what was computed, as copies; None: compute as shipped
        """
        ...

    def keep(self, rows: Rows, path: tuple[int, ...]) -> None:
        """Keep these of the latest forward's rows, in order, behind the committed ones."""
        ...

    def latents(self, committed_len: int) -> tuple[np.ndarray, np.ndarray]:
        """c_kv [l, L, c] and k_pe [l, L, r], half-split, as the cache holds them."""
        ...

    def clear(self) -> None:
        """Drop every row."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """The latest forward, not yet committed; targets [n]."""

    rows: Rows
    targets: tuple[int, ...]


class AdapterSession:
    """See `contract.Session`; verbs that the engine does not offer raise UnsupportedError."""

    def __init__(
        self, engine: str, verbs: frozenset[str], config: ModelConfig, backend: Backend, slots: int
    ) -> None:
        self._engine = engine
        self._verbs = verbs
        self._config = config
        self._backend = backend
        self._slots = slots
        self._tokens: list[int] = []  # committed
        self._positions: list[int] = []
        self._root: int | None = None
        self._pending: _Pending | None = None
        self._tracing = False
        self._closed = False

    @property
    def committed_len(self) -> int:
        return len(self._tokens)

    @property
    def root(self) -> int | None:
        return self._root

    def set_root(self, token: int) -> None:
        self._enter("set_root")
        self._root = checks.token_id("root", token, self._config.vocab_size)
        self._pending = None

    def forward_tokens(
        self, tokens: Sequence[int], positions: Array, mask: Array, *, trace: Trace = SILENT
    ) -> Array:
        self._enter("forward_tokens")
        trace = checks.trace_function(trace)
        ids = checks.token_ids("tokens", tokens, self._config.vocab_size)
        where = checks.row_positions(positions, len(ids))
        seen = checks.row_mask(mask, len(ids), self.committed_len)
        checks.room(self.committed_len, len(ids), self._slots)
        return self._forward(Rows(self.committed_len, ids, where, seen, None), trace)

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        self._enter("prefill")
        trace = checks.trace_function(trace)
        ids = checks.token_ids("tokens", tokens, self._config.vocab_size)
        n, length = len(ids), self.committed_len
        checks.room(length, n, self._slots)
        causal = np.tri(n, length + n, length, dtype=bool)  # ones [n, L], then lower triangular
        rows = Rows(length, ids, length + np.arange(n), causal, None)
        self._forward(rows, trace)
        assert self._pending is not None
        root = self._pending.targets[-1]
        self._keep(Acceptance(tuple(range(n)), root))
        return root

    def decode(self, *, trace: Trace = SILENT) -> int:
        self._enter("decode")
        tree = DraftTree(tokens=(self._decided_root(),), parents=(-1,))
        return self._round(tree, NO_LIMIT, checks.trace_function(trace)).acceptance.bonus

    def build(self, draft_logits: Array, budget: int) -> DraftTree:
        """Never offered: neither library builds draft trees."""
        raise UnsupportedError(f"{self._engine} does not offer build()")

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        self._enter("verify")
        trace = checks.trace_function(trace)
        logits = self._verify(tree, trace)
        assert self._pending is not None
        return Verified(logits=logits, targets=self._pending.targets)

    def accept(
        self, tree: DraftTree, targets: Sequence[int] | None = None, *, limit: EmitLimit = NO_LIMIT
    ) -> Acceptance:
        self._enter("accept")
        checks.fitting_tree(tree, self._config.vocab_size)
        checks.emit_limit(limit)
        if targets is None:
            if self._pending is None or self._pending.rows.tree != tree:
                raise SessionError(
                    "accept without targets, but the latest forward is not a verify of this tree; "
                    "verify it first, or give the targets"
                )
            targets = self._pending.targets
        chosen = checks.targets(targets, len(tree), self._config.vocab_size)
        return greedy_walk(tree, chosen, limit)

    def commit(self, acceptance: Acceptance) -> None:
        self._enter("commit")
        if self._pending is None:
            raise SessionError(
                "commit without a pending forward: there was none, it was committed already, or "
                "set_root dropped it; verify first (COMMIT-5)"
            )
        rows = self._pending.rows
        n, vocab_size = len(rows.tokens), self._config.vocab_size
        self._keep(checks.committable(acceptance, n, rows.tree, vocab_size))

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        self._enter("round")
        return self._round(tree, checks.emit_limit(limit), checks.trace_function(trace))

    def snapshot(self) -> LogicalCache:
        self._enter("snapshot")
        c_kv, k_pe = self._backend.latents(self.committed_len)
        return LogicalCache(np.array(self._tokens), np.array(self._positions), c_kv, k_pe)

    def reset(self) -> None:
        self._enter("reset")
        self._backend.clear()
        self._tokens, self._positions = [], []
        self._root = self._pending = None

    def close(self) -> None:
        self.refuse_in_trace("close")
        if not self._closed:
            self._backend.close()
        self._closed = True

    def _verify(self, tree: DraftTree, trace: Trace) -> np.ndarray:
        checks.rooted_tree(tree, self._decided_root(), self._config.vocab_size)
        n, length = len(tree), self.committed_len
        checks.room(length, n, self._slots)
        nodes = visible_nodes(tree)
        mask = np.concatenate([np.ones((n, length), dtype=bool), nodes], axis=1)
        depth = nodes.sum(axis=1) - 1
        return self._forward(Rows(length, tree.tokens, length + depth, mask, tree), trace)

    def _round(self, tree: DraftTree, limit: EmitLimit, trace: Trace) -> Round:
        self._verify(tree, trace)
        assert self._pending is not None
        pending, self._pending = self._pending, None  # a trace that raises leaves none to commit
        acceptance = greedy_walk(tree, pending.targets, limit)
        emitted = emitted_tokens(tree, acceptance)
        path, length = np.array(acceptance.path), self.committed_len
        walk: Stages = {
            ("targets", None): np.array(pending.targets),
            ("path", None): path,
            ("bonus", None): np.array(acceptance.bonus),
            ("emitted", None): np.array(emitted),
        }
        if self._backend.moves_rows:
            walk["moves", None] = np.stack([length + path, length + np.arange(len(path))], axis=1)
        self._show(walk, trace)
        self._pending = pending
        self._keep(acceptance)
        return Round(tree=tree, acceptance=acceptance, emitted=emitted)

    def _forward(self, rows: Rows, trace: Trace) -> np.ndarray:
        self._pending = None  # from here on its rows are being overwritten
        stages: Stages | None = None if trace is SILENT else {}
        if stages is not None and rows.tree is not None:
            stages["parents", None] = np.array(rows.tree.parents)
        logits = self._backend.forward(rows, stages)
        wanted = (len(rows.tokens), self._config.vocab_size)
        if logits.shape != wanted:
            raise EngineError(f"{self._engine} gave logits {logits.shape}; expected {wanted}")
        if stages is not None:
            self._show(stages, trace)
        targets = tuple(logits.argmax(axis=1).tolist())  # the first of equals: the lowest id
        self._pending = _Pending(rows, targets)
        return logits

    def _keep(self, acceptance: Acceptance) -> None:
        assert self._pending is not None
        rows, path = self._pending.rows, acceptance.path
        self._pending = None
        self._backend.keep(rows, path)
        self._tokens += [rows.tokens[node] for node in path]
        self._positions += rows.positions[list(path)].tolist()
        self._root = acceptance.bonus

    def _show(self, stages: Stages, trace: Trace) -> None:
        """The trace may not call the session; what it is given is a copy."""
        self._tracing = True
        try:
            for (stage, layer), array in stages.items():
                trace(stage, layer, array)
        finally:
            self._tracing = False

    def _enter(self, verb: str) -> None:
        self.refuse_in_trace(verb)
        if self._closed:
            raise SessionError("the session is closed; open another")
        if verb not in self._verbs:
            raise UnsupportedError(f"{self._engine} does not offer {verb}()")

    def refuse_in_trace(self, verb: str) -> None:
        if self._tracing:
            raise SessionError(f"{verb} called from a trace; call it after the verb has returned")

    def _decided_root(self) -> int:
        if self._root is None:
            raise SessionError("the session has no root; prefill or set_root first")
        return self._root
