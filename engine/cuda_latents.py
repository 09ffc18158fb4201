"""Attention and the cache on a CUDA device: latents.cu, and the launchers of verify_attn*.cu."""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from kdtr.contract import Array
from kdtr.engine import cuda_attention, cuda_linear
from kdtr.engine.cuda_device import BLOCK, CudaDevice, i64, launching
from kdtr.engine.kernel_set import DeviceInt, Latents, Visibility
from kdtr.engine.paging import PagedCache

_QUERY_ROWS, _QUERY_COLUMNS = 8, 16  # of latent_query, per block and per warp


class LatentOperations(CudaDevice):
    """The part of a `KernelSet` that writes, reads and moves cached rows."""

    @launching
    def rotary_angles(
        self, positions: Array, inverse_frequencies: Array, factor: float
    ) -> tuple[Array, Array]:
        n, half = len(positions), len(inverse_frequencies)
        cos, sin = (self._empty((n, half), np.float32) for _ in range(2))
        self._launch(
            "latents",
            "rotary_angles",
            (n, 1, 1),
            32,
            *(positions, inverse_frequencies, ctypes.c_double(factor), cos, sin, half),
            self._count(n),
        )
        return cos, sin

    @launching
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
        n, width = projected.shape
        q, c = 0 if q_norm is None else len(q_norm), len(kv_norm)
        r = width - q - c
        q_a = None if q_norm is None else self._empty((n, q), self._real)
        c_kv, k_pe = self._empty((n, c), self._real), self._empty((n, r), self._real)
        self._launch(
            "latents",
            "append_normed",
            (n, 1, 1),
            BLOCK,
            *(projected, *i64(width), q_norm, kv_norm, ctypes.c_float(eps), cos, sin, slots),
            *(q_a, c_kv, k_pe, cache.rows[layer], cache.page_table, cache.page_size, q, c, r),
            int(self._swizzled(cache)),
        )
        return Latents(q_a, c_kv, k_pe)

    @launching
    def latent_query(self, q: Array, w_kc: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """Two views of one array [n, h, c + r], as `verify_attn` reads it."""
        n, h, width = q.shape
        _, c, d = w_kc.shape
        r = width - d
        query = self._empty((n, h, c + r), self._real)
        if cuda_linear.fast_query(q, w_kc):
            kernel = partial(self._modules.kernel, "linear")
            count = self._count(n)
            cuda_linear.latent_query(kernel, q, w_kc, cos, sin, query, count, overlap=True)
            return query[..., :c], query[..., c:]
        warps = BLOCK // 32
        self._launch(
            "latents",
            "latent_query",
            (h, -(-n // _QUERY_ROWS), -(-c // (warps * _QUERY_COLUMNS))),
            BLOCK,
            *(q, w_kc, cos, sin, query, h, c, d, r, self._count(n)),
            shared=4 * _QUERY_ROWS * d,
        )
        return query[..., :c], query[..., c:]

    @launching
    def new_scores(self, n: int, n_heads: int, visibility: Visibility) -> Array:
        scores = self._empty((n, n_heads, self._bound().max_slots), np.float32)
        self._launch("tree", "fill_neg_inf", (1024, 1, 1), BLOCK, scores, *i64(scores.size))
        return scores

    @launching
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
        rows = self._bound()
        return cuda_attention.verify_attn(
            partial(self._modules.kernel, "verify_attn"),
            partial(self._modules.kernel, "verify_attn_mma"),
            cuda_attention.LayerCache(
                cache.rows[layer], cache.page_table, cache.page_size, self._swizzled(cache)
            ),
            self._joined(q_latent, q_pe),
            cuda_attention.DeviceVisibility(
                rows.count, visibility.open_len, rows.n_slots, visibility.block
            ),
            cache.latent_len,
            scale,
            split_size,
            rows.max_slots,
            scores,
            wgmma=self._hopper("verify_attn_wgmma"),
        )

    @launching
    def unabsorb_value(self, out_latent: Array, w_vc: Array) -> Array:
        n, h, _ = out_latent.shape
        out = self._empty((n, h, w_vc.shape[1]), self._real)
        cuda_linear.batched_linear(
            partial(self._modules.kernel, "linear"),
            out_latent,
            w_vc,
            out,
            self._count(n),
            overlap=True,
        )
        return out.reshape(n, -1)

    @launching
    def commit_rows(
        self, cache: PagedCache, path: Array, accept_len: Array, committed_len: DeviceInt
    ) -> Array:
        n = len(path)
        n_layers, _, row_len = cache.rows.shape
        moves = self._empty((n, 2), np.int64)
        self._launch(
            "latents",
            "commit_rows",
            (n_layers, -(-row_len // 128), 1),
            128,
            *(cache.rows, *i64(cache.rows[0].size), cache.page_table, cache.page_size, path),
            *(accept_len, committed_len, moves, n, row_len, int(self._swizzled(cache))),
        )
        return moves

    def _joined(self, q_latent: Array, q_pe: Array) -> Array:
        """The array [n, h, c + r] that both are views of; whoever replaced one pays for a copy."""
        n, h, c = q_latent.shape
        base = q_latent.base
        if (
            base is not None
            and base is q_pe.base
            and base.shape == (n, h, c + q_pe.shape[-1])
            and q_latent.data.ptr == base.data.ptr
        ):
            return base
        return self._cupy.concatenate([q_latent, q_pe], axis=-1)
