"""The one forward (FWD-1 to FWD-5): rows against the cache, over a kernel set, stage by stage.

Prefill, decode, verify and forward_tokens differ only in positions and visibility.
"""

from __future__ import annotations

from dataclasses import dataclass

from kdtr.contract import SILENT, Array, ModelConfig, Trace
from kdtr.engine.kernel_set import KernelSet, Rows, Visibility
from kdtr.engine.paging import PagedCache
from kdtr.engine.weights import AttentionWeights, LayerWeights, ModelWeights, MoeWeights


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
        rows: Rows,
        positions: Array,
        visibility: Visibility,
        trace: Trace,
    ) -> Array:
        """Row i goes to slot rows.slots[i] of every layer (SLOT-1); returns logits [n, w].

        positions [n], what the rotary embedding uses; visibility [n, s]
        The caller has checked that the rows fit the cache, and has mapped their pages.
        """
        kernels, weights = self.kernels.over(rows), self.weights
        trace("tokens", None, rows.tokens)
        trace("positions", None, positions)
        if trace is not SILENT:
            trace("mask", None, kernels.full_mask(visibility))
        trace("slots", None, rows.slots)
        cos, sin = kernels.rotary_angles(
            positions, weights.inverse_frequencies, weights.rotary_factor
        )  # [n, r/2] each
        hidden = kernels.embed(weights.embedding, rows.tokens)  # [n, m]
        trace("embedding", None, hidden)
        layers = _Layers(self, kernels, cache, rows, visibility, cos, sin, trace)
        x = kernels.rms_norm(hidden, weights.layers[0].input_norm, self.config.rms_norm_eps)
        next_norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
        for layer, layer_weights in enumerate(weights.layers):
            hidden, x = layers.run(layer, layer_weights, hidden, x, next_norms[layer])  # [n, m]
        trace("final_hidden", None, x)
        logits = kernels.linear(x, weights.lm_head)  # [n, w]
        trace("logits", None, logits)
        return logits


@dataclass(frozen=True, slots=True)
class _Layers:
    """What every layer of one forward shares, and the layer itself."""

    forward: Forward
    kernels: KernelSet  # for these rows
    cache: PagedCache
    rows: Rows
    visibility: Visibility  # [n, s]
    cos: Array  # [n, r/2]
    sin: Array  # [n, r/2]
    trace: Trace

    def run(
        self, layer: int, weights: LayerWeights, hidden: Array, x: Array, next_norm: Array
    ) -> tuple[Array, Array]:
        """The residual stream [n, m] and its norm [n, m], before the layer -> after it.

        next_norm [m]: of the layer that follows, or the final one
        """
        kernels, eps = self.kernels, self.forward.config.rms_norm_eps
        attn_out = self._attention(layer, weights.attention, x)  # [n, m]
        hidden, x = kernels.add_norm(hidden, attn_out, weights.post_attention_norm, eps)
        if isinstance(weights.mlp, MoeWeights):
            mlp_out = self._moe(layer, weights.mlp, x)  # [n, m]
        else:
            mlp_out = kernels.swiglu(x, weights.mlp.gate_up, weights.mlp.down)
        self.trace("mlp_out", layer, mlp_out)
        hidden, x = kernels.add_norm(hidden, mlp_out, next_norm, eps)
        self.trace("hidden", layer, hidden)
        return hidden, x

    def _attention(self, layer: int, weights: AttentionWeights, x: Array) -> Array:
        """x [n, m] -> [n, m], after o_proj; this layer's latents are appended first."""
        kernels, config, trace = self.kernels, self.forward.config, self.trace
        d = config.qk_nope_head_dim
        latents = kernels.append_normed(
            self.cache,
            layer,
            self.rows.slots,
            kernels.linear(x, weights.qkv_a),  # [n, q + c + r]
            weights.q_norm,
            weights.kv_norm,
            config.latent_norm_eps,  # not rms_norm_eps (NORM-1)
            self.cos,
            self.sin,
        )
        q = kernels.linear(x if latents.q_a is None else latents.q_a, weights.q_b)
        q = q.reshape(-1, config.num_attention_heads, config.qk_head_dim)  # [n, h, d + r]
        q_latent, q_pe = kernels.latent_query(q, weights.w_kc, self.cos, self.sin)
        trace("q_nope", layer, q[..., :d])
        trace("q_pe", layer, q_pe)
        trace("c_kv", layer, latents.c_kv)
        trace("k_pe", layer, latents.k_pe)
        scores = self._new_scores()  # [n, h, s] or None
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

    def _new_scores(self) -> Array | None:
        if self.trace is SILENT:
            return None
        n_heads = self.forward.config.num_attention_heads
        return self.kernels.new_scores(self.rows.n, n_heads, self.visibility)

    def _moe(self, layer: int, weights: MoeWeights, x: Array) -> Array:
        """x [n, m] -> [n, m]: routed experts plus the shared one (MOE-4)."""
        routed = self.kernels.route(x, weights.gate, weights.correction_bias, self.forward.config)
        self.trace("router_scores", layer, routed.scores)  # [n, e]
        self.trace("expert_ids", layer, routed.ids)  # [n, k]
        self.trace("expert_weights", layer, routed.weights)  # [n, k]
        return self.kernels.moe(x, routed, weights)
