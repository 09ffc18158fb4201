"""The seam between the session and whatever computes: the operations of one device.

Everything between `upload` and `to_host` stays on the device: arrays are opaque to the session
except for reshapes and slices. Every operation writes a new array unless it says otherwise, and
no result's shape depends on values, so that a round can be captured as one graph: `accept_walk`
fills a path of fixed length and says how much of it counts. (`build_best_first`, which ends on
the host and before a round, is the exception.) Python numbers are
arguments of the launch; those that change from round to round (`committed_len`, `n_slots`) are
what a captured graph reads from a buffer that the set updates before each replay.

Letters: n rows (nodes of a tree, tokens of a prefill), s slots 0..L+n-1, h heads, d nope, r rope,
c latent, v value, m hidden, w vocabulary, i inner width of an MLP, e experts, k chosen experts,
l layers. Floats are float32 and integers int64 on the host, and hold only numbers of the dtypes
that the set's profile declares. Operands may be strided views; a launcher that cannot take one
copies it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kdtr.contract import Array, ModelConfig, NumericProfile

if TYPE_CHECKING:
    from kdtr.engine.paging import PagedCache


@dataclass(frozen=True, slots=True)
class Visibility:
    """What each row may attend to: an open prefix and a block (MASK-1, MASK-2).

    open_len  slots 0..open_len-1 are visible to every row; their tiles need no mask
    block     [n, s - open_len] bool: block[i, j] says whether row i sees slot open_len + j

    A tree and a prefill are open up to L, with the ancestors or the causal triangle as [n, n]
    block; an arbitrary mask is a block with open_len 0.
    """

    open_len: int
    block: Array

    @property
    def n_slots(self) -> int:
        """s: slots that this forward may read."""
        return self.open_len + int(self.block.shape[1])


class Walk(NamedTuple):
    """What `accept_walk` leaves on the device.

    path        [n]  node ids, root first; -1 from accept_len on
    accept_len  [1]  nodes that count
    bonus       [1]  the next root (ACC-2), after the limit (ACC-4)
    """

    path: Array
    accept_len: Array
    bonus: Array


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

    # Memory

    def upload(self, host: np.ndarray) -> Array:
        """The values on the device, dtype kept; the caller may reuse `host` afterwards."""
        ...

    def to_host(self, array: Array) -> np.ndarray:
        """A copy on the host; waits for the work that computes it."""
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

    def tree_layout(self, parents: Array, committed_len: int) -> tuple[Array, Array]:
        """parents [n] -> positions [n] (POS-1), ancestors [n, n] bool, self included (MASK-2)."""
        ...

    # Dense

    def embed(self, table: Array, tokens: Array) -> Array:
        """table [w, m], tokens [n] -> [n, m]."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        """x [n, i], weight [i] -> x / sqrt(mean(x^2) + eps) * weight [n, i]."""
        ...

    def linear(self, x: Array, weight: Array) -> Array:
        """x [n, i], weight [o, i] -> [n, o]."""
        ...

    def add(self, residual: Array, delta: Array) -> Array:
        """[n, m] + [n, m] -> [n, m]."""
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

    def rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        """x [n, h, r] -> [n, h, r], both half-split: pairs are (i, i + r/2) (MLA-7)."""
        ...

    def append_latents(
        self, cache: PagedCache, layer: int, slots: Array, c_kv: Array, k_pe: Array
    ) -> None:
        """In place: row i = (c_kv[i], k_pe[i]) to logical slot slots[i] of a layer (SLOT-1).

        slots [n], c_kv [n, c], k_pe [n, r]
        """
        ...

    def absorb_query(self, q_nope: Array, w_kc: Array) -> Array:
        """q_nope [n, h, d], w_kc [h, d, c] -> the query in latent space [n, h, c] (MLA-3)."""
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
        scores [n, h, s], filled with -inf by the caller, receives the scaled scores where
        visible; None outside of traces.
        """
        ...

    def unabsorb_value(self, out_latent: Array, w_vc: Array) -> Array:
        """out_latent [n, h, c], w_vc [h, c, v] -> the heads' outputs [n, h v] (MLA-3)."""
        ...

    # Experts

    def router_scores(self, x: Array, gate: Array, scoring_func: str) -> Array:
        """x [n, m], gate [e, m] -> sigmoid or softmax of x gate^T [n, e], float32 (MOE-1)."""
        ...

    def choose_experts(
        self, scores: Array, correction_bias: Array, config: ModelConfig
    ) -> tuple[Array, Array]:
        """scores [n, e], correction_bias [e] -> ids [n, k] ascending, weights [n, k] (MOE-2, 3)."""
        ...

    def experts(
        self, x: Array, expert_ids: Array, expert_weights: Array, gate_up: Array, down: Array
    ) -> Array:
        """Sum over k of weight times the expert's SwiGLU, in the order of expert_ids -> [n, m].

        x [n, m], expert_ids [n, k], expert_weights [n, k], gate_up [e, 2i, m], down [e, m, i]
        """
        ...

    # Decisions

    def argmax(self, logits: Array) -> Array:
        """logits [n, w] -> targets [n], the lowest id among equal top logits (ACC-1)."""
        ...

    def accept_walk(
        self, tokens: Array, parents: Array, targets: Array, stop_tokens: Array, max_emitted: int
    ) -> Walk:
        """The greedy walk, cut where the round stops emitting (ACC-1, ACC-2, ACC-4).

        tokens [n], parents [n], targets [n], stop_tokens [any number], max_emitted >= 1
        """
        ...

    def commit_rows(
        self, cache: PagedCache, path: Array, accept_len: Array, committed_len: int
    ) -> Array:
        """In place, in every layer: slot L + path[k] -> slot L + k for k < accept_len (COMMIT-1).

        path [n] strictly increasing, root first; accept_len [1].
        Returns the moves [n, 2] (source slot, destination slot); rows from accept_len on are -1.
        """
        ...

    def read_rows(self, cache: PagedCache, n_slots: int) -> np.ndarray:
        """Slots 0..n_slots-1 of every layer on the host, in slot order: [l, n_slots, c + r]."""
        ...
