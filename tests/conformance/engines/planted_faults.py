"""The host engine with one fault: an operation or a verb of the loaded engine is wrapped.

`planted_faults:make_engine` with the option `fault` is such an engine by name. Faults are those of
real engines; what `kdtr.conformance.mutants` has is planted from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from kdtr.conformance import load_engine
from kdtr.conformance.mutants import BY_NAME, Plant
from kdtr.conformance.mutants.limits import limited
from kdtr.conformance.mutants.mla_latents import with_eps
from kdtr.conformance.mutants.planting import (
    every_attention,
    kv_a,
    on_load,
    on_open,
    physical,
    rows_restored,
    wrap,
)
from kdtr.contract import NO_LIMIT


@dataclass(frozen=True, slots=True)
class Fault:
    """What is planted, the rule it breaks and the stage at which it is seen first.

    case, until  where it shows: a case of the tiny bundle, and the point; "": no case shows it
    in_round     the stage in the mode `round`, where that cannot show `first_seen_at`
    """

    plant: Plant
    breaks: str
    first_seen_at: str
    case: str
    until: str
    in_round: str


FAULTS: dict[str, Fault] = {}


def fault(
    *,
    breaks: str,
    first_seen_at: str,
    case: str = "y-tree",
    until: str = "round0",
    in_round: str = "",
) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = Fault(
            plant, breaks, first_seen_at, case, until, in_round or first_seen_at
        )
        return plant

    return register


def make_engine(fault: str, page_size: int = 3, split_size: int = 5, dtype: str = "float32") -> Any:
    """Pages of 3: the prompt and the trees cross their edges."""
    options = {"page_size": page_size, "split_size": split_size, "dtype": dtype}
    engine = load_engine("host", options)
    FAULTS[fault].plant(engine)
    return engine


# Faults that are mutants too: the case of the tiny bundle, and the point, where each shows

_MUTANTS = {
    "position_by_index": ("y-tree", "round0"),
    "drafts_high": ("y-tree", "round0"),
    "visibility_transposed": ("y-tree", "round0"),
    "first_mask_of_a_size": ("best-first", "round6"),
    "no_compaction": ("y-tree", "round0"),
    "only_c_kv_moves": ("y-tree", "round0"),
    "one_layer_for_all": ("y-tree", "chunk0"),
    "pages_contiguous": ("y-tree", "chunk0"),
    "four_rows_written": ("chain", "round0"),
    "first_child_only": ("y-tree", "round0"),
    "first_child_accepted": ("y-tree", "round0"),
    "length_grows_by_tree": ("y-tree", "round0"),
    "root_not_counted": ("y-tree", "round0"),
    "root_from_path": ("y-tree", "round0"),
    "no_embedding_at_zero": ("y-tree", "chunk0"),
    "half_split_pairs": ("y-tree", "chunk0"),
    "columns_swapped": ("y-tree", "chunk0"),
    "softmax_router": ("y-tree", "chunk0"),
    "groups_masked_with_zero": ("", "round0"),
    "weights_from_biased": ("y-tree", "chunk0"),
    "first_weight_for_all": ("y-tree", "chunk0"),
    "final_norm_twice": ("y-tree", "chunk0"),
    "latent_eps_of_other_norms": ("y-tree", "chunk0"),
    "no_stop_tokens": ("", "round0"),
    "no_max_emitted": ("", "round0"),
    "last_maximum": ("", "round0"),
}
FAULTS.update(
    (name, Fault(one.plant, one.rules[0], one.stage, case, until, one.stage))
    for name, (case, until) in _MUTANTS.items()
    for one in (BY_NAME[name],)
)

# Positions and mask


@fault(breaks="POS-1", first_seen_at="positions")
def root_low(engine: Any) -> None:
    """The root is at L - 1, and so every node is one too low."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions - 1, ancestors

    wrap(engine, tree_layout=tree_layout)


