"""Trees on a CUDA device: building one, its layout, the walk over it; tree.cu, best_first.cu."""

from __future__ import annotations

import numpy as np

from kdtr.contract import Array
from kdtr.engine.cuda_device import BLOCK, i64, launching
from kdtr.engine.cuda_storage import StorageOperations
from kdtr.engine.kernel_set import DeviceInt, Visibility, Walk


class TreeOperations(StorageOperations):
    """The part of a `KernelSet` that knows parents, ancestors and paths."""

    @launching
    def build_best_first(
        self, draft_logits: np.ndarray, budget: int
    ) -> tuple[np.ndarray, np.ndarray]:
        depths, w = draft_logits.shape
        k = min(budget, w)
        if depths == 0 or k == 0:
            return np.array([-1]), np.array([-1])
        logits = self.upload(np.asarray(draft_logits, np.float64))
        tokens = self._empty((depths, k), np.int32)
        log_probs = self._empty((depths, k), np.float64)
        self._launch(
            "best_first", "rank_tokens", (depths, 1, 1), 256, logits, w, k, tokens, log_probs
        )
        prefixes = self._empty((2 * budget + 1, 32), np.uint8)  # sizeof(Prefix)
        paths = self._empty((budget + 1, depths), np.int32)
        parents, nodes = (self._empty((budget + 1,), np.int64) for _ in range(2))
        n_nodes = self._empty((1,), np.int64)
        self._launch(
            "best_first",
            "grow_tree",
            (1, 1, 1),
            32,
            *(tokens, log_probs, depths, k, budget, prefixes, paths, parents, nodes, n_nodes),
        )
        count, all_parents, all_nodes = self.all_to_host(n_nodes, parents, nodes)
        n = int(count[0])
        return all_parents[:n], all_nodes[:n]

    @launching
    def tree_layout(self, parents: Array, committed_len: DeviceInt) -> tuple[Array, Array]:
        n = len(parents)
        positions, bits = self._layout(n)
        self._launch(
            "tree",
            "tree_layout",
            (-(-n // 128), 1, 1),
            128,
            *(parents, committed_len, positions, bits, n, bits.shape[1]),
            shared=4 * n,
        )
        return positions, bits

    @launching
    def causal_layout(self, n: int, committed_len: DeviceInt) -> tuple[Array, Array]:
        positions, bits = self._layout(n)
        self._launch(
            "tree",
            "causal_layout",
            (n, 1, 1),
            128,
            *(committed_len, positions, bits, bits.shape[1]),
        )
        return positions, bits

    def mask_block(self, mask: np.ndarray) -> Array:
        n, width = mask.shape
        padded = np.zeros((n, -(-width // 32) * 32), bool)
        padded[:, :width] = mask
        return self.upload(np.packbits(padded, axis=1, bitorder="little").view(np.uint32))

    @launching
    def full_mask(self, visibility: Visibility) -> Array:
        rows = self._bound()
        bits = visibility.block
        n, words = bits.shape
        out = self._empty((n, rows.max_slots), np.bool_)
        self._launch(
            "tree",
            "full_mask",
            (n, 1, 1),
            BLOCK,
            *(bits, words, 32 * words, visibility.open_len, out, *i64(rows.max_slots)),
        )
        return out

    @launching
    def accept_walk(
        self,
        tokens: Array,
        parents: Array,
        targets: Array,
        stop_tokens: Array,
        max_emitted: DeviceInt,
    ) -> Walk:
        n = len(tokens)
        path = self._empty((n,), np.int64)
        accept_len, bonus = (self._empty((1,), np.int64) for _ in range(2))
        self._launch(
            "tree",
            "accept_walk",
            (1, 1, 1),
            128,
            *(tokens, parents, targets, stop_tokens, len(stop_tokens), max_emitted),
            *(path, accept_len, bonus, n),
        )
        return Walk(path, accept_len, bonus)

    def _layout(self, n: int) -> tuple[Array, Array]:
        return self._empty((n,), np.int64), self._empty((n, -(-n // 32)), np.uint32)
