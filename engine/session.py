"""One sequence: the verbs of a round over a kernel set, and what they leave pending.

State, all of it: the committed tokens and their positions, the root, the cache, and the pending
forward, that is the rows a verify or forward_tokens left in slots L.. for one commit (COMMIT-5).

What becomes of a pending forward:
  taken   by the commit that applies to it
  lost    to the next verify, forward_tokens, prefill, decode or round, which overwrite its rows,
          to set_root, whose root it is not under, and to reset
  kept    by build, accept, snapshot and by every refused call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.contract import (
    NO_LIMIT,
    SILENT,
    Acceptance,
    Array,
    DraftTree,
    EmitLimit,
    LogicalCache,
    Round,
    SessionError,
    Trace,
    Verified,
)
from kdtr.engine import checks
from kdtr.engine.forward import Forward
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache
from kdtr.engine.tree_round import FusedRound, forward_tree, fused_round, walk_limits


@dataclass(frozen=True, slots=True)
class _Pending:
    """Rows in slots L.. that one commit may take.

    tokens, positions  of each row
    tree, targets      of a verify; None after forward_tokens
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    tree: DraftTree | None = None
    targets: tuple[int, ...] | None = None


class TreeSession:
    """A `Session` of the contract. Not for several threads at once."""

    def __init__(self, forward: Forward, cache: PagedCache) -> None:
        self._forward: Forward | None = forward  # None once closed
        self._cache = cache
        self._tokens: list[int] = []  # committed
        self._positions: list[int] = []  # of the committed tokens
        self._root: int | None = None
        self._pending: _Pending | None = None
        self._tracing = False  # while a trace runs

    @property
    def committed_len(self) -> int:
        """L: tokens whose rows are in the cache."""
        return len(self._tokens)

    @property
    def root(self) -> int | None:
        """The decided token at position L that is not yet cached."""
        return self._root

    def set_root(self, token: int) -> None:
        """Replace the root, at any L (FWD-3); a pending forward is forgotten."""
        forward = self._opened("set_root")
        root = checks.token_id("token", token, forward.config.vocab_size)

        self._pending = None
        self._root = root

    def forward_tokens(
        self, tokens: Sequence[int], positions: Array, mask: Array, *, trace: Trace = SILENT
    ) -> Array:
        """M rows under any mask, written to slots L..L+M-1, pending; returns logits [M, w]."""
        forward = self._opened("forward_tokens")
        trace = self._watched(trace)
        ids = checks.token_ids("tokens", tokens, forward.config.vocab_size)
        host_positions = checks.row_positions(positions, len(ids))  # [M]
        host_mask = checks.row_mask(mask, len(ids), self.committed_len)  # [M, L + M]
        self._cache.check_room("forward_tokens", self.committed_len, len(ids))

        upload = forward.kernels.upload
        visibility = Visibility(open_len=0, block=upload(host_mask))
        self._pending = None
        logits = forward(
            self._cache, self.committed_len, ids, upload(host_positions), visibility, trace
        )  # [M, w]
        self._pending = _Pending(ids, tuple(host_positions.tolist()))
        return forward.kernels.to_host(logits)

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        """Append exactly these tokens; the target of the last is the root (FWD-1, FWD-6)."""
        forward = self._opened("prefill")
        trace = self._watched(trace)
        ids = checks.token_ids("tokens", tokens, forward.config.vocab_size)
        self._cache.check_room("prefill", self.committed_len, len(ids))

        kernels, committed_len, n = forward.kernels, self.committed_len, len(ids)
        positions = np.arange(committed_len, committed_len + n)  # [n]
        causal = Visibility(committed_len, kernels.upload(np.tri(n, dtype=bool)))
        self._pending = None
        logits = forward(
            self._cache, committed_len, ids, kernels.upload(positions), causal, trace
        )  # [n, w]
        target = int(kernels.to_host(kernels.argmax(logits[n - 1 :]))[0])  # of the last row
        self._advance(ids, positions.tolist(), target)
        return target

    def decode(self, *, trace: Trace = SILENT) -> int:
        """The round of the root alone: one token out, L grows by one (FWD-2)."""
        forward = self._opened("decode")
        trace = self._watched(trace)
        root_only = DraftTree(tokens=(self._rooted("decode"),), parents=(-1,))
        self._cache.check_room("decode", self.committed_len, 1)

        self._pending = None
        fused = fused_round(forward, self._cache, self.committed_len, root_only, NO_LIMIT, trace)
        self._keep(root_only, fused)
        return fused.acceptance.bonus

    def build(self, draft_logits: Array, budget: int) -> DraftTree:
        """The best-first tree under the session's root from draft_logits [depth, w] (TREE-3)."""
        forward = self._opened("build")
        root = self._rooted("build")
        logits = checks.draft_logits(draft_logits, forward.config.vocab_size)
        n_drafts = checks.node_budget(budget)
        self._cache.check_room("build", self.committed_len, n_drafts + 1)

        parents, tokens = forward.kernels.build_best_first(logits, n_drafts)  # [n] each
        return DraftTree(tokens=(root, *tokens[1:].tolist()), parents=tuple(parents.tolist()))

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        """One forward over the tree, pending; committed rows and L stay (SLOT-2)."""
        forward = self._opened("verify")
        trace = self._watched(trace)
        checks.rooted_tree(tree, self._rooted("verify"), forward.config.vocab_size)
        self._cache.check_room("verify", self.committed_len, len(tree))

        self._pending = None
        on_device = forward_tree(forward, self._cache, self.committed_len, tree, trace)
        to_host = forward.kernels.to_host
        targets = tuple(to_host(on_device.targets).tolist())
        positions = tuple(to_host(on_device.positions).tolist())
        self._pending = _Pending(tree.tokens, positions, tree, targets)
        return Verified(logits=to_host(on_device.logits), targets=targets)

    def accept(
        self, tree: DraftTree, targets: Sequence[int] | None = None, *, limit: EmitLimit = NO_LIMIT
    ) -> Acceptance:
        """The greedy walk over these targets, or over those of the pending verify (ACC-1..4)."""
        forward = self._opened("accept")
        vocab_size = forward.config.vocab_size
        checks.fitting_tree(tree, vocab_size)
        checks.emit_limit(limit)
        if targets is None:
            targets = self._own_targets(tree)
        else:
            targets = checks.target_ids(targets, len(tree), vocab_size)

        upload, to_host = forward.kernels.upload, forward.kernels.to_host
        walk = forward.kernels.accept_walk(
            upload(np.array(tree.tokens)),
            upload(np.array(tree.parents)),
            upload(np.array(targets)),
            *walk_limits(forward, tree, limit),
        )
        accept_len = int(to_host(walk.accept_len)[0])
        path = to_host(walk.path)[:accept_len]
        return Acceptance(path=tuple(path.tolist()), bonus=int(to_host(walk.bonus)[0]))

    def commit(self, acceptance: Acceptance) -> None:
        """Compact the accepted path of the pending forward, once (COMMIT-1..5)."""
        forward = self._opened("commit")
        pending = self._pending
        if pending is None:
            raise SessionError(
                "commit needs an uncommitted verify or forward_tokens, the session has none; "
                "a commit applies to the latest one, once (COMMIT-5)"
            )
        parents = None if pending.tree is None else pending.tree.parents
        checks.committable(acceptance, len(pending.tokens), parents, forward.config.vocab_size)

        upload, path = forward.kernels.upload, acceptance.path
        forward.kernels.commit_rows(
            self._cache,
            upload(np.array(path)),
            upload(np.array([acceptance.accept_len])),
            self.committed_len,
        )
        self._advance(
            [pending.tokens[node] for node in path],
            [pending.positions[node] for node in path],
            acceptance.bonus,
        )

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        """Verify, accept and commit, fused: nothing comes to the host before the walk is over.

        A trace that raises, at any stage, leaves L and the root as they were and nothing pending.
        """
        forward = self._opened("round")
        trace = self._watched(trace)
        checks.rooted_tree(tree, self._rooted("round"), forward.config.vocab_size)
        checks.emit_limit(limit)
        self._cache.check_room("round", self.committed_len, len(tree))

        self._pending = None
        fused = fused_round(forward, self._cache, self.committed_len, tree, limit, trace)
        acceptance = fused.acceptance
        emitted = (*(tree.tokens[node] for node in acceptance.path[1:]), acceptance.bonus)
        trace("targets", None, fused.targets)
        trace("path", None, np.array(acceptance.path))
        trace("bonus", None, np.array(acceptance.bonus))
        trace("emitted", None, np.array(emitted))
        trace("moves", None, fused.moves)
        self._keep(tree, fused)
        return Round(tree=tree, acceptance=acceptance, emitted=emitted)

    def snapshot(self) -> LogicalCache:
        """A copy of the committed rows, in slot order, which is token order."""
        forward = self._opened("snapshot")

        rows = forward.kernels.read_rows(self._cache, self.committed_len)  # [l, t, c + r]
        c = forward.config.kv_lora_rank
        return LogicalCache(
            tokens=np.array(self._tokens, np.int64),
            positions=np.array(self._positions, np.int64),
            c_kv=rows[..., :c].copy(),
            k_pe=rows[..., c:].copy(),
        )

    def reset(self) -> None:
        """Back to an empty cache and no root; every page is handed back."""
        self._opened("reset")

        self._pending = None
        self._root = None
        self._tokens.clear()
        self._positions.clear()
        self._cache.unmap_all()

    def close(self) -> None:
        """Give the session's memory back; again is harmless, every other verb is refused."""
        self._refuse_in_trace("close")
        self._forward = None
        self._pending = None
        self._cache.release()

    # State

    def _opened(self, verb: str) -> Forward:
        self._refuse_in_trace(verb)
        if self._forward is None:
            raise SessionError(f"{verb} on a closed session; open another with Model.open")
        return self._forward

    def _refuse_in_trace(self, verb: str) -> None:
        if self._tracing:
            raise SessionError(
                f"{verb} called from a trace, while the session computes; "
                "call it after the verb has returned"
            )

    def _rooted(self, verb: str) -> int:
        if self._root is None:
            raise SessionError(
                f"{verb} needs a root, the session has none; call prefill or set_root first"
            )
        return self._root

    def _own_targets(self, tree: DraftTree) -> tuple[int, ...]:
        pending = self._pending
        if pending is None or pending.targets is None:
            raise SessionError(
                "accept without targets needs an uncommitted verify, the session has none; "
                "verify the tree first, or pass targets"
            )
        if pending.tree != tree:
            raise SessionError(
                f"accept without targets walks the tree of the latest verify, {pending.tree}; "
                f"got {tree}; verify that tree first, or pass targets"
            )
        return pending.targets

    def _advance(self, tokens: Sequence[int], positions: Sequence[int], root: int) -> None:
        """These rows are committed now and lie in slots L.. in this order (COMMIT-2)."""
        self._tokens.extend(tokens)
        self._positions.extend(positions)
        self._root = root
        self._pending = None

    def _keep(self, tree: DraftTree, fused: FusedRound) -> None:
        """The books of a round, last: until then its rows are beyond L, and not committed."""
        path = fused.acceptance.path
        self._advance(
            [tree.tokens[node] for node in path],
            [fused.positions[node] for node in path],
            fused.acceptance.bonus,
        )

    def _watched(self, trace: Trace) -> Trace:
        """The trace, shown what it cannot write to, and verbs of this session refused meanwhile."""
        if checks.trace_function(trace) is SILENT:
            return trace

        def show(stage: str, layer: int | None, array: Array) -> None:
            if isinstance(array, np.ndarray):
                array = array.view()
                array.flags.writeable = False
            self._tracing = True
            try:
                trace(stage, layer, array)
            finally:
                self._tracing = False

        return show