@fault(breaks="MASK-2", first_seen_at="mask")
def sibling_visible(engine: Any) -> None:
    """A node sees its earlier siblings."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        i, j = np.indices(ancestors.shape)
        return positions, ancestors | ((parents[i] == parents[j]) & (j < i))

    wrap(engine, tree_layout=tree_layout)


@fault(breaks="MASK-3", first_seen_at="out_latent", case="best-first", until="round2")
def stale_row_visible(engine: Any) -> None:
    """COMMIT-4: every row also reads one slot that a rejected node of an earlier tree left."""
    highest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # slots ever written, by cache

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        *plain, scores = rest
        out = original(cache, layer, q_latent, q_pe, seen, *plain, scores)
        n, stale = seen.n_slots, highest.get(cache, 0) > seen.n_slots
        highest[cache] = max(highest.get(cache, 0), n)
        if not stale:
            return out
        block = np.concatenate([seen.block, np.ones((len(seen.block), 1), bool)], axis=1)
        return original(cache, layer, q_latent, q_pe, replace(seen, block=block), *plain, None)

    wrap(engine, verify_attn=verify_attn)


@fault(breaks="MASK-3", first_seen_at="out_latent", until="round1")
def rejected_row_kept(engine: Any) -> None:
    """The row of a tree's first rejected node is kept aside, and every row of the next reads it."""
    kept: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # rows [l, c + r], by cache

    def commit_rows(
        original: Any, cache: Any, path: Any, accept_len: Any, committed_len: Any
    ) -> Any:
        accepted = {int(node) for node in path[: int(accept_len[0])]}
        rejected = sorted({*range(len(path))} - accepted)
        if rejected:
            slot = int(np.ravel(committed_len)[0]) + rejected[0]
            kept[cache] = cache.rows[:, physical(cache, slot)].copy()
        return original(cache, path, accept_len, committed_len)

    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        *plain, scores = rest
        out = original(cache, layer, q_latent, q_pe, seen, *plain, scores)
        if cache not in kept or seen.n_slots >= cache.capacity:
            return out
        behind = physical(cache, seen.n_slots)
        before = cache.rows[:, behind].copy()
        cache.rows[:, behind] = kept[cache]
        block = np.concatenate([seen.block, np.ones((len(seen.block), 1), bool)], axis=1)
        out = original(cache, layer, q_latent, q_pe, replace(seen, block=block), *plain, None)
        cache.rows[:, behind] = before
        return out

    wrap(engine, commit_rows=commit_rows, verify_attn=verify_attn)


# Cache and slots


@fault(breaks="COMMIT-1", first_seen_at="cache_k_pe")
def rotated_again(engine: Any) -> None:
    """Each moved key is rotated once more, by its position."""
    frequencies: list[Any] = []

    def rotary_angles(original: Any, positions: Any, inverse: Any, factor: float) -> Any:
        frequencies[:] = [inverse, factor]
        return original(positions, inverse, factor)

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        moves = original(cache, *rest)
        for source, destination in moves.tolist():
            if source != destination:
                cos, sin = engine._kernels.rotary_angles(np.array([destination]), *frequencies)
                keys = cache.rows[:, physical(cache, destination), cache.latent_len :]
                keys[:] = engine._kernels.rotate(keys[:, None], cos, sin)[:, 0]
        return moves

    wrap(engine, rotary_angles=rotary_angles, commit_rows=commit_rows)


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv")
def last_move_skipped(engine: Any) -> None:
    """The deepest accepted node is not moved."""

    def commit_rows(original: Any, cache: Any, path: Any, accept_len: Any, length: int) -> Any:
        original(cache, path, np.maximum(accept_len - 1, 1), length)
        with rows_restored(cache, slice(None)):
            return original(cache, path, accept_len, length)

    wrap(engine, commit_rows=commit_rows)


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv")
def rows_through_bfloat16(engine: Any) -> None:
    """Moved rows lose bits on the way: no pure copy."""
    wrap(engine, commit_rows=_moved_through(ml_dtypes.bfloat16))


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv", case="")
def rows_through_float16(engine: Any) -> None:
    """The same with more bits left."""
    wrap(engine, commit_rows=_moved_through(np.float16))


def _moved_through(dtype: Any) -> Callable[..., Any]:
    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        moves = original(cache, *rest)
        for _, destination in moves[moves[:, 0] >= 0].tolist():
            row = cache.rows[:, physical(cache, destination)]
            row[:] = row.astype(dtype).astype(np.float32)
        return moves

    return commit_rows


@fault(breaks="MLA-3", first_seen_at="scores", until="chunk0")
def prefill_rows_reversed(engine: Any) -> None:
    """The rows of a chunk are written back to front."""

    def append_latents(original: Any, cache: Any, layer: int, slots: Any, *rest: Any) -> Any:
        return original(cache, layer, slots[::-1] if slots[0] == 0 else slots, *rest)

    wrap(engine, append_latents=append_latents)


@fault(breaks="MLA-3", first_seen_at="scores", case="ar")
def lone_root_not_written(engine: Any) -> None:
    """A forward of one row does not append it."""

    def append_latents(original: Any, cache: Any, layer: int, slots: Any, *rest: Any) -> Any:
        return None if len(slots) == 1 else original(cache, layer, slots, *rest)

    wrap(engine, append_latents=append_latents)


# Decisions


