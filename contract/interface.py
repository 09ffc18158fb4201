"""The interface that the reference and every engine implement.

A factory is `make_engine(**options) -> Engine`, named `package.module:function` or registered
as an entry point of the group `kdtr.engines`. A verb that an engine does not offer is absent
from `EngineInfo.verbs` and is reported as unsupported; it is never passed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kdtr.contract.config import ModelConfig
from kdtr.contract.tree import NO_LIMIT, Acceptance, DraftTree, EmitLimit, Round, Verified

if TYPE_CHECKING:
    import numpy as np

# The largest position that forward_tokens takes: positions are int32 on a device.
MAX_POSITION = 2**31 - 1

# Anything with __array__ or __dlpack__: integers of any width, bool or 0 and 1 for a mask, float64,
# float32, float16, bfloat16 or float8 for numbers; nothing masked. It is valid until the next call
# on the session that returned it; whoever keeps it copies it at once.
Array: TypeAlias = Any

# What Engine.load takes: a Hugging Face directory, a .kdtr file with weights, or the parsed
# configuration with the checkpoint's tensors by name.
ModelSource: TypeAlias = "str | os.PathLike[str] | tuple[ModelConfig, Mapping[str, np.ndarray]]"

VERBS: tuple[str, ...] = (
    "set_root",
    "forward_tokens",
    "prefill",
    "decode",
    "build",
    "verify",
    "accept",
    "commit",
    "round",
    "snapshot",
    "reset",
    "verify_batch",
    "commit_batch",
)


class Trace(Protocol):
    """Receives stages (`contract/stages.py`): called by a session as it computes.

    stage  a name of STAGES
    layer  the layer's number, or None for a stage that is not per layer
    array  the values, with the stage's axes; the receiver copies it before it returns

    Calls may come in any order, each stage once per forward, and all before the verb returns: an
    engine that computes on a device waits when it is given a trace.
    """

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None: ...


def SILENT(stage: str, layer: int | None, array: Array, /) -> None:
    """The trace that drops everything; engines may skip the work of observing when given it."""


@dataclass(frozen=True, slots=True)
class NumericProfile:
    """The precision an engine declares, as NumPy dtype names; bounds are derived from it (NUM-3).

    weights, activations, latents (the cache), scores, logits: storage
    accumulation: the dtype in which products are summed
    deterministic: the same call gives the same bits (NUM-4)
    batch_invariant: a row's bits do not depend on the other rows (NUM-4)
    """

    weights: str = "float32"
    activations: str = "float32"
    latents: str = "float32"
    scores: str = "float32"
    logits: str = "float32"
    accumulation: str = "float32"
    deterministic: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of itself.

    device       where it computes, in words: "cpu", "NVIDIA H200"
    verbs        the verbs it offers, of VERBS
    stages       the stages its trace shows, of STAGES
    conventions  declared differences by name, for example {"latent_norm_eps": "1e-5"}
    """

    name: str
    version: str
    device: str
    profile: NumericProfile
    verbs: frozenset[str]
    stages: frozenset[str] = frozenset()
    conventions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LogicalCache:
    """The committed rows in token order, on the host, whatever the engine's own layout.

    tokens     [t]        ids
    positions  [t]        what the rotary embedding used
    c_kv       [l, t, c]  normed latents
    k_pe       [l, t, r]  rotated keys, half-split (MLA-7)
    """

    tokens: np.ndarray
    positions: np.ndarray
    c_kv: np.ndarray
    k_pe: np.ndarray


class Session(Protocol):
    """One sequence: committed rows 0..committed_len-1 and the root at position committed_len.

    Every verb checks its input before it changes anything and raises a KdtrError of its own
    class: TreeError, InputError, CacheError (SLOT-3), SessionError (COMMIT-5, no root, closed).
    A bool is no integer, and an integer is no floating-point number.
    """

    @property
    def committed_len(self) -> int:
        """L: tokens whose rows are in the cache."""
        ...

    @property
    def root(self) -> int | None:
        """The decided token at position L that is not yet cached; None before the first."""
        ...

    def set_root(self, token: int) -> None:
        """Replace the root, at any L, 0 included (FWD-3). An uncommitted verify is forgotten."""
        ...

    def forward_tokens(
        self, tokens: Sequence[int], positions: Array, mask: Array, *, trace: Trace = SILENT
    ) -> Array:
        """The one forward: M rows against the cache, written to slots L..L+M-1; L stays.

        tokens [M] ids; positions [M] integers 0..MAX_POSITION; mask [M, L+M] bool, true where
        visible; every row sees at least itself (MASK-1). Returns logits [M, w].
        """
        ...

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        """Append exactly these tokens and return the new root (FWD-1, FWD-6); again for chunks."""
        ...

    def decode(self, *, trace: Trace = SILENT) -> int:
        """One autoregressive round: the root-only tree, committed; returns the new root (FWD-2)."""
        ...

    def build(self, draft_logits: Array, budget: int) -> DraftTree:
        """The best-first tree under the session's root (TREE-3).

        draft_logits [depth, w] floating-point numbers; budget an integer >= 0, whose tree fits:
        CacheError when committed_len + budget + 1 exceeds max_len (SLOT-3), whatever it would hold
        """
        ...

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        """One forward over the tree; committed rows and L stay as they are (SLOT-2)."""
        ...

    def accept(
        self, tree: DraftTree, targets: Sequence[int] | None = None, *, limit: EmitLimit = NO_LIMIT
    ) -> Acceptance:
        """The greedy walk over targets [n] (ACC-1..4); None: those of the latest verify."""
        ...

    def commit(self, acceptance: Acceptance) -> None:
        """Compact the accepted path of the latest verify or forward, once (COMMIT-1..5)."""
        ...

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        """Verify, accept and commit as shipped: the fused path, if the engine has one."""
        ...

    def snapshot(self) -> LogicalCache:
        """A copy of the committed rows on the host."""
        ...

    def reset(self) -> None:
        """Back to an empty cache and no root."""
        ...

    def close(self) -> None:
        """Give the session's memory back; every later verb raises SessionError."""
        ...


class Model(Protocol):
    """Loaded weights; opens sessions."""

    @property
    def config(self) -> ModelConfig: ...

    def open(self, *, max_len: int) -> Session:
        """A session with max_len slots; L + M <= max_len at all times (SLOT-3)."""
        ...

    def close(self) -> None:
        """Give the weights' memory back."""
        ...


class BatchModel(Model, Protocol):
    """A model that verifies several sessions in one forward; declared by the *_batch verbs."""

    def verify_batch(
        self,
        sessions: Sequence[Session],
        trees: Sequence[DraftTree],
        *,
        traces: Sequence[Trace] | None = None,
    ) -> list[Verified]: ...

    def commit_batch(
        self, sessions: Sequence[Session], acceptances: Sequence[Acceptance]
    ) -> None: ...


class Engine(Protocol):
    """What a factory returns."""

    @property
    def info(self) -> EngineInfo: ...

    def load(self, source: ModelSource) -> Model:
        """Read weights once. Raises ConfigError, CheckpointError, BundleError, UnsupportedError."""
        ...
