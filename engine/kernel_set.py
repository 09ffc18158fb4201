"""The seam between the session and whatever computes: the operations of one device.

Everything between `upload` and `to_host` (`all_to_host`) stays on the device: arrays are opaque to
the session except for reshapes and slices. Every operation writes a new array unless it says
otherwise, and no result's shape depends on values, so that a round can be captured as one graph:
`accept_walk` fills a path of fixed length and says how much of it counts. (`build_best_first`,
which ends on the host and before a round, is the exception.) Python numbers are arguments of the
launch and are baked into a captured graph; what changes from round to round is a `DeviceInt`, which
a graph reads anew, and reaches the device through `Launcher.stage` alone.

The operations are as coarse as a device's kernels: what lies between two of them crosses memory.
The host set makes them of finer ones, which it also offers (`host_kernels.py`).

Letters: n rows launched (nodes of a tree, tokens of a prefill, and padding), s slots 0..L+n-1,
h heads, d nope, r rope, c latent, v value, q query latent, m hidden, w vocabulary, i inner width
of an MLP, e experts, k chosen experts, l layers. Floats are float32 and integers int64 on the host,
and hold only numbers of the dtypes that the set's profile declares. Operands may be strided views;
a launcher that cannot take one copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np

from kdtr.contract import Array, ModelConfig, NumericProfile, Trace

if TYPE_CHECKING:
    from kdtr.engine.paging import PagedCache
    from kdtr.engine.weights import MoeWeights

# An int on the host; on a device an array [1], read when a kernel runs and not when it is captured.
DeviceInt: TypeAlias = Any

T = TypeVar("T")


class Rows(NamedTuple):
    """The rows of one forward, where the kernels read them (`Launcher.stage`).

    n              rows launched; rows count..n-1 are padding (PAD-1)
    count          rows that count
    committed_len  L
    n_slots        L + count: what the forward may read
    max_slots      an upper bound of L + count, which fixes the shape of what is launched
    tokens         [n]  ids; those of padding are valid ids, and nothing depends on them
    slots          [n]  logical slot of each row; -1 for padding
    parents        [n]  of a tree, -1 for the root and for padding; None: not a tree
    stop_tokens    [any number]  -1 where there are fewer
    max_emitted    at least 1
    """

    n: int
    count: DeviceInt
    committed_len: DeviceInt
    n_slots: DeviceInt
    max_slots: int
    tokens: Array
    slots: Array
    parents: Array | None
    stop_tokens: Array
    max_emitted: DeviceInt


@dataclass(frozen=True, slots=True)
class Visibility:
    """What each row may attend to: an open prefix and a block (MASK-1, MASK-2).

    open_len  slots 0..open_len-1 are visible to every row; their tiles need no mask
    block     whether row i sees slot open_len + j; on the host [n, s - open_len] bool

    A tree and a prefill are open up to L, with the ancestors or the causal triangle as [n, n]
    block; an arbitrary mask is a block with open_len 0.
    """

    open_len: DeviceInt
    block: Array

    @property
    def n_slots(self) -> int:
        """s on the host: slots that this forward may read."""
        return int(self.open_len) + int(self.block.shape[1])


class Walk(NamedTuple):
    """What `accept_walk` leaves on the device.

    path        [n]  node ids, root first; -1 from accept_len on
    accept_len  [1]  nodes that count
    bonus       [1]  the next root (ACC-2), after the limit (ACC-4)
    """

    path: Array
    accept_len: Array
    bonus: Array


class Latents(NamedTuple):
    """What `append_normed` makes of a row's projection (MLA-1, MLA-2).

    q_a   [n, q]  normed query latent; None without q_lora_rank
    c_kv  [n, c]  normed
    k_pe  [n, r]  rotated, half-split
    """

    q_a: Array | None
    c_kv: Array
    k_pe: Array


class Routed(NamedTuple):
    """What the router decides (MOE-1 to MOE-3).

    scores   [n, e] float32, unbiased
    ids      [n, k] ascending
    weights  [n, k] float32
    groups   the same choice listed by expert, for a set whose `moe` wants it so
    """

    scores: Array
    ids: Array
    weights: Array
    groups: Array | None = None


class Launcher(Protocol):
    """What one session launches its forwards through: fixed places for what changes, and graphs."""

    def stage(
        self,
        committed_len: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        max_emitted: int = 1,
    ) -> Rows:
        """Put what this forward needs where its kernels read it; pads a tree to its bucket."""
        ...

    def run(self, name: str, rows: Rows, program: Callable[[Trace], T], trace: Trace) -> T:
        """The program's result on the device, and its trace without padding.

        name  which program it is; of a tree's programs a launcher may capture each once per shape
              of `rows` and replay it, so a program has no effect but through kernels
        """
        ...

    def close(self) -> None:
        """Give graphs and buffers back."""
        ...


class KernelSet(Protocol):
    """One device's operations, in the order in which a round uses them."""

    @property
    def device(self) -> str:
        """Where it computes, in words."""
        ...

    @property
    def profile(self) -> NumericProfile:
        """The precisions it stores and sums in, and what it repeats bit for bit (NUM-3, NUM-4)."""
        ...

    def check_model(self, config: ModelConfig) -> None:
        """Raises UnsupportedError for sizes that the kernels cannot compute with."""
        ...

    def check_tree(self, n_nodes: int) -> None:
        """Raises TreeError for more nodes than the kernels can lay out."""
        ...

    def check_row_count(self, verb: str, n_rows: int, config: ModelConfig) -> None:
        """Raises InputError for more rows of a forward than the kernels can be launched for."""
        ...

    def launcher(self, cache: PagedCache, config: ModelConfig) -> Launcher:
        """A session's own, for forwards of a model of this configuration over this cache."""
        ...

    def over(self, rows: Rows) -> KernelSet:
        """The same operations for a forward over these rows."""
        ...

    # Memory

    def upload(self, host: np.ndarray) -> Array:
        """The values on the device, dtype kept; the caller may reuse `host` afterwards."""
        ...

    def device_int(self, value: int) -> DeviceInt:
        """One number, for an operation that no graph replays."""
        ...

    def upload_weight(self, host: np.ndarray) -> Array:
        """A float32 array of numbers of the profile's weight dtype, stored in that dtype."""
        ...

    def overwrite(self, array: Array, host: np.ndarray) -> None:
        """In place: the same values on the device, at the address that a graph has captured."""
        ...

    def to_host(self, array: Array) -> np.ndarray:
        """A copy on the host; waits for the work that computes it."""
        ...

    def all_to_host(self, *arrays: Array) -> tuple[np.ndarray, ...]:
        """A copy of each, for one wait: of a few small arrays that end a program."""
        ...

    def new_rows(self, n_layers: int, n_rows: int, row_len: int) -> Array:
        """[n_layers, n_rows, row_len]: a session's physical cache rows, contents undefined."""
        ...

    def poison_rows(self, rows: Array, first: int, count: int) -> None:
        """In place: NaN into rows [:, first:first+count], so that reading one unwritten shows."""
        ...

    # Tree

    def build_best_first(
        self, draft_logits: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The `budget` most probable prefixes (TREE-3, TREE-4).

        draft_logits [depth, w] float64 on the host, without NaN and +inf; depth 0 is allowed.
        Returns parents [n] and tokens [n], node 0 the root with parent -1 and token -1.
        """
        ...

    def tree_layout(self, parents: Array, committed_len: DeviceInt) -> tuple[Array, Array]:
        """parents [n] -> positions [n] (POS-1), ancestors, self included (MASK-2).

        ancestors is a block of `Visibility`, as are the next two's.
        """
        ...

    def causal_layout(self, n: int, committed_len: DeviceInt) -> tuple[Array, Array]:
        """positions [n] from L on, and who comes no later (FWD-1)."""
        ...

    def mask_block(self, mask: np.ndarray) -> Array:
        """mask [n, any] bool on the host -> the block of any mask."""
        ...

    def full_mask(self, visibility: Visibility) -> Array:
        """[n, s] bool: the open prefix beside the block that the attention consults."""
        ...

    # Dense

    def embed(self, table: Array, tokens: Array) -> Array:
        """table [w, m], tokens [n] -> [n, m]."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [n, i], weight [i] -> x / sqrt(mean(x^2) + eps) * weight [n, i]."""
        ...

    def add_norm(
        self, residual: Array, delta: Array, weight: Array, eps: float
    ) -> tuple[Array, Array]:
        """[n, m] + [n, m] -> the sum [n, m] and its norm [n, m]."""
        ...

    def linear(self, x: Array, weight: Array) -> Array:
        """x [n, i], weight [o, i] -> [n, o]."""
        ...

    def swiglu(self, x: Array, gate_up: Array, down: Array) -> Array:
        """x [n, m], gate_up [2i, m], down [m, i] -> down(silu(gate x) * up x) [n, m] (MOE-4)."""
        ...

    # Attention

    def rotary_angles(
        self, positions: Array, inverse_frequencies: Array, factor: float
    ) -> tuple[Array, Array]:
        """cos, sin [n, r/2] of float64 angles, times factor, then rounded once (MLA-5).

        positions [n], inverse_frequencies [r/2] float64
        """
        ...

    def append_normed(
        self,
        cache: PagedCache,
        layer: int,
        slots: Array,
        projected: Array,
        q_norm: Array | None,
        kv_norm: Array,
        eps: float,
        cos: Array,
        sin: Array,
    ) -> Latents:
        """Norms and rotates projected [n, q + c + r], q = 0 without q_norm (MLA-1, MLA-2, NORM-1).

        In place: row i = (c_kv[i], k_pe[i]) to logical slot slots[i] of a layer (SLOT-1).
        slots [n], q_norm [q], kv_norm [c], cos and sin [n, r/2]
        """
        ...

    def latent_query(self, q: Array, w_kc: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """The absorbed and the rotated part of q [n, h, d + r]: [n, h, c], [n, h, r] (MLA-3).

        w_kc [h, c, d], cos and sin [n, r/2]; pairs are (i, i + r/2) (MLA-7)
        """
        ...

    def verify_attn(
        self,
        cache: PagedCache,
        layer: int,
        q_latent: Array,
        q_pe: Array,
        visibility: Visibility,
        scale: float,
        split_size: int,
        scores: Array | None = None,
    ) -> Array:
        """softmax(scale (q_latent . c_kv + q_pe . k_pe)) c_kv over visible slots (MLA-3, MASK-3).

        q_latent [n, h, c], q_pe [n, h, r] -> out_latent [n, h, c]
        Keys are taken split_size slots at a time; the splits' partial results merge in a fixed
        order (NUM-4). A slot that a row does not see is not read for that row.
        scores [n, h, s] of `new_scores` receives the scaled scores where visible; None outside of
        traces.
        """
        ...

    def new_scores(self, n: int, n_heads: int, visibility: Visibility) -> Array:
        """[n, h, s] float32, all -inf."""
        ...

    def unabsorb_value(self, out_latent: Array, w_vc: Array) -> Array:
        """out_latent [n, h, c], w_vc [h, v, c] -> the heads' outputs [n, h v] (MLA-3)."""
        ...

    # Experts

    def route(self, x: Array, gate: Array, correction_bias: Array, config: ModelConfig) -> Routed:
        """x [n, m], gate [e, m], correction_bias [e] -> scores and the choice (MOE-1 to MOE-3)."""
        ...

    def moe(self, x: Array, routed: Routed, weights: MoeWeights) -> Array:
        """Weighted sum of the chosen experts' SwiGLUs in the order of ids, plus the shared (MOE-4).

        x [n, m] -> [n, m]
        """
        ...

    # Decisions

    def argmax(self, logits: Array) -> Array:
        """logits [n, w] -> targets [n], the lowest id among equal top logits (ACC-1)."""
        ...

    def accept_walk(
        self,
        tokens: Array,
        parents: Array,
        targets: Array,
        stop_tokens: Array,
        max_emitted: DeviceInt,
    ) -> Walk:
        """The greedy walk, cut where the round stops emitting (ACC-1, ACC-2, ACC-4).

        tokens [n], parents [n], targets [n], stop_tokens [any number], max_emitted >= 1
        """
        ...

    def commit_rows(
        self, cache: PagedCache, path: Array, accept_len: Array, committed_len: DeviceInt
    ) -> Array:
        """In place, in every layer: slot L + path[k] -> slot L + k for k < accept_len (COMMIT-1).

        path [n] strictly increasing, root first; accept_len [1].
        Returns the moves [n, 2] (source slot, destination slot); rows from accept_len on are -1.
        """
        ...

    def read_rows(self, cache: PagedCache, n_slots: int) -> np.ndarray:
        """Slots 0..n_slots-1 of every layer on the host, in slot order: [l, n_slots, c + r]."""
        ...
