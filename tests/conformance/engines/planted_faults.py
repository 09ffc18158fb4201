"""The host engine with one fault: an operation or a verb of the loaded engine is wrapped.

`planted_faults:make_engine` with the option `fault` is such an engine by name. Faults are those of
real engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np

from kdtr.conformance import load_engine
from kdtr.contract import NO_LIMIT, EmitLimit

Plant = Callable[[Any], None]


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


def _wrap(engine: Any, **operations: Callable[..., Any]) -> None:
    """Each is called with the original operation first, wherever the set itself calls it too."""
    for name, operation in operations.items():
        setattr(engine._kernels, name, partial(operation, getattr(engine._kernels, name)))


def _on_load(engine: Any, change: Callable[[Any], Any]) -> None:
    """`change` maps the loaded weights to faulty ones."""
    load = engine.load

    def faulty(source: Any) -> Any:
        model = load(source)
        model._forward = replace(model._forward, weights=change(model._forward.weights))
        return model

    engine.load = faulty


def _on_open(engine: Any, change: Callable[[Any], None]) -> None:
    """`change` is given every session."""
    load = engine.load

    def faulty_load(source: Any) -> Any:
        model = load(source)
        open_ = model.open

        def faulty_open(*, max_len: int) -> Any:
            session = open_(max_len=max_len)
            change(session)
            return session

        model.open = faulty_open
        return model

    engine.load = faulty_load


def _every_attention(weights: Any, change: Callable[[Any], Any]) -> Any:
    layers = tuple(replace(one, attention=change(one.attention)) for one in weights.layers)
    return replace(weights, layers=layers)


def _kv_a(attention: Any) -> Any:
    """[c + r, m]: what follows the queries' rows."""
    q = 0 if attention.q_norm is None else len(attention.q_norm)
    return attention.qkv_a[q:]


