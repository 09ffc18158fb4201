"""The NumPy float32 kernel set: the engine, and its gate, where there is no GPU."""

from __future__ import annotations

import math
import os

import numpy as np

from kdtr.contract import NumericProfile
from kdtr.engine import host_attention, host_best_first, host_dense, host_moe, host_tree
from kdtr.engine.paging import PagedCache, physical_rows


class HostKernels:
    """Each operation of `KernelSet`, by name, from the file of its subject.

    What is made of other operations calls the set's own: a set that changes `linear` changes
    every expert.
    """

    device = "cpu"
    # Not batch invariant: BLAS chooses its summation order by the number of rows.
    profile = NumericProfile(deterministic=True, batch_invariant=False)

    @staticmethod
    def upload(host: np.ndarray) -> np.ndarray:
        """A copy: the caller may reuse `host`."""
        return np.array(host)

    @staticmethod
    def to_host(array: np.ndarray) -> np.ndarray:
        """A copy: what the caller keeps does not change under it."""
        return np.array(array)

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

    build_best_first = staticmethod(host_best_first.build_best_first)
    tree_layout = staticmethod(host_tree.tree_layout)
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
