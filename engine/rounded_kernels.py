"""The host kernel set of an engine that stores bfloat16 or float16 and sums in float32.

Arrays stay float32, but every result that such an engine writes to memory is rounded to the
storage dtype, once, when its sums are complete:

    stored in dtype    weights (rounded as they are read, the correction bias not), embedding,
                       norms, projections, rotated parts, latents in the cache, the query in
                       latent space, attention's outputs, SwiGLU's inner product, every expert's
                       output, their weighted sum, residual stream, logits
    kept in float32    rotary tables (of float64 angles), attention scores and softmax, router
                       scores, expert weights, and every sum while it runs

float16 ends at 65504. As on a device nothing is clipped: a larger result is inf, NumPy warns of the
overflow, and the next norm makes NaN of it. Keeping the residual stream in range is the model's
business; a weight out of range is refused when the model is loaded.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import Visibility
from kdtr.engine.paging import PagedCache
from kdtr.engine.rounding import rounded


class RoundedKernels(HostKernels):
    """What the set `float32` computes, rounded where it is stored; `embed` copies rounded rows."""

    def __init__(self, float32: HostKernels, dtype: str) -> None:
        self._float32 = float32
        self._dtype = dtype
        self.profile = replace(
            float32.profile, weights=dtype, activations=dtype, latents=dtype, logits=dtype
        )

    # Stored

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
        return self._stored(self._float32.rms_norm(x, weight, eps))

    def linear(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.linear(x, weight))

    def add(self, residual: np.ndarray, delta: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.add(residual, delta))

    def silu_mul(self, gate_up: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.silu_mul(gate_up))

    def rotate(self, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.rotate(x, cos, sin))

    def absorb_query(self, q_nope: np.ndarray, w_kc: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.absorb_query(q_nope, w_kc))

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
        out_latent = self._float32.verify_attn(
            cache, layer, q_latent, q_pe, visibility, scale, split_size, scores
        )
        return self._stored(out_latent)

    def unabsorb_value(self, out_latent: np.ndarray, w_vc: np.ndarray) -> np.ndarray:
        return self._stored(self._float32.unabsorb_value(out_latent, w_vc))

    def experts(
        self,
        x: np.ndarray,
        expert_ids: np.ndarray,
        expert_weights: np.ndarray,
        gate_up: np.ndarray,
        down: np.ndarray,
    ) -> np.ndarray:
        """Of this set's own SwiGLUs: what an expert leaves is stored before it is weighed."""
        return self._stored(super().experts(x, expert_ids, expert_weights, gate_up, down))

    # Not stored

    def router_scores(self, x: np.ndarray, gate: np.ndarray, scoring_func: str) -> np.ndarray:
        return self._float32.router_scores(x, gate, scoring_func)

    def _stored(self, result: np.ndarray) -> np.ndarray:
        return rounded(result, self._dtype)
