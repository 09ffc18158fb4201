"""The NumPy float32 kernel set: the engine, and its gate, where there is no GPU."""

from __future__ import annotations

import math
import os

import numpy as np

from kdtr.contract import ModelConfig, NumericProfile
from kdtr.engine import host_attention, host_best_first, host_dense, host_moe, host_tree
from kdtr.engine.host_launcher import HostLauncher
from kdtr.engine.kernel_set import Latents, Routed, Rows
from kdtr.engine.paging import PagedCache, physical_rows
from kdtr.engine.weights import MoeWeights


class HostKernels:
    """Each operation of `KernelSet`, by name, from the file of its subject.

    Some are made of finer operations, offered here beside them: a device fuses those, and here
    each can be rounded, shuffled or observed by itself. What is made of other operations calls the
    set's own: a set that changes `linear` changes every expert.
    """

    device = "cpu"
    # Not batch invariant: BLAS chooses its summation order by the number of rows.
    profile = NumericProfile(deterministic=True, batch_invariant=False)

    @staticmethod
    def upload(host: np.ndarray) -> np.ndarray:
        """A copy: the caller may reuse `host`."""
        return np.array(host)

    @staticmethod
    def device_int(value: int) -> int:
        return value

    def upload_weight(self, host: np.ndarray) -> np.ndarray:
        """A copy: float32 is how the host stores numbers of any dtype."""
        return self.upload(host)

    @staticmethod
    def overwrite(array: np.ndarray, host: np.ndarray) -> None:
        """In place: a copy of the values."""
        array[:] = host

    @staticmethod
    def to_host(array: np.ndarray) -> np.ndarray:
        """A copy: what the caller keeps does not change under it."""
        return np.array(array)

    @staticmethod
    def all_to_host(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Copies, likewise."""
        return tuple(np.array(array) for array in arrays)

    @staticmethod
    def new_rows(n_layers: int, n_rows: int, row_len: int) -> np.ndarray:
        """[n_layers, n_rows, row_len] float32; memory is touched when a page is handed out."""
        if n_layers * n_rows * row_len * 4 > _memory_bytes():  # not refused by every system
            raise MemoryError
        return np.empty((n_layers, n_rows, row_len), np.float32)

    @staticmethod
    def poison_rows(rows: np.ndarray, first: int, count: int) -> None:
        """In place: NaN into rows [:, first:first+count]."""
        rows[:, first : first + count] = np.nan

    @staticmethod
    def read_rows(cache: PagedCache, n_slots: int) -> np.ndarray:
        """Slots 0..n_slots-1 of every layer: [l, n_slots, c + r]."""
        rows = physical_rows(cache.page_table, cache.page_size, np.arange(n_slots))
        return np.asarray(cache.rows[:, rows])

    @staticmethod
    def check_model(config: ModelConfig) -> None:
        """Any sizes will do."""

    @staticmethod
    def check_tree(n_nodes: int) -> None:
        """Any number of nodes will do."""

    @staticmethod
    def check_row_count(verb: str, n_rows: int, config: ModelConfig) -> None:
        """Any number of rows will do."""

    def launcher(self, cache: PagedCache, config: ModelConfig) -> HostLauncher:
        """The same for all: what is launched here runs at once."""
        return HostLauncher(self)

    def over(self, rows: Rows) -> HostKernels:
        """The set itself: without padding every row counts."""
        return self

    @staticmethod
    def mask_block(mask: np.ndarray) -> np.ndarray:
        """mask [n, any] bool, a copy."""
        return np.array(mask)

    build_best_first = staticmethod(host_best_first.build_best_first)
    tree_layout = staticmethod(host_tree.tree_layout)
    causal_layout = staticmethod(host_tree.causal_layout)
    full_mask = staticmethod(host_attention.full_mask)
    new_scores = staticmethod(host_attention.new_scores)
    embed = staticmethod(host_dense.embed)
    rms_norm = staticmethod(host_dense.rms_norm)
    linear = staticmethod(host_dense.linear)
    add = staticmethod(host_dense.add)
    silu_mul = staticmethod(host_dense.silu_mul)
    rotary_angles = staticmethod(host_attention.rotary_angles)
    rotate = staticmethod(host_attention.rotate)
    append_latents = staticmethod(host_attention.append_latents)
    absorb_query = staticmethod(host_attention.absorb_query)
    verify_attn = staticmethod(host_attention.verify_attn)
    unabsorb_value = staticmethod(host_attention.unabsorb_value)
    router_scores = staticmethod(host_moe.router_scores)
    choose_experts = staticmethod(host_moe.choose_experts)
    argmax = staticmethod(host_dense.argmax)
    accept_walk = staticmethod(host_tree.accept_walk)
    commit_rows = staticmethod(host_tree.commit_rows)

    def add_norm(
        self, residual: np.ndarray, delta: np.ndarray, weight: np.ndarray, eps: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """[n, m] + [n, m] -> the sum [n, m] and its norm [n, m]."""
        total = self.add(residual, delta)
        return total, self.rms_norm(total, weight, eps)

    def append_normed(
        self,
        cache: PagedCache,
        layer: int,
        slots: np.ndarray,
        projected: np.ndarray,
        q_norm: np.ndarray | None,
        kv_norm: np.ndarray,
        eps: float,
        cos: np.ndarray,
        sin: np.ndarray,
    ) -> Latents:
        """projected [n, q + c + r] -> q_a [n, q], c_kv [n, c], k_pe [n, r], the last two cached."""
        q, c = 0 if q_norm is None else len(q_norm), len(kv_norm)
        q_a = None if q_norm is None else self.rms_norm(projected[:, :q], q_norm, eps)
        c_kv = self.rms_norm(projected[:, q : q + c], kv_norm, eps)
        k_pe = self.rotate(projected[:, None, q + c :], cos, sin)[:, 0]  # one head for all
        self.append_latents(cache, layer, slots, c_kv, k_pe)
        return Latents(q_a, c_kv, k_pe)

    def latent_query(
        self, q: np.ndarray, w_kc: np.ndarray, cos: np.ndarray, sin: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """q [n, h, d + r], w_kc [h, c, d] -> [n, h, c], [n, h, r]."""
        d = w_kc.shape[-1]
        return self.absorb_query(q[..., :d], w_kc), self.rotate(q[..., d:], cos, sin)

    def route(
        self, x: np.ndarray, gate: np.ndarray, correction_bias: np.ndarray, config: ModelConfig
    ) -> Routed:
        """x [n, m] -> scores [n, e], ids and weights [n, k]."""
        scores = self.router_scores(x, gate, config.scoring_func)
        return Routed(scores, *self.choose_experts(scores, correction_bias, config))

    def moe(self, x: np.ndarray, routed: Routed, weights: MoeWeights) -> np.ndarray:
        """x [n, m] -> [n, m]."""
        out = self.experts(x, routed.ids, routed.weights, weights.gate_up, weights.down)
        if weights.shared is None:
            return out
        return self.add(out, self.swiglu(x, weights.shared.gate_up, weights.shared.down))

    def swiglu(self, x: np.ndarray, gate_up: np.ndarray, down: np.ndarray) -> np.ndarray:
        """x [n, m], gate_up [2i, m], down [m, i] -> [n, m] (MOE-4)."""
        return self.linear(self.silu_mul(self.linear(x, gate_up)), down)

    def experts(
        self,
        x: np.ndarray,
        expert_ids: np.ndarray,
        expert_weights: np.ndarray,
        gate_up: np.ndarray,
        down: np.ndarray,
    ) -> np.ndarray:
        """x [n, m], expert_ids and expert_weights [n, k] -> [n, m]."""
        return host_moe.experts(x, expert_ids, expert_weights, gate_up, down, self.swiglu)


def _memory_bytes() -> float:
    """Of this machine; inf where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, OSError, ValueError):
        return math.inf
