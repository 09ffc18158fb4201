"""Whether a bundle agrees with itself: each answer of a case with what it follows from.

A record that contradicts itself can be met by no engine, and would be told as the fault of the one
that is judged. Held together is what follows from other arrays of the file by a rule alone, bit for
bit: indices, decisions, copies, and how firm decisions are. What takes the model's arithmetic to
find again is not: that is to record the bundle anew (`kdtr golden-check`, `kdtr adopt`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtr.conformance.bundle_check import EXPERT_GAP, stage_name
from kdtr.conformance.bundle_margins import check_margins, thin_rows_of
from kdtr.conformance.bundle_point import Contradiction, RecordedPoint
from kdtr.conformance.case import CaseInput
from kdtr.conformance.draft_rules import not_best_first
from kdtr.conformance.expert_choice import choice_gap, choose_experts
from kdtr.conformance.tree_rules import limited_walk, node_depths, tree_mask
from kdtr.contract import NO_LIMIT, BundleError, ModelConfig

_CACHED = {"cache_c_kv": "c_kv", "cache_k_pe": "k_pe"}  # and the stage whose rows it keeps
_TO_DO = "no engine can meet both: record the bundle again with `kdtr golden`, or do not trust it"


@dataclass(frozen=True, slots=True, eq=False)
class _Follows:
    """What an array of a point must hold, what that follows from, and the rule."""

    name: str
    array: np.ndarray
    by: str
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """A session before a point, as the record has it: the root, and the committed rows.

    point  where that is recorded
    rows   what is recorded there of the cache's numbers, by stage
    """

    root: int | None
    point: str = "input"
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    rows: Mapping[str, np.ndarray] = field(default_factory=dict)


def check_agreement(
    config: ModelConfig,
    case: CaseInput,
    thin: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    weights: Mapping[str, np.ndarray],
) -> None:
    """`tensors` are all of `expect/`, of the right shapes (bundle_check.py); `thin` the metadata's.

    Raises BundleError naming the case, the point, the two that contradict each other, and the rule.
    """
    held, needed = _Held(case.root), 0
    counted: Counter[str] = Counter()
    try:
        for name in case.points():
            point = RecordedPoint.of(case, name, len(held.tokens), tensors)
            with np.errstate(over="ignore", invalid="ignore"):  # numbers may be of any size
                for must in _follows(config, point, held, weights):
                    _hold(point, must)
                check_margins(config, point)
            counted.update(thin_rows_of(point))
            needed = max(needed, point.committed_len + point.most_rows)
            held = _after(point)
        name = "input"
        if case.max_len != needed:
            raise Contradiction(
                f"max_len = {case.max_len}, but by the rows of its points it is {needed} (SLOT-3)"
            )
        name = "metadata"
        if thin != dict(counted):
            raise Contradiction(f"thin = {thin}, but by the margins it is {dict(counted)} (NUM-2)")
    except Contradiction as error:
        raise BundleError(f"case {case.alias}, {name}: {error}; {_TO_DO}") from None


def _follows(
    config: ModelConfig, point: RecordedPoint, held: _Held, weights: Mapping[str, np.ndarray]
) -> Iterator[_Follows]:
    """In an order in which each follows from what is held already."""
    yield from _question(point, held)
    yield from _forward(point, weights)
    for layer in range(config.num_hidden_layers):
        _check_hidden(point, layer)
        if not config.is_dense(layer):
            yield from _experts(config, point, layer, weights)
    yield from _decisions(point)
    yield from _cache(point, held)


def _question(point: RecordedPoint, held: _Held) -> Iterator[_Follows]:
    """A round's tree begins with the root, and is the one to build."""
    entry = point.entry
    if entry is None:
        return
    if point.tokens[0] != held.root:
        raise Contradiction(
            f"the tree's root is token {point.tokens[0]}, but by the root of {held.point} it is "
            f"{held.root} (FWD-3)"
        )
    if entry.draft_logits is not None:
        wrong = not_best_first(entry.draft_logits, entry.budget or 0, entry.tree)
        if wrong is not None:
            raise Contradiction(f"{wrong} (TREE-3)")
        for name in ("parents", "tokens"):
            right = np.array(getattr(point, name))
            yield _Follows(f"build_{name}", right, f"input {name}", "TREE-3")


def _forward(point: RecordedPoint, weights: Mapping[str, np.ndarray]) -> Iterator[_Follows]:
    length, is_chunk = point.committed_len, point.entry is None
    of = f"the {'prompt' if is_chunk else 'tree'} at L = {length}"
    positions = length + np.array(node_depths(point.parents))
    yield _Follows("positions", positions, of, "FWD-1" if is_chunk else "POS-1")
    mask = tree_mask(point.parents, length)
    yield _Follows("mask", mask, of, "FWD-1" if is_chunk else "MASK-1, MASK-2")
    yield _Follows("slots", length + np.arange(len(point)), of, "SLOT-1")
    if point.get("embedding") is not None:
        table = weights["model.embed_tokens.weight"]
        rows = table[list(point.tokens)].astype(np.float64)
        yield _Follows("embedding", rows, "tokens and the model's embed_tokens", "FWD-4")


