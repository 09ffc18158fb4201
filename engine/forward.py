"""The one forward (FWD-1 to FWD-5): n rows against the cache, over a kernel set, stage by stage.

Prefill, decode, verify and forward_tokens differ only in positions and visibility.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.contract import SILENT, Array, ModelConfig, Trace
from kdtr.engine.kernel_set import KernelSet, Visibility
from kdtr.engine.paging import PagedCache
from kdtr.engine.weights import (
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
    QueryWeights,
)


@dataclass(frozen=True, slots=True)
class Forward:
    """A loaded model on a kernel set, without a sequence.

    split_size  slots per split of the attention
    """

    kernels: KernelSet
    config: ModelConfig
    weights: ModelWeights
    split_size: int

    def __call__(
        self,
        cache: PagedCache,
        committed_len: int,
        tokens: Sequence[int],
        positions: Array,
        visibility: Visibility,
        trace: Trace,
    ) -> Array:
        """Row i goes to slot L + i of every layer (SLOT-1); returns logits [n, w].

        tokens [n] on the host; positions [n], what the rotary embedding uses; visibility [n, s]
        The caller has checked that the rows fit the cache.
        """
        kernels, weights = self.kernels, self.weights
        end = committed_len + len(tokens)
        cache.map_slots(end)
        slots = kernels.upload(np.arange(committed_len, end))  # [n]
        ids = kernels.upload(np.array(tokens))  # [n]
        trace("tokens", None, ids)
        trace("positions", None, positions)
        if trace is not SILENT:
            trace("mask", None, _full_mask(kernels, visibility))
        trace("slots", None, slots)
        cos, sin = kernels.rotary_angles(
            positions, weights.inverse_frequencies, weights.rotary_factor
        )  # [n, r/2] each
        hidden = kernels.embed(weights.embedding, ids)  # [n, m]
        trace("embedding", None, hidden)
        layers = _Layers(self, cache, slots, visibility, cos, sin, trace)
        for layer, layer_weights in enumerate(weights.layers):
            hidden = layers.run(layer, layer_weights, hidden)  # [n, m]
        hidden = kernels.rms_norm(hidden, weights.final_norm, self.config.rms_norm_eps)
        trace("final_hidden", None, hidden)
        logits = kernels.linear(hidden, weights.lm_head)  # [n, w]
        trace("logits", None, logits)
        return logits


@dataclass(frozen=True, slots=True)
class _Layers:
    """What every layer of one forward shares, and the layer itself."""

    forward: Forward
    cache: PagedCache
    slots: Array  # [n]   logical
    visibility: Visibility  # [n, s]
    cos: Array  # [n, r/2]
    sin: Array  # [n, r/2]
    trace: Trace

    def run(self, layer: int, weights: LayerWeights, hidden: Array) -> Array:
        """hidden [n, m] -> [n, m]: pre-norm attention and MLP, each on a residual."""
        kernels, eps = self.forward.kernels, self.forward.config.rms_norm_eps
        x = kernels.rms_norm(hidden, weights.input_norm, eps)  # [n, m]
        attn_out = self._attention(layer, weights.attention, x)  # [n, m]
        hidden = kernels.add(hidden, attn_out)
        x = kernels.rms_norm(hidden, weights.post_attention_norm, eps)
        if isinstance(weights.mlp, MoeWeights):
            mlp_out = self._moe(layer, weights.mlp, x)  # [n, m]
        else:
            mlp_out = kernels.swiglu(x, weights.mlp.gate_up, weights.mlp.down)
        self.trace("mlp_out", layer, mlp_out)
        hidden = kernels.add(hidden, mlp_out)
        self.trace("hidden", layer, hidden)
        return hidden

    def _attention(self, layer: int, weights: AttentionWeights, x: Array) -> Array:
        """x [n, m] -> [n, m], after o_proj; this layer's latents are appended first."""
        kernels, trace = self.forward.kernels, self.trace
        q_nope, q_pe = self._queries(weights.queries, x)  # [n, h, d], [n, h, r]
        trace("q_nope", layer, q_nope)
        trace("q_pe", layer, q_pe)
        c_kv, k_pe = self._latents(weights, x)  # [n, c], [n, r]
        trace("c_kv", layer, c_kv)
        trace("k_pe", layer, k_pe)
        kernels.append_latents(self.cache, layer, self.slots, c_kv, k_pe)
        q_latent = kernels.absorb_query(q_nope, weights.w_kc)  # [n, h, c]
        scores = self._scores_buffer(q_latent)  # [n, h, s] or None
        out_latent = kernels.verify_attn(
            self.cache,
            layer,
            q_latent,
            q_pe,
            self.visibility,
            self.forward.weights.softmax_scale,
            self.forward.split_size,
            scores,
        )  # [n, h, c]
        if scores is not None:
            trace("scores", layer, scores)
        trace("out_latent", layer, out_latent)
        heads = kernels.unabsorb_value(out_latent, weights.w_vc)  # [n, h v]
        attn_out = kernels.linear(heads, weights.o)  # [n, m]
        trace("attn_out", layer, attn_out)
        return attn_out

    def _queries(self, weights: QueryWeights, x: Array) -> tuple[Array, Array]:
        """x [n, m] -> q_nope [n, h, d], rotated q_pe [n, h, r] half-split (MLA-1, MLA-7)."""
        kernels, config = self.forward.kernels, self.forward.config
        if weights.a is not None:
            # latent_norm_eps, not rms_norm_eps (NORM-1)
            x = kernels.rms_norm(
                kernels.linear(x, weights.a), weights.norm, config.latent_norm_eps
            )  # [n, q]
        q = kernels.linear(x, weights.b)  # [n, h (d + r)]
        q = q.reshape(-1, config.num_attention_heads, config.qk_head_dim)  # [n, h, d + r]
        d = config.qk_nope_head_dim
        return q[..., :d], kernels.rotate(q[..., d:], self.cos, self.sin)

    def _latents(self, weights: AttentionWeights, x: Array) -> tuple[Array, Array]:
        """x [n, m] -> normed c_kv [n, c], rotated k_pe [n, r] half-split (MLA-2, MLA-7)."""
        kernels, config = self.forward.kernels, self.forward.config
        c, r = config.kv_lora_rank, config.qk_rope_head_dim
        kv = kernels.linear(x, weights.kv_a)  # [n, c + r]
        c_kv = kernels.rms_norm(kv[:, :c], weights.kv_norm, config.latent_norm_eps)  # [n, c]
        k_pe = kernels.rotate(kv[:, c:].reshape(-1, 1, r), self.cos, self.sin)  # [n, 1, r]
        return c_kv, k_pe.reshape(-1, r)

    def _scores_buffer(self, q_latent: Array) -> Array | None:
        """[n, h, s] of -inf for the kernel to fill, or None when nobody watches."""
        if self.trace is SILENT:
            return None
        n, h, _ = q_latent.shape
        empty = np.full((n, h, self.visibility.n_slots), -np.inf, np.float32)
        return self.forward.kernels.upload(empty)

    def _moe(self, layer: int, weights: MoeWeights, x: Array) -> Array:
        """x [n, m] -> [n, m]: routed experts plus the shared one (MOE-4)."""
        kernels, config = self.forward.kernels, self.forward.config
        scores = kernels.router_scores(x, weights.gate, config.scoring_func)  # [n, e]
        self.trace("router_scores", layer, scores)
        ids, expert_weights = kernels.choose_experts(scores, weights.correction_bias, config)
        self.trace("expert_ids", layer, ids)  # [n, k]
        self.trace("expert_weights", layer, expert_weights)  # [n, k]
        out = kernels.experts(x, ids, expert_weights, weights.gate_up, weights.down)  # [n, m]
        if weights.shared is not None:
            shared = kernels.swiglu(x, weights.shared.gate_up, weights.shared.down)
            out = kernels.add(out, shared)
        return out


def _full_mask(kernels: KernelSet, visibility: Visibility) -> np.ndarray:
    """[n, s] bool: the open prefix beside the block that the attention consults."""
    block = kernels.to_host(visibility.block)
    return np.concatenate([np.ones((len(block), visibility.open_len), bool), block], axis=1)
