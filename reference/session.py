"""One sequence through the reference: every verb stands on the one forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import numpy as np

from kdtr.contract import (
    MAX_POSITION,
    NO_LIMIT,
    SILENT,
    Acceptance,
    DraftTree,
    EmitLimit,
    InputError,
    LogicalCache,
    ModelConfig,
    Round,
    SessionError,
    Trace,
    TreeError,
    Verified,
    check_bits,
)
from kdtr.reference.accept import accept, commit_moves, emitted
from kdtr.reference.arithmetic import Arithmetic
from kdtr.reference.build import build_tree, checked_budget, checked_logits, host_array
from kdtr.reference.cache import NewCache, check_capacity
from kdtr.reference.forward import forward
from kdtr.reference.tree import path, positions, tree_mask
from kdtr.reference.weights import ModelWeights

_TEXT = (str, bytes, bytearray, memoryview)  # sequences, but of characters


@dataclass(frozen=True, slots=True)
class _Pending:
    """The latest forward, not yet committed: its tree (None: forward_tokens) and targets."""

    n: int
    tree: DraftTree | None
    targets: tuple[int, ...]


class ReferenceSession:
    """See `contract.Session`. A refused call changes nothing, a pending verify included."""

    def __init__(
        self,
        arithmetic: Arithmetic,
        config: ModelConfig,
        weights: ModelWeights,
        new_cache: NewCache,
        max_len: int,
    ) -> None:
        self._arithmetic = arithmetic
        self._config = config
        self._weights = weights
        self._max_len = max_len
        self._new_cache = new_cache
        self._cache = new_cache(config, max_len)
        self._root: int | None = None
        self._pending: _Pending | None = None
        self._closed = False
        self.tracing = False  # while a trace runs

    @property
    def committed_len(self) -> int:
        return self._cache.committed_len

    @property
    def root(self) -> int | None:
        return self._root

    def set_root(self, token: int) -> None:
        self._check_open("set_root")
        self._root = self._token_id("root", token)
        self._pending = None

    def forward_tokens(
        self,
        tokens: Sequence[int],
        positions: np.ndarray,
        mask: np.ndarray,
        *,
        trace: Trace = SILENT,
    ) -> np.ndarray:
        self._check_open("forward_tokens")
        trace = self._watched(trace)
        ids = self._token_ids("tokens", tokens)
        where = _checked_positions(positions, len(ids))
        seen = _checked_mask(mask, len(ids), self.committed_len)
        return self._forward(ids, where, seen, None, trace)

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        self._check_open("prefill")
        trace = self._watched(trace)
        ids = self._token_ids("tokens", tokens)
        n, length = len(ids), self.committed_len
        check_capacity(length, n, self._max_len)
        causal = np.tri(n, length + n, length, dtype=bool)  # ones [n, L], then lower triangular
        logits = self._forward(ids, length + np.arange(n), causal, None, trace)
        target = int(logits[-1].argmax())
        self.commit(Acceptance(tuple(range(n)), target))
        return target

    def decode(self, *, trace: Trace = SILENT) -> int:
        self._check_open("decode")
        trace = self._watched(trace)
        tree = DraftTree(tokens=(self._decided_root(),), parents=(-1,))
        return self.round(tree, trace=trace).acceptance.bonus

    def build(self, draft_logits: np.ndarray, budget: int) -> DraftTree:
        self._check_open("build")
        root = self._decided_root()
        logits = host_array("draft_logits", draft_logits)
        if logits.ndim == 2 and logits.shape[1] != self._config.vocab_size:
            raise InputError(
                f"draft_logits are {list(logits.shape)}; "
                f"expected [depth, {self._config.vocab_size}]"
            )
        checked_logits(logits)
        n_drafts = checked_budget(budget)
        check_capacity(self.committed_len, n_drafts + 1, self._max_len)
        return build_tree(logits, n_drafts, root=root)

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        self._check_open("verify")
        trace = self._watched(trace)
        self._check_rooted(tree)
        length = self.committed_len
        check_capacity(length, len(tree), self._max_len)
        self._pending = None  # whatever a trace raises, at any stage
        trace("parents", None, np.array(tree.parents))
        logits = self._forward(
            np.array(tree.tokens),
            np.array(positions(tree, length)),
            tree_mask(tree, length),
            tree,
            trace,
        )
        assert self._pending is not None
        return Verified(logits=logits, targets=self._pending.targets)

    def accept(
        self, tree: DraftTree, targets: Sequence[int] | None = None, *, limit: EmitLimit = NO_LIMIT
    ) -> Acceptance:
        self._check_open("accept")
        self._check_tree(tree)
        _check_limit(limit)
        if targets is None:
            if self._pending is None or self._pending.tree != tree:
                raise SessionError(
                    "accept without targets, but the latest forward is not a verify of this tree; "
                    "verify it first, or give the targets"
                )
            targets = self._pending.targets
        else:
            targets = self._token_ids("targets", targets).tolist()
        return accept(tree, targets, limit=limit)

    def commit(self, acceptance: Acceptance) -> None:
        self._check_open("commit")
        pending = self._pending
        if pending is None:
            raise SessionError(
                "commit without a pending forward: there was none, it was committed already, or "
                "set_root dropped it; verify first (COMMIT-5)"
            )
        if not isinstance(acceptance, Acceptance):
            raise InputError(f"acceptance is {type(acceptance).__name__}; expected an Acceptance")
        _check_path(acceptance.path, pending)
        self._token_id("bonus", acceptance.bonus)
        self._cache.commit(acceptance.path)
        self._root = acceptance.bonus
        self._pending = None

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        self._check_open("round")
        trace = self._watched(trace)
        self._check_rooted(tree)
        _check_limit(limit)
        verified = self.verify(tree, trace=trace)
        acceptance = self.accept(tree, limit=limit)
        pending, self._pending = self._pending, None  # a trace that raises leaves none to commit
        tokens = emitted(tree, acceptance)
        trace("targets", None, np.array(verified.targets))
        trace("path", None, np.array(acceptance.path))
        trace("bonus", None, np.array(acceptance.bonus))
        trace("emitted", None, np.array(tokens))
        trace("moves", None, np.array(commit_moves(acceptance.path, self.committed_len)))
        self._pending = pending
        self.commit(acceptance)
        return Round(tree=tree, acceptance=acceptance, emitted=tokens)

    def snapshot(self) -> LogicalCache:
        self._check_open("snapshot")
        return self._cache.snapshot()

    def reset(self) -> None:
        self._check_open("reset")
        self._cache = self._new_cache(self._config, self._max_len)
        self._root = None
        self._pending = None

    def close(self) -> None:
        self.refuse_in_trace("close")
        self._closed = True

    def _forward(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        mask: np.ndarray,
        tree: DraftTree | None,
        trace: Trace,
    ) -> np.ndarray:
        check_capacity(self.committed_len, len(tokens), self._max_len)
        self._pending = None  # from here on its rows are being overwritten
        logits = forward(
            self._arithmetic,
            self._config,
            self._weights,
            self._cache,
            tokens,
            positions,
            mask,
            trace,
        )
        targets = tuple(logits.argmax(axis=1).tolist())  # the first of equals: the lowest id
        self._pending = _Pending(len(tokens), tree, targets)
        return logits

    def _watched(self, trace: Trace) -> Trace:
        """The trace, shown what it cannot write to, and verbs of this session refused meanwhile."""
        if not callable(trace):
            raise InputError(f"trace is {type(trace).__name__}; expected a function, or SILENT")
        if trace is SILENT or isinstance(trace, _Watched):
            return trace
        return _Watched(self, trace)

    def refuse_in_trace(self, verb: str) -> None:
        if self.tracing:
            raise SessionError(
                f"{verb} called from a trace, while the session computes; "
                "call it after the verb has returned"
            )

    def _check_open(self, verb: str) -> None:
        self.refuse_in_trace(verb)
        if self._closed:
            raise SessionError("the session is closed; open another")

    def _decided_root(self) -> int:
        if self._root is None:
            raise SessionError("the session has no root; prefill or set_root first")
        return self._root

    def _token_id(self, what: str, token: int) -> int:
        try:
            value = None if isinstance(token, bool | np.bool_) else index(token)
        except TypeError:
            value = None
        if value is None:
            raise InputError(f"{what} = {token!r}; expected a token id")
        check_bits(what, value)
        if not 0 <= value < self._config.vocab_size:
            raise InputError(
                f"{what} = {value}; expected a token id 0..{self._config.vocab_size - 1}"
            )
        return value

    def _token_ids(self, what: str, tokens: Sequence[int]) -> np.ndarray:
        if hasattr(tokens, "__array__") or hasattr(tokens, "__dlpack__"):
            ids = host_array(what, tokens)
        elif isinstance(tokens, Sequence) and not isinstance(tokens, _TEXT):
            listed = [self._token_id(f"{what}[{i}]", token) for i, token in enumerate(tokens)]
            ids = np.array(listed, dtype=np.int64)
        else:
            raise InputError(
                f"{what} are {type(tokens).__name__}; expected a sequence or an array of integers"
            )
        if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
            raise InputError(
                f"{what} are {ids.dtype} {list(ids.shape)}; expected integers [n], n >= 1"
            )
        bad = np.flatnonzero((ids < 0) | (ids >= self._config.vocab_size))
        if len(bad):
            raise InputError(
                f"{what}[{bad[0]}] = {ids[bad[0]]}; "
                f"expected a token id 0..{self._config.vocab_size - 1}"
            )
        return ids.astype(np.int64)

    def _check_rooted(self, tree: DraftTree) -> None:
        root = self._decided_root()
        self._check_tree(tree)
        if tree.tokens[0] != root:
            raise TreeError(
                f"the tree's root is token {tree.tokens[0]}, the session's is {root}; "
                f"expected tokens[0] = {root} (FWD-3)"
            )

    def _check_tree(self, tree: DraftTree) -> None:
        if not isinstance(tree, DraftTree):
            raise TreeError(f"tree is {type(tree).__name__}; expected a DraftTree")
        for i, token in enumerate(tree.tokens):
            if token >= self._config.vocab_size:
                raise TreeError(
                    f"tokens[{i}] = {token}; expected a token id 0..{self._config.vocab_size - 1}"
                )


class _Watched:
    """A trace around the caller's: read-only views, and `session.tracing` while it runs."""

    def __init__(self, session: ReferenceSession, trace: Trace) -> None:
        self._session = session
        self._trace = trace

    def __call__(self, stage: str, layer: int | None, array: np.ndarray, /) -> None:
        view = array.view()
        view.flags.writeable = False
        self._session.tracing = True
        try:
            self._trace(stage, layer, view)
        finally:
            self._session.tracing = False


