"""A host kernel set that sums in another order, to learn how far honest engines lie apart.

Floating-point addition does not associate: engines that differ in the order of their sums alone
are all right and differ in bits. This one permutes the summed index of both operands of every
product with a weight before BLAS sees it, and the order in which the splits of the attention
merge. The permutation is drawn from the seed and the sum's length, so the same seed gives the
same engine. Products within a split and the mean of a norm are summed as ever.
"""

from __future__ import annotations

import numpy as np

from kdtr.engine import host_attention
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache


class ShuffledKernels(HostKernels):
    """`HostKernels` with sums in an order of this seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def linear(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        order = self._order(x.shape[-1])  # [i]
        return super().linear(x[:, order], weight[:, order])

    def router_scores(self, x: np.ndarray, gate: np.ndarray, scoring_func: str) -> np.ndarray:
        order = self._order(x.shape[-1])  # [m]
        return super().router_scores(x[:, order], gate[:, order], scoring_func)

    def absorb_query(self, q_nope: np.ndarray, w_kc: np.ndarray) -> np.ndarray:
        order = self._order(q_nope.shape[-1])  # [d]
        return super().absorb_query(q_nope[..., order], w_kc[..., order])

    def unabsorb_value(self, out_latent: np.ndarray, w_vc: np.ndarray) -> np.ndarray:
        order = self._order(out_latent.shape[-1])  # [c]
        return super().unabsorb_value(out_latent[..., order], w_vc[..., order])

    def verify_attn(
        self,
        cache: PagedCache,
        layer: int,
        q_latent: np.ndarray,
        q_pe: np.ndarray,
        visibility: Visibility,
        scale: float,
        split_size: int,
        scores: np.ndarray | None = None,
    ) -> np.ndarray:
        partials = host_attention.attend_splits(
            cache, layer, q_latent, q_pe, visibility, scale, split_size, scores
        )
        return host_attention.merge_splits([partials[i] for i in self._order(len(partials))])

    def _order(self, length: int) -> np.ndarray:
        """[length] a permutation, the same whenever a sum of this length is asked for."""
        return np.random.default_rng((self._seed, length)).permutation(length)
