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
from functools import partial

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
from kdtr.engine.kernel_set import Rows, Visibility, Walk
from kdtr.engine.paging import PagedCache
from kdtr.engine.tree_round import forward_tree, tree_round, walk_limits


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
        self._launcher = forward.kernels.launcher(cache, forward.config)
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
        forward.kernels.check_row_count("forward_tokens", len(ids), forward.config)

        kernels = forward.kernels
        self._pending = None
        rows = self._staged(ids)

        def program(trace: Trace) -> Array:
            visibility = Visibility(kernels.device_int(0), kernels.mask_block(host_mask))
            on_device = kernels.upload(host_positions)  # [M]
            return forward(self._cache, rows, on_device, visibility, trace)

        logits = kernels.to_host(self._launcher.run("forward_tokens", rows, program, trace))
        self._pending = _Pending(ids, tuple(host_positions.tolist()))
        return logits  # [M, w]

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        """Append exactly these tokens; the target of the last is the root (FWD-1, FWD-6)."""
        forward = self._opened("prefill")
        trace = self._watched(trace)
        ids = checks.token_ids("tokens", tokens, forward.config.vocab_size)
        self._cache.check_room("prefill", self.committed_len, len(ids))
        forward.kernels.check_row_count("prefill", len(ids), forward.config)

        kernels, n = forward.kernels, len(ids)
        self._pending = None
        rows = self._staged(ids)

        def program(trace: Trace) -> tuple[Array, Array]:
            positions, causal = kernels.over(rows).causal_layout(n, rows.committed_len)
            visibility = Visibility(rows.committed_len, causal)
            logits = forward(self._cache, rows, positions, visibility, trace)  # [n, w]
            return positions, kernels.argmax(logits[n - 1 :])  # the target of the last row

        positions, targets = self._launcher.run("prefill", rows, program, trace)
        target = int(kernels.to_host(targets)[0])
        self._advance(ids, kernels.to_host(positions).tolist(), target)
        return target

    def decode(self, *, trace: Trace = SILENT) -> int:
        """The round of the root alone: one token out, L grows by one (FWD-2)."""
        forward = self._opened("decode")
        trace = self._watched(trace)
        root_only = DraftTree(tokens=(self._rooted("decode"),), parents=(-1,))
        self._cache.check_room("decode", self.committed_len, 1)

        return self._round(forward, root_only, NO_LIMIT, trace, SILENT).acceptance.bonus

    def build(self, draft_logits: Array, budget: int) -> DraftTree:
        """The best-first tree under the session's root from draft_logits [depth, w] (TREE-3)."""
        forward = self._opened("build")
        root = self._rooted("build")
        logits = checks.draft_logits(draft_logits, forward.config.vocab_size)
        n_drafts = checks.node_budget(budget)
        self._cache.check_room("build", self.committed_len, n_drafts + 1)
        forward.kernels.check_tree(n_drafts + 1)

        parents, tokens = forward.kernels.build_best_first(logits, n_drafts)  # [n] each
        return DraftTree(tokens=(root, *tokens[1:].tolist()), parents=tuple(parents.tolist()))

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        """One forward over the tree, pending; committed rows and L stay (SLOT-2)."""
        forward = self._opened("verify")
        trace = self._watched(trace)
        checks.rooted_tree(tree, self._rooted("verify"), forward.config.vocab_size)
        forward.kernels.check_tree(len(tree))
        self._cache.check_room("verify", self.committed_len, len(tree))

        self._pending = None
        rows = self._staged(tree.tokens, tree.parents)
        program = partial(forward_tree, forward, self._cache, rows)
        on_device = self._launcher.run("verify", rows, program, trace)
        kernels, n = forward.kernels, len(tree)  # without the padding (PAD-1)
        all_targets, all_positions = kernels.all_to_host(on_device.targets, on_device.positions)
        targets, positions = tuple(all_targets[:n].tolist()), tuple(all_positions[:n].tolist())
        verified = Verified(logits=kernels.to_host(on_device.logits[:n]), targets=targets)
        self._pending = _Pending(tree.tokens, positions, tree, targets)  # all of it is there
        return verified

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

        kernels = forward.kernels
        stops, most = walk_limits(tree, limit, vocab_size)
        walk = kernels.accept_walk(
            kernels.upload(np.array(tree.tokens)),
            kernels.upload(np.array(tree.parents)),
            kernels.upload(np.array(targets)),
            kernels.upload(np.array(stops, np.int64)),
            kernels.device_int(most),
        )
        return _acceptance(Walk(*kernels.all_to_host(*walk)))

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

        kernels, path = forward.kernels, acceptance.path
        operands = (
            kernels.upload(np.array(path)),
            kernels.upload(np.array([acceptance.accept_len])),
            kernels.device_int(self.committed_len),
        )
        self._pending = None  # rows that were moved once must not be moved again (COMMIT-5)
        kernels.commit_rows(self._cache, *operands)
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
        forward.kernels.check_tree(len(tree))
        checks.emit_limit(limit)
        self._cache.check_room("round", self.committed_len, len(tree))

        return self._round(forward, tree, limit, trace, trace)

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
        self.refuse_in_trace("close")
        self._forward = None
        self._pending = None
        self._launcher.close()
        self._cache.release()

    # Forwards

    def _staged(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        stop_tokens: Sequence[int] = (),
        max_emitted: int = 1,
    ) -> Rows:
        """The rows on the device, with pages for their slots."""
        self._cache.map_slots(self.committed_len + len(tokens))
        return self._launcher.stage(
            self.committed_len, tokens, parents, stop_tokens=stop_tokens, max_emitted=max_emitted
        )

    def _round(
        self, forward: Forward, tree: DraftTree, limit: EmitLimit, trace: Trace, walk_trace: Trace
    ) -> Round:
        """Checked: forward, walk and compaction as one program, then the books (COMMIT-2).

        walk_trace  is shown the stages of the walk, trace those of the forward
        """
        self._pending = None
        limits = walk_limits(tree, limit, forward.config.vocab_size)
        rows = self._staged(tree.tokens, tree.parents, *limits)
        program = partial(tree_round, forward, self._cache, rows)
        done = self._launcher.run("round", rows, program, trace)
        kernels, n = forward.kernels, len(tree)
        *walk, positions = kernels.all_to_host(*done.walk, done.positions)
        acceptance = _acceptance(Walk(*walk))
        path, accept_len = acceptance.path, acceptance.accept_len
        emitted = (*(tree.tokens[node] for node in path[1:]), acceptance.bonus)
        if walk_trace is not SILENT:
            walk_trace("targets", None, kernels.to_host(done.targets[:n]))
            walk_trace("path", None, np.array(path))
            walk_trace("bonus", None, np.array(acceptance.bonus))
            walk_trace("emitted", None, np.array(emitted))
            walk_trace("moves", None, kernels.to_host(done.moves[:accept_len]))
        # Last: until here the round's rows are beyond L, and not committed.
        self._advance(
            [tree.tokens[node] for node in path], positions[list(path)].tolist(), acceptance.bonus
        )
        return Round(tree=tree, acceptance=acceptance, emitted=emitted)

    # State

    def _opened(self, verb: str) -> Forward:
        self.refuse_in_trace(verb)
        if self._forward is None:
            raise SessionError(f"{verb} on a closed session; open another with Model.open")
        return self._forward

    def refuse_in_trace(self, verb: str) -> None:
        """Raises SessionError while one of this session's traces runs."""
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


def _acceptance(walk: Walk) -> Acceptance:
    """Of a walk whose arrays are on the host; without the rest of its fixed length (PAD-1)."""
    path = walk.path[: int(walk.accept_len[0])]
    return Acceptance(path=tuple(path.tolist()), bonus=int(walk.bonus[0]))