@fault(breaks="ACC-2", first_seen_at="bonus", until="round1")
def bonus_of_last_row(engine: Any) -> None:
    """The bonus is the target of the last node of the tree, not of the path."""

    def accept_walk(original: Any, tokens: Any, parents: Any, targets: Any, *rest: Any) -> Any:
        walk = original(tokens, parents, targets, *rest)
        return walk._replace(bonus=targets[-1:])

    wrap(engine, accept_walk=accept_walk)


# Model


@fault(breaks="MLA-4", first_seen_at="scores", until="chunk0")
def scale_from_latent(engine: Any) -> None:
    """The softmax scale comes from kv_lora_rank + rope, not from nope + rope."""

    def change(weights: Any) -> Any:
        attention = weights.layers[0].attention
        return replace(weights, softmax_scale=float(len(kv_a(attention))) ** -0.5)

    on_load(engine, change)


@fault(breaks="MLA-7", first_seen_at="k_pe", until="chunk0")
def k_pe_of_wrong_columns(engine: Any) -> None:
    """k_pe is taken from the end of the latent."""

    def change(attention: Any) -> Any:
        r = len(kv_a(attention)) - len(attention.kv_norm)
        rows = attention.qkv_a
        return replace(attention, qkv_a=np.concatenate([rows[:-r], rows[-2 * r : -r]]))

    on_load(engine, lambda weights: every_attention(weights, change))


@fault(breaks="MOE-2", first_seen_at="expert_ids", until="chunk0")
def groups_ignored(engine: Any) -> None:
    """All groups stay eligible."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        return original(scores, bias, config.replace(topk_group=config.n_group))

    wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-3", first_seen_at="expert_weights", until="chunk0")
def scaled_twice(engine: Any) -> None:
    """routed_scaling_factor is applied twice."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        ids, weights = original(scores, bias, config)
        return ids, weights * np.float32(config.routed_scaling_factor)

    wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-4", first_seen_at="mlp_out", until="chunk0")
def shared_expert_missing(engine: Any) -> None:
    """Only the routed experts are added."""

    def change(weights: Any) -> Any:
        layers = tuple(
            replace(one, mlp=replace(one.mlp, shared=None)) if hasattr(one.mlp, "shared") else one
            for one in weights.layers
        )
        return replace(weights, layers=layers)

    on_load(engine, change)


@fault(breaks="NORM-1", first_seen_at="q_nope", case="")
def main_eps(engine: Any) -> None:
    """1e-6 in the input, post-attention and final norms. Only an eps of some size shows it."""
    with_eps(engine, lambda is_latent, eps: eps if is_latent else 1e-6)


@fault(breaks="ACC-4", first_seen_at="path", case="")
def limit_ignored(engine: Any) -> None:
    """A round emits all that it accepts, whatever the limit."""
    on_open(engine, limited(lambda limit: NO_LIMIT))


@fault(breaks="SLOT-2", first_seen_at="untouched")
def writes_committed_row(engine: Any) -> None:
    """A forward leaves a mark in the first committed row."""
    wrap(engine, verify_attn=_marking(lambda x: x + np.float32(0.5)))


@fault(breaks="SLOT-2", first_seen_at="untouched", case="")
def flips_last_bit(engine: Any) -> None:
    """A forward changes the last bit of the first committed row."""
    wrap(engine, verify_attn=_marking(lambda x: np.nextafter(x, np.float32(np.inf))))


def _marking(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        out = original(cache, layer, q_latent, q_pe, seen, *rest)
        if seen.open_len and layer == len(cache.rows) - 1:  # nobody reads it any more
            row = cache.rows[layer, physical(cache, 0)]
            row[0] = change(row[0])
        return out

    return verify_attn


# No faults, but what rounding may do where a decision is thin


def make_swapped_tokens(pairs: int) -> Any:
    """Token i and token i + pairs trade their logits."""
    engine = load_engine("host")

    def change(weights: Any) -> Any:
        order = np.arange(len(weights.lm_head))
        order[: 2 * pairs] = np.roll(order[: 2 * pairs], pairs)
        return replace(weights, lm_head=weights.lm_head[order])

    on_load(engine, change)
    return engine


def make_swapped_experts(dtype: str = "float32", *, traded: bool = False) -> Any:
    """Experts 2i and 2i + 1 trade their router scores; `traded`, a fault: their outputs too."""
    engine = load_engine("host", {"dtype": dtype})

    def change(weights: Any) -> Any:
        def swapped(layer: Any) -> Any:
            if not hasattr(layer.mlp, "gate"):
                return layer
            order = np.arange(len(layer.mlp.gate)) ^ 1
            mlp = replace(layer.mlp, gate=layer.mlp.gate[order])
            return replace(layer, mlp=replace(mlp, down=mlp.down[order]) if traded else mlp)

        return replace(weights, layers=tuple(swapped(layer) for layer in weights.layers))

    on_load(engine, change)
    return engine
