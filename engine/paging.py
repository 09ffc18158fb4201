"""The paged latent cache: logical slots on physical pages, and the refusal when they run out.

A row holds c_kv | k_pe, side by side, so that nothing can move one without the other. Slot t lies
in physical row page_table[t // page_size] * page_size + t % page_size, in every layer alike.
Pages are handed out from the last to the first: two logical neighbours are never physical
neighbours in rising order, so arithmetic that runs over the end of a page reads or writes
somewhere visibly else. A page is NaN when it is handed out.
"""

from __future__ import annotations

import numpy as np

from kdtr.contract import Array, CacheError, ModelConfig
from kdtr.engine.kernel_set import KernelSet

_UNMAPPED = -1


class PagedCache:
    """One session's rows in every layer, and which physical page holds which slots.

    page_size  slots per page
    capacity   slots the session may use; the last page may be larger than what is left of it
    latent_len c: leading elements of a row that are c_kv, the rest is k_pe
    """

    def __init__(
        self, kernels: KernelSet, config: ModelConfig, *, capacity: int, page_size: int
    ) -> None:
        page_size = min(page_size, capacity)  # one page is enough, and need not be larger
        n_pages = -(-capacity // page_size)
        row_len = config.kv_lora_rank + config.qk_rope_head_dim
        self.latent_len = config.kv_lora_rank
        self.page_size = page_size
        self.capacity = capacity
        self.rows: Array = kernels.new_rows(  # [l, n_pages * page_size, c + r]
            config.num_hidden_layers, n_pages * page_size, row_len
        )
        self._kernels = kernels
        self._host_table = np.full(n_pages, _UNMAPPED, np.int64)
        self._n_mapped = 0  # pages
        # A graph has captured its address: it is overwritten, never replaced.
        self.page_table: Array = kernels.upload(self._host_table)  # [n_pages]

    def check_room(self, verb: str, committed_len: int, n_rows: int) -> None:
        """Refuse n_rows at committed_len when they need more than the capacity (SLOT-3)."""
        needed = committed_len + n_rows
        if needed > self.capacity:
            raise CacheError(
                f"{verb} of {n_rows} rows at committed_len {committed_len} needs {needed} slots, "
                f"the session has {self.capacity}; open it with max_len >= {needed}"
            )

    def map_slots(self, n_slots: int) -> None:
        """Give slots 0..n_slots-1 their pages; those that have one keep it."""
        wanted = -(-n_slots // self.page_size)
        if wanted <= self._n_mapped:
            return
        for logical in range(self._n_mapped, wanted):
            physical = len(self._host_table) - 1 - logical
            self._host_table[logical] = physical
            self._kernels.poison_rows(self.rows, physical * self.page_size, self.page_size)
        self._kernels.overwrite(self.page_table, self._host_table)
        self._n_mapped = wanted  # last: what is interrupted before is done again

    def unmap_all(self) -> None:
        """Take every page back; what they hold is unreadable from here on."""
        self._host_table[:] = _UNMAPPED
        self._n_mapped = 0
        self._kernels.overwrite(self.page_table, self._host_table)

    def release(self) -> None:
        """Give the memory back; the cache is of no use afterwards."""
        self.unmap_all()
        self.rows = self._kernels.new_rows(0, 0, 0)


def physical_rows(page_table: np.ndarray, page_size: int, slots: np.ndarray) -> np.ndarray:
    """Rows of the physical cache that hold these logical slots (any shape), on the host."""
    pages: np.ndarray = page_table[slots // page_size]
    assert np.all(pages != _UNMAPPED), "a slot without a page was addressed"
    rows: np.ndarray = pages * page_size + slots % page_size
    return rows