def _check_hidden(point: RecordedPoint, layer: int) -> None:
    """Of scores [n, h, s] there is none where the mask hides the slot, and one elsewhere."""
    mask, scores = point["mask"], point.get("scores", layer)
    if scores is None:
        return
    wrong = np.argwhere(np.isneginf(scores) == mask[:, None, :])
    if len(wrong):
        row, head, slot = wrong[0].tolist()
        seen = bool(mask[row, slot])
        raise Contradiction(
            f"{stage_name('scores', layer)}[{row}, {head}, {slot}] = {scores[row, head, slot]:.6g},"
            f" but by mask[{row}, {slot}] = {seen} it is {'finite' if seen else '-inf'} (MASK-2)"
        )


def _experts(
    config: ModelConfig, point: RecordedPoint, layer: int, weights: Mapping[str, np.ndarray]
) -> Iterator[_Follows]:
    scores = stage_name("router_scores", layer)
    bias = weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"].astype(np.float64)
    by, biased = f"{scores} and the correction bias", point[scores] + bias
    yield _Follows(stage_name("expert_ids", layer), choose_experts(config, biased), by, "MOE-2")
    yield _Follows(stage_name(EXPERT_GAP, layer), choice_gap(config, biased), by, "MOE-2")


def _decisions(point: RecordedPoint) -> Iterator[_Follows]:
    """What is chosen, and where the session is then. There is one target, also of a tie: ACC-1."""
    best = point["logits"].argmax(axis=1)  # the first of equals
    by, length = "logits (of the highest the lowest id)", point.committed_len
    if point.entry is None:
        yield _Follows("root", best[-1], f"the last row of {by}", "FWD-1")
    else:
        yield _Follows("targets", best, by, "ACC-1")
        tree, limit = point.entry.tree, point.entry.limit
        path, bonus = limited_walk(tree, best.tolist(), limit)
        by, rule = "the walk over targets", "ACC-1"
        if limit != NO_LIMIT:
            by, rule = f"{by} up to the round's limit", "ACC-4"
        yield _Follows("path", np.array(path), by, rule)
        yield _Follows("bonus", np.array(bonus), by, "ACC-2" if limit == NO_LIMIT else rule)
        emitted = np.array([*(tree.tokens[node] for node in path[1:]), bonus])
        yield _Follows("emitted", emitted, "path and bonus", "ACC-3")
        moves = np.array([(length + node, length + k) for k, node in enumerate(path)])
        yield _Follows("moves", moves, f"path at L = {length}", "COMMIT-1")
        yield _Follows("root", np.array(bonus), "bonus", "COMMIT-2")
    n, rule = len(point.path), "FWD-1" if point.entry is None else "COMMIT-2"
    yield _Follows("committed_len", np.array(length + n), f"{n} rows more than {length}", rule)


def _cache(point: RecordedPoint, held: _Held) -> Iterator[_Follows]:
    """What is cached is what was, and the committed rows after it."""
    for name, before in (("tokens", held.tokens), ("positions", held.positions)):
        rows = np.concatenate([before, point[name][point.path]])
        yield _Follows(f"cache_{name}", rows, f"the {name} that were committed", "COMMIT-3")
    for name, computed in _CACHED.items():
        cache = point.get(name)
        if cache is None:
            continue
        right = cache.copy()
        if name in held.rows:
            right[:, : point.committed_len] = held.rows[name]
        for layer in range(len(cache)):
            shown = point.get(computed, layer)
            if shown is not None:
                right[layer, point.committed_len :] = shown[point.path]
        yield _Follows(name, right, f"the rows of {computed} that were committed", "COMMIT-1")


def _after(point: RecordedPoint) -> _Held:
    rows = {name: cache for name in _CACHED if (cache := point.get(name)) is not None}
    tokens, positions = point["cache_tokens"], point["cache_positions"]
    return _Held(int(point["root"]), point.name, tokens, positions, rows)


def _hold(point: RecordedPoint, must: _Follows) -> None:
    """Raises Contradiction: the first element that differs, or all where the lengths do."""
    found, right, at = point[must.name], must.array, ""
    if np.array_equal(found, right):
        return
    if found.shape == right.shape and right.ndim:
        index = tuple(np.argwhere(found != right)[0].tolist())
        at, found, right = f"[{', '.join(map(str, index))}]", found[index], right[index]
    raise Contradiction(
        f"{must.name}{at} = {found.tolist()}, but by {must.by} it is {right.tolist()} ({must.rule})"
    )