def _check_limit(limit: EmitLimit) -> None:
    if not isinstance(limit, EmitLimit):
        raise InputError(f"limit is {type(limit).__name__}; expected an EmitLimit")


def _checked_positions(positions: np.ndarray, n: int) -> np.ndarray:
    where = host_array("positions", positions)
    if where.shape != (n,) or where.dtype.kind not in "iu":
        raise InputError(
            f"positions are {where.dtype} {list(where.shape)}; expected integers [{n}]"
        )
    bad = np.flatnonzero((where < 0) | (where > MAX_POSITION))
    if len(bad):
        raise InputError(f"positions[{bad[0]}] = {where[bad[0]]}; expected 0..{MAX_POSITION}")
    return where.astype(np.int64)


def _checked_mask(mask: np.ndarray, n: int, committed_len: int) -> np.ndarray:
    seen = host_array("mask", mask)
    if seen.shape != (n, committed_len + n) or seen.dtype != np.bool_:
        raise InputError(
            f"mask is {seen.dtype} {list(seen.shape)}; "
            f"expected bool [{n}, {committed_len + n}]: rows, committed_len + rows"
        )
    blind = np.flatnonzero(~seen[np.arange(n), committed_len + np.arange(n)])
    if len(blind):
        i = blind[0]
        raise InputError(
            f"mask[{i}, {committed_len + i}] is false; expected every row to see itself (MASK-1)"
        )
    return seen


def _check_path(nodes: tuple[int, ...], pending: _Pending) -> None:
    if nodes[-1] >= pending.n:
        raise InputError(
            f"path ends at node {nodes[-1]}, the forward had {pending.n} rows; "
            f"expected nodes 0..{pending.n - 1}"
        )
    if pending.tree is not None and nodes != path(pending.tree, nodes[-1]):
        raise InputError(
            f"path = {nodes}; expected the path to node {nodes[-1]}, "
            f"{path(pending.tree, nodes[-1])}"
        )
