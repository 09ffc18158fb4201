"""More faults for the host engine: those that only an x-ray is asked to name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.mutants import BY_NAME
from kdtr.conformance.mutants.planting import every_attention, kv_a, on_commit, on_load, wrap

XRAY_FAULTS: dict[str, Callable[[Any], None]] = {
    name: BY_NAME[name].plant for name in ("no_mscale", "not_scaled", "highest_tie")
}


def xray_fault(plant: Callable[[Any], None]) -> Callable[[Any], None]:
    XRAY_FAULTS[plant.__name__] = plant
    return plant


@xray_fault
def one_bit(engine: Any) -> None:
    """In trees of 18 nodes, and nowhere else, node 5 sees its sibling 4."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        if len(parents) == 18:
            ancestors = ancestors.copy()
            ancestors[5, 4] = True
        return positions, ancestors

    wrap(engine, tree_layout=tree_layout)


@xray_fault
def one_node_late(engine: Any) -> None:
    """In trees of 18 nodes, and nowhere else, node 2 is one too high."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        if len(parents) == 18:
            positions = positions.copy()
            positions[2] += 1
        return positions, ancestors

    wrap(engine, tree_layout=tree_layout)


@xray_fault
def layer_1_sees_siblings(engine: Any) -> None:
    parents_of: list[Any] = []

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        parents_of[:] = [parents]
        return original(parents, committed_len)

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        n = len(seen.block)
        if layer == 1 and parents_of and len(parents_of[0]) == n and seen.open_len:
            i, j = np.indices((n, n))
            parents = np.asarray(parents_of[0])
            siblings = (parents[i] == parents[j]) & (j < i)
            seen = replace(seen, block=seen.block | siblings)
        return original(cache, layer, q_latent, q_pe, seen, *rest)

    wrap(engine, tree_layout=tree_layout, verify_attn=verify_attn)


@xray_fault
def layer_2_not_scaled(engine: Any) -> None:
    """In layer 2 the softmax scale is that of kv_lora_rank + qk_rope_head_dim."""

    def verify_attn(
        original: Any,
        cache: Any,
        layer: int,
        q_latent: Any,
        q_pe: Any,
        seen: Any,
        scale: float,
        *rest: Any,
    ) -> Any:
        if layer == 2:
            scale = float(q_latent.shape[-1] + q_pe.shape[-1]) ** -0.5
        return original(cache, layer, q_latent, q_pe, seen, scale, *rest)

    wrap(engine, verify_attn=verify_attn)


@xray_fault
def scale_of_576(engine: Any) -> None:
    """The width is kv_lora_rank + qk_rope_head_dim; YaRN's factor is right."""

    def change(weights: Any) -> Any:
        attention = weights.layers[0].attention
        d = attention.w_kc.shape[-1]
        r = len(kv_a(attention)) - len(attention.kv_norm)
        factor = ((d + r) / len(kv_a(attention))) ** 0.5
        return replace(weights, softmax_scale=weights.softmax_scale * factor)

    on_load(engine, change)


@xray_fault
def odd_scale(engine: Any) -> None:
    """A scale that nobody has a name for."""
    on_load(engine, lambda weights: replace(weights, softmax_scale=weights.softmax_scale * 0.6))


@xray_fault
def no_amplitude(engine: Any) -> None:
    """Cos and sin without YaRN's factor."""
    on_load(engine, lambda weights: replace(weights, rotary_factor=1.0))


@xray_fault
def backwards(engine: Any) -> None:
    """The two members of every rotary pair are exchanged."""

    def rotary_angles(original: Any, *rest: Any) -> Any:
        cos, sin = original(*rest)
        return cos, -sin

    wrap(engine, rotary_angles=rotary_angles)


@xray_fault
def heads_reversed(engine: Any) -> None:
    """w_vc in reverse order of the heads."""

    def change(attention: Any) -> Any:
        return replace(attention, w_vc=attention.w_vc[::-1].copy())

    on_load(engine, lambda weights: every_attention(weights, change))


@xray_fault
def keys_of_next_head(engine: Any) -> None:
    """Head h computes with w_kc of head h + 1."""

    def change(attention: Any) -> Any:
        return replace(attention, w_kc=np.roll(attention.w_kc, -1, axis=0))

    on_load(engine, lambda weights: every_attention(weights, change))


@xray_fault
def bfloat16_scores(engine: Any) -> None:
    """Keys and queries lose bits that the profile does not say they lose."""

    def rotate(original: Any, x: Any, cos: Any, sin: Any) -> Any:
        return original(x, cos, sin).astype(ml_dtypes.bfloat16).astype(np.float32)

    wrap(engine, rotate=rotate)


@xray_fault
def one_row_too_many(engine: Any) -> None:
    """After every commit one rejected row is kept."""

    def nodes(parents: Any, path: list[int], _: Any) -> list[int]:
        rejected = [node for node in range(len(parents)) if node > len(path) - 1]
        return [*path, *rejected[:1]]

    on_commit(engine, nodes)


@xray_fault
def chunks_from_zero(engine: Any) -> None:
    """Every chunk of a prompt starts at position 0."""

    def rotary_angles(original: Any, positions: Any, *rest: Any) -> Any:
        positions = np.asarray(positions)
        if not in_tree[0]:
            positions = positions - positions[0]
        in_tree[0] = False
        return original(positions, *rest)

    in_tree = [False]

    def tree_layout(original: Any, *rest: Any) -> Any:
        in_tree[0] = True
        return original(*rest)

    wrap(engine, rotary_angles=rotary_angles, tree_layout=tree_layout)


@xray_fault
def normalised_raw(engine: Any) -> None:
    """norm_topk_prob is taken for the opposite of what it is."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        return original(scores, bias, config.replace(norm_topk_prob=not config.norm_topk_prob))

    wrap(engine, choose_experts=choose_experts)


@xray_fault
def gate_and_up(engine: Any) -> None:
    """The halves of a SwiGLU are exchanged."""

    def change(weights: Any) -> Any:
        def swapped(layer: Any) -> Any:
            halves = np.split(layer.mlp.gate_up, 2, axis=-2)
            return replace(layer, mlp=replace(layer.mlp, gate_up=np.concatenate(halves[::-1], -2)))

        return replace(weights, layers=tuple(swapped(layer) for layer in weights.layers))

    on_load(engine, change)