def _physical(cache: Any, slot: int) -> int:
    return int(cache.page_table[slot // cache.page_size]) * cache.page_size + slot % cache.page_size


# Positions and mask


@fault(breaks="POS-1", first_seen_at="positions")
def root_low(engine: Any) -> None:
    """The root is at L - 1, and so every node is one too low."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions - 1, ancestors

    _wrap(engine, tree_layout=tree_layout)


@fault(breaks="POS-1", first_seen_at="positions")
def position_by_index(engine: Any) -> None:
    """Node i is at L + i, as if the tree were a chain."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        _, ancestors = original(parents, committed_len)
        return committed_len + np.arange(len(parents)), ancestors

    _wrap(engine, tree_layout=tree_layout)


@fault(breaks="POS-1", first_seen_at="positions")
def drafts_high(engine: Any) -> None:
    """Every node but the root is one too high."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions + (np.arange(len(parents)) > 0), ancestors

    _wrap(engine, tree_layout=tree_layout)


@fault(breaks="MASK-2", first_seen_at="mask")
def sibling_visible(engine: Any) -> None:
    """A node sees its earlier siblings."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        i, j = np.indices(ancestors.shape)
        return positions, ancestors | ((parents[i] == parents[j]) & (j < i))

    _wrap(engine, tree_layout=tree_layout)


@fault(breaks="MASK-2", first_seen_at="mask")
def visibility_transposed(engine: Any) -> None:
    """A node sees its descendants instead of its ancestors."""

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions, ancestors.T.copy()

    _wrap(engine, tree_layout=tree_layout)


@fault(breaks="MASK-2", first_seen_at="mask", case="best-first", until="round6")
def first_mask_of_a_size(engine: Any) -> None:
    """Every tree of a size gets the mask of the first one."""
    masks: dict[int, Any] = {}

    def tree_layout(original: Any, parents: Any, committed_len: int) -> Any:
        positions, ancestors = original(parents, committed_len)
        return positions, masks.setdefault(len(parents), ancestors)

    _wrap(engine, tree_layout=tree_layout)


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

    _wrap(engine, verify_attn=verify_attn)


# Cache and slots


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv")
def no_compaction(engine: Any) -> None:
    """Rows stay where they are, and L grows."""

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        with _rows_restored(cache, slice(None)):
            return original(cache, *rest)

    _wrap(engine, commit_rows=commit_rows)


@fault(breaks="COMMIT-1", first_seen_at="cache_k_pe")
def only_c_kv_moves(engine: Any) -> None:
    """The k_pe columns stay behind."""

    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        with _rows_restored(cache, slice(cache.latent_len, None)):
            return original(cache, *rest)

    _wrap(engine, commit_rows=commit_rows)


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
                keys = cache.rows[:, _physical(cache, destination), cache.latent_len :]
                keys[:] = engine._kernels.rotate(keys[:, None], cos, sin)[:, 0]
        return moves

    _wrap(engine, rotary_angles=rotary_angles, commit_rows=commit_rows)


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv")
def last_move_skipped(engine: Any) -> None:
    """The deepest accepted node is not moved."""

    def commit_rows(original: Any, cache: Any, path: Any, accept_len: Any, length: int) -> Any:
        original(cache, path, np.maximum(accept_len - 1, 1), length)
        with _rows_restored(cache, slice(None)):
            return original(cache, path, accept_len, length)

    _wrap(engine, commit_rows=commit_rows)


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv")
def rows_through_bfloat16(engine: Any) -> None:
    """Moved rows lose bits on the way: no pure copy."""
    _wrap(engine, commit_rows=_moved_through(ml_dtypes.bfloat16))


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv", case="")
def rows_through_float16(engine: Any) -> None:
    """The same with more bits left."""
    _wrap(engine, commit_rows=_moved_through(np.float16))


def _moved_through(dtype: Any) -> Callable[..., Any]:
    def commit_rows(original: Any, cache: Any, *rest: Any) -> Any:
        moves = original(cache, *rest)
        for _, destination in moves[moves[:, 0] >= 0].tolist():
            row = cache.rows[:, _physical(cache, destination)]
            row[:] = row.astype(dtype).astype(np.float32)
        return moves

    return commit_rows


@fault(breaks="COMMIT-1", first_seen_at="cache_c_kv", until="chunk0")
def one_layer_for_all(engine: Any) -> None:
    """Cache[layer] -> cache[0]."""

    def append_latents(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
        return original(cache, 0, *rest)

    def verify_attn(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
        return original(cache, 0, *rest)

    _wrap(engine, append_latents=append_latents, verify_attn=verify_attn)


@fault(breaks="MLA-3", first_seen_at="scores", until="chunk0")
def pages_contiguous(engine: Any) -> None:
    """Rows past a page's end go to the physical neighbour, not to the table's next page."""

    def append_latents(
        original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> None:
        rows = _physical(cache, int(slots[0])) + np.arange(len(slots))
        rows %= cache.rows.shape[1]
        cache.rows[layer, rows] = np.concatenate([c_kv, k_pe], axis=-1)

    _wrap(engine, append_latents=append_latents)


@fault(breaks="MLA-3", first_seen_at="scores", until="chunk0")
def prefill_rows_reversed(engine: Any) -> None:
    """The rows of a chunk are written back to front."""

    def append_latents(original: Any, cache: Any, layer: int, slots: Any, *rest: Any) -> Any:
        return original(cache, layer, slots[::-1] if slots[0] == 0 else slots, *rest)

    _wrap(engine, append_latents=append_latents)


@fault(breaks="MLA-3", first_seen_at="scores", case="chain")
def four_rows_written(engine: Any) -> None:
    """Of a tree only the first four rows are written."""

    def append_latents(
        original: Any, cache: Any, layer: int, slots: Any, c_kv: Any, k_pe: Any
    ) -> Any:
        n = 4 if 4 < len(slots) < 13 else len(slots)
        return original(cache, layer, slots[:n], c_kv[:n], k_pe[:n])

    _wrap(engine, append_latents=append_latents)


@fault(breaks="MLA-3", first_seen_at="scores", case="ar")
def lone_root_not_written(engine: Any) -> None:
    """A forward of one row does not append it."""

    def append_latents(original: Any, cache: Any, layer: int, slots: Any, *rest: Any) -> Any:
        return None if len(slots) == 1 else original(cache, layer, slots, *rest)

    _wrap(engine, append_latents=append_latents)


# Decisions


@fault(breaks="ACC-2", first_seen_at="bonus", until="round1")
def bonus_of_last_row(engine: Any) -> None:
    """The bonus is the target of the last node of the tree, not of the path."""

    def accept_walk(original: Any, tokens: Any, parents: Any, targets: Any, *rest: Any) -> Any:
        walk = original(tokens, parents, targets, *rest)
        return walk._replace(bonus=targets[-1:])

    _wrap(engine, accept_walk=accept_walk)


@fault(breaks="ACC-1", first_seen_at="path")
def first_child_only(engine: Any) -> None:
    """Of each node's children only the first can be accepted."""

    def accept_walk(original: Any, tokens: Any, parents: Any, *rest: Any) -> Any:
        first = np.array([p == -1 or p not in parents[:i] for i, p in enumerate(parents)])
        return original(np.where(first, tokens, -1), parents, *rest)

    _wrap(engine, accept_walk=accept_walk)


@fault(breaks="ACC-1", first_seen_at="path")
def first_child_accepted(engine: Any) -> None:
    """The first child of the root is always accepted."""

    def accept_walk(original: Any, tokens: Any, parents: Any, targets: Any, *rest: Any) -> Any:
        targets = targets.copy()
        targets[0] = tokens[1] if len(tokens) > 1 else targets[0]
        return original(tokens, parents, targets, *rest)

    _wrap(engine, accept_walk=accept_walk)


@fault(breaks="COMMIT-2", first_seen_at="committed_len")
def length_grows_by_tree(engine: Any) -> None:
    """L += M."""
    _on_commit(engine, lambda tree, path: range(len(tree)))


@fault(breaks="COMMIT-2", first_seen_at="committed_len")
def root_not_counted(engine: Any) -> None:
    """L += accepted drafts."""
    _on_commit(engine, lambda tree, path: path[1:])


@fault(breaks="COMMIT-2", first_seen_at="root")
def root_from_path(engine: Any) -> None:
    """The next root is the last accepted draft, not the bonus."""

    def change(session: Any) -> None:
        advance = session._advance

        def faulty(tokens: Any, positions: Any, root: int) -> None:
            in_round = len(session._tokens) > 0  # not the prompt
            advance(tokens, positions, tokens[-1] if in_round else root)

        session._advance = faulty

    _on_open(engine, change)


# Model


@fault(breaks="MLA-4", first_seen_at="scores", until="chunk0")
def scale_from_latent(engine: Any) -> None:
    """The softmax scale comes from kv_lora_rank + rope, not from nope + rope."""

    def change(weights: Any) -> Any:
        attention = weights.layers[0].attention
        return replace(weights, softmax_scale=float(len(_kv_a(attention))) ** -0.5)

    _on_load(engine, change)


@fault(breaks="FWD-4", first_seen_at="embedding", until="chunk0")
def no_embedding_at_zero(engine: Any) -> None:
    """The embedding of the row at position 0 is zero."""
    at: list[Any] = []

    def rotary_angles(original: Any, positions: Any, *rest: Any) -> Any:
        at[:] = [positions]
        return original(positions, *rest)

    def embed(original: Any, table: Any, tokens: Any) -> Any:
        return original(table, tokens) * (at[0] != 0)[:, None]

    _wrap(engine, rotary_angles=rotary_angles, embed=embed)


@fault(breaks="MLA-7", first_seen_at="q_pe", until="chunk0")
def half_split_pairs(engine: Any) -> None:
    """Pairs (i, i + r/2) where the model has (2i, 2i + 1)."""

    def unsplit(rope: Any) -> Any:
        """Half-split rows back in the checkpoint's order: firsts and seconds by turns."""
        return np.stack(np.split(rope, 2, axis=-2), axis=-2).reshape(rope.shape)

    def change(attention: Any) -> Any:
        r = len(_kv_a(attention)) - len(attention.kv_norm)
        h, _, d = attention.w_kc.shape
        qkv_a = np.concatenate([attention.qkv_a[:-r], unsplit(attention.qkv_a[-r:])])
        b = attention.q_b.reshape(h, d + r, -1)
        b = np.concatenate([b[:, :d], unsplit(b[:, d:])], axis=1).reshape(h * (d + r), -1)
        return replace(attention, qkv_a=qkv_a, q_b=b)

    _on_load(engine, lambda weights: _every_attention(weights, change))


@fault(breaks="MLA-7", first_seen_at="k_pe", until="chunk0")
def k_pe_of_wrong_columns(engine: Any) -> None:
    """k_pe is taken from the end of the latent."""

    def change(attention: Any) -> Any:
        r = len(_kv_a(attention)) - len(attention.kv_norm)
        rows = attention.qkv_a
        return replace(attention, qkv_a=np.concatenate([rows[:-r], rows[-2 * r : -r]]))

    _on_load(engine, lambda weights: _every_attention(weights, change))


@fault(breaks="MLA-2", first_seen_at="c_kv", until="chunk0")
def columns_swapped(engine: Any) -> None:
    """The columns are taken as [k_pe | c_kv]."""

    def change(attention: Any) -> Any:
        kv_a = _kv_a(attention)
        r = len(kv_a) - len(attention.kv_norm)
        rows = attention.qkv_a[: -len(kv_a)]
        return replace(attention, qkv_a=np.concatenate([rows, np.roll(kv_a, -r, axis=0)]))

    _on_load(engine, lambda weights: _every_attention(weights, change))


@fault(breaks="MOE-1", first_seen_at="router_scores", until="chunk0")
def softmax_router(engine: Any) -> None:
    """Softmax where the model scores with sigmoid."""

    def router_scores(original: Any, x: Any, gate: Any, _: str) -> Any:
        return original(x, gate, "softmax")

    _wrap(engine, router_scores=router_scores)


@fault(breaks="MOE-2", first_seen_at="expert_ids", until="chunk0")
def groups_ignored(engine: Any) -> None:
    """All groups stay eligible."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        return original(scores, bias, config.replace(topk_group=config.n_group))

    _wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-2", first_seen_at="expert_ids", case="")
def groups_masked_with_zero(engine: Any) -> None:
    """Dropped groups compete with 0, not -inf. Only negative biased scores show it."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        n, e = scores.shape
        grouped = (scores + bias).reshape(n, config.n_group, -1)
        best = np.argsort(-np.sort(grouped)[..., -2:].sum(-1), kind="stable")
        kept = np.zeros((n, config.n_group, 1), bool)
        np.put_along_axis(kept[..., 0], best[:, : config.topk_group], True, axis=1)
        eligible = np.where(kept, grouped, 0).reshape(n, e)
        ids = np.argsort(-eligible, axis=-1, kind="stable")[:, : config.num_experts_per_tok]
        ids.sort(axis=-1)
        return ids, original(scores, bias, config)[1]

    _wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-3", first_seen_at="expert_weights", until="chunk0")
def weights_from_biased(engine: Any) -> None:
    """The correction bias is in the weights."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        ids, _ = original(scores, bias, config)
        weights = np.take_along_axis(scores + bias, ids, axis=-1)
        if config.norm_topk_prob:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        return ids, weights * np.float32(config.routed_scaling_factor)

    _wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-3", first_seen_at="expert_weights", until="chunk0")
def scaled_twice(engine: Any) -> None:
    """routed_scaling_factor is applied twice."""

    def choose_experts(original: Any, scores: Any, bias: Any, config: Any) -> Any:
        ids, weights = original(scores, bias, config)
        return ids, weights * np.float32(config.routed_scaling_factor)

    _wrap(engine, choose_experts=choose_experts)


@fault(breaks="MOE-3", first_seen_at="mlp_out", until="chunk0")
def first_weight_for_all(engine: Any) -> None:
    """Every chosen expert gets the first one's weight."""

    def experts(original: Any, x: Any, ids: Any, weights: Any, *rest: Any) -> Any:
        return original(x, ids, np.broadcast_to(weights[:, :1], weights.shape), *rest)

    _wrap(engine, experts=experts)


@fault(breaks="MOE-4", first_seen_at="mlp_out", until="chunk0")
def shared_expert_missing(engine: Any) -> None:
    """Only the routed experts are added."""

    def change(weights: Any) -> Any:
        layers = tuple(
            replace(one, mlp=replace(one.mlp, shared=None)) if hasattr(one.mlp, "shared") else one
            for one in weights.layers
        )
        return replace(weights, layers=layers)

    _on_load(engine, change)


@fault(breaks="NORM-1", first_seen_at="final_hidden", until="chunk0")
def final_norm_twice(engine: Any) -> None:
    """The final norm is applied twice."""
    final: list[Any] = []

    def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
        once = original(x, weight, eps)
        return original(once, weight, eps) if weight is final[0] else once

    _wrap(engine, rms_norm=rms_norm)

    def change(weights: Any) -> Any:
        final[:] = [weights.final_norm]
        return weights

    _on_load(engine, change)


@fault(breaks="NORM-1", first_seen_at="q_nope", until="chunk0")
def latent_eps_of_other_norms(engine: Any) -> None:
    """Rms_norm_eps in the q_a and kv_a norms. Only an eps of some size shows it."""
    others: list[float] = []

    def eps_of(is_latent: bool, eps: float) -> float:
        if not is_latent:  # the input norm comes first
            others[:] = [eps]
        return others[0]

    _with_eps(engine, eps_of)


@fault(breaks="NORM-1", first_seen_at="q_nope", case="")
def main_eps(engine: Any) -> None:
    """1e-6 in the input, post-attention and final norms. Only an eps of some size shows it."""
    _with_eps(engine, lambda is_latent, eps: eps if is_latent else 1e-6)


def _with_eps(engine: Any, eps_of: Callable[[bool, float], float]) -> None:
    """Each norm's eps is eps_of(whether it is a latent's, the right one)."""
    latent: list[Any] = []

    def rms_norm(original: Any, x: Any, weight: Any, eps: float) -> Any:
        return original(x, weight, eps_of(any(weight is one for one in latent), eps))

    _wrap(engine, rms_norm=rms_norm)

    def change(weights: Any) -> Any:
        for layer in weights.layers:
            latent.extend((layer.attention.q_norm, layer.attention.kv_norm))
        return weights

    _on_load(engine, change)


@fault(breaks="ACC-4", first_seen_at="path", case="")
def limit_ignored(engine: Any) -> None:
    """A round emits all that it accepts, whatever the limit."""
    _on_open(engine, _limited(lambda limit: NO_LIMIT))


@fault(breaks="ACC-4", first_seen_at="path", case="")
def no_stop_tokens(engine: Any) -> None:
    """Of a limit only the length counts."""
    _on_open(engine, _limited(lambda limit: EmitLimit(max_emitted=limit.max_emitted)))


@fault(breaks="ACC-4", first_seen_at="path", case="")
def no_max_emitted(engine: Any) -> None:
    """Of a limit only the stop tokens count."""
    _on_open(engine, _limited(lambda limit: EmitLimit(limit.stop_tokens)))


def _limited(change: Callable[[EmitLimit], EmitLimit]) -> Callable[[Any], None]:
    def on_open(session: Any) -> None:
        accept, round_ = session.accept, session.round

        def faulty_accept(tree: Any, *rest: Any, limit: EmitLimit = NO_LIMIT) -> Any:
            return accept(tree, *rest, limit=change(limit))

        def faulty_round(tree: Any, *, limit: EmitLimit = NO_LIMIT, **rest: Any) -> Any:
            return round_(tree, limit=change(limit), **rest)

        session.accept, session.round = faulty_accept, faulty_round

    return on_open


@fault(breaks="FWD-1", first_seen_at="root", case="")
def last_maximum(engine: Any) -> None:
    """Of equal top logits the highest id wins. Only an exact tie shows it."""

    def argmax(original: Any, logits: Any) -> Any:
        return logits.shape[-1] - 1 - original(logits[..., ::-1])

    _wrap(engine, argmax=argmax)


@fault(breaks="SLOT-2", first_seen_at="untouched")
def writes_committed_row(engine: Any) -> None:
    """A forward leaves a mark in the first committed row."""
    _wrap(engine, verify_attn=_marking(lambda x: x + np.float32(0.5)))


@fault(breaks="SLOT-2", first_seen_at="untouched", case="")
def flips_last_bit(engine: Any) -> None:
    """A forward changes the last bit of the first committed row."""
    _wrap(engine, verify_attn=_marking(lambda x: np.nextafter(x, np.float32(np.inf))))


def _marking(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def verify_attn(
        original: Any, cache: Any, layer: int, q_latent: Any, q_pe: Any, seen: Any, *rest: Any
    ) -> Any:
        out = original(cache, layer, q_latent, q_pe, seen, *rest)
        if seen.open_len and layer == len(cache.rows) - 1:  # nobody reads it any more
            row = cache.rows[layer, _physical(cache, 0)]
            row[0] = change(row[0])
        return out

    return verify_attn


def _on_commit(engine: Any, nodes: Callable[[Any, Any], Any]) -> None:
    """The session's books take `nodes(tree, path)` for the path."""

    def change(session: Any) -> None:
        trees: list[Any] = []
        advance, verify, round_ = session._advance, session.verify, session.round

        def watched_verify(tree: Any, **rest: Any) -> Any:
            trees[:] = [tree]
            return verify(tree, **rest)

        def watched_round(tree: Any, **rest: Any) -> Any:
            trees[:] = [tree]
            return round_(tree, **rest)

        def faulty(tokens: Any, positions: Any, root: int) -> None:
            if trees:
                tree = trees.pop()
                path = [tree.tokens.index(token) for token in tokens]
                kept = [*nodes(tree, path)]
                length = positions[0]
                tokens, positions = [tree.tokens[i] for i in kept], [length + i for i in kept]
            advance(tokens, positions, root)

        session._advance, session.verify, session.round = faulty, watched_verify, watched_round

    _on_open(engine, change)


@contextmanager
def _rows_restored(cache: Any, columns: slice) -> Iterator[None]:
    """These columns of the cache are afterwards what they were before."""
    before = cache.rows[..., columns].copy()
    yield
    cache.rows[..., columns] = before


# No faults, but what rounding may do where a decision is thin


def make_swapped_tokens(pairs: int) -> Any:
    """Token i and token i + pairs trade their logits."""
    engine = load_engine("host")

    def change(weights: Any) -> Any:
        order = np.arange(len(weights.lm_head))
        order[: 2 * pairs] = np.roll(order[: 2 * pairs], pairs)
        return replace(weights, lm_head=weights.lm_head[order])

    _on_load(engine, change)
    return engine


def make_swapped_experts() -> Any:
    """Experts 2i and 2i + 1 trade their router scores."""
    engine = load_engine("host")

    def change(weights: Any) -> Any:
        def swapped(layer: Any) -> Any:
            if not hasattr(layer.mlp, "gate"):
                return layer
            e = len(layer.mlp.gate)
            return replace(layer, mlp=replace(layer.mlp, gate=layer.mlp.gate[np.arange(e) ^ 1]))

        return replace(weights, layers=tuple(swapped(layer) for layer in weights.layers))

    _on_load(engine, change)
    return engine
