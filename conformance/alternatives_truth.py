"""The truth of a case under other choices of experts: the reference, told what to choose where.

Where a router's choice is thin an engine may choose otherwise (NUM-2). What follows is computed
here and not excused: the same tokens, positions, masks and committed paths as in the record, the
given choices forced, every other choice made anew from the scores as they are then.

Products go through BLAS, for speed; those that decide, of the router and of the head, keep the
fixed order, so that equal rows of weights give equal scores and exact ties stay exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from kdtr.conformance.bundle import Expectation, GoldenCase
from kdtr.conformance.bundle_check import EXPERT_GAP, stage_name
from kdtr.conformance.drive import Mode
from kdtr.contract import TRACED, Array, ModelConfig, stage_order
from kdtr.reference.accept import accept, commit_moves, emitted
from kdtr.reference.arithmetic import FAST, FIXED
from kdtr.reference.cache import AppendCache, LatentCache
from kdtr.reference.forward import forward
from kdtr.reference.moe import choice_gap
from kdtr.reference.weights import ModelWeights, MoeWeights

Place = tuple[str, int, int]  # point, layer, row
Choices = Mapping[Place, tuple[int, ...]]  # the experts chosen there, ascending

# What is kept of a forward when the engine shows no stages: scores are large.
_DECIDE = frozenset({"slots", "router_scores", "expert_ids", "logits"})
_CACHED = ("cache_c_kv", "cache_k_pe")
_DECIDING = ("nm,me->ne", "nm,mw->nw")  # the router's product and the head's (moe.py, forward.py)


class AlternativeTruth:
    """Of one case. What was computed is kept: another choice late in a case reruns its end alone.

    traced  whether the engine shows stages; else those that decide are kept, and no others
    n_rows  rows computed so far, the measure of what it cost
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        case: GoldenCase,
        *,
        traced: bool,
    ) -> None:
        self._config = config
        self._weights = weights
        self._case = case
        self._kept = TRACED if traced else _DECIDE
        self._points = case.inputs.points()
        self._forwards: dict[frozenset[object], _Forward] = {}
        self.n_rows = 0

    def expectation(self, point: str, choices: Choices, mode: Mode) -> Expectation:
        """What the record would hold of the point, had these choices been made up to there.

        Pinned modes commit the path of the record, whatever is accepted. In the others an engine
        lives with its own walk; where that is another one its cache is left out, for the bounds
        are those of the record's rows. Stages that are not kept are the record's.
        """
        golden, done = self._case.expectation(point), self._forward(point, choices)
        tensors = {name: array for name, array in done.arrays.items() if name.endswith(EXPERT_GAP)}
        arrays = {**done.arrays, **self._walk(point, done, mode)}
        elsewhere = not mode.pinned and not np.array_equal(arrays.get("path", done.path), done.path)
        for stage, layer in stage_order(self._config.num_hidden_layers):
            recorded, name = golden.get(stage.name, layer), stage_name(stage.name, layer)
            if recorded is not None and not (elsewhere and name in _CACHED):
                tensors[name] = np.asarray(arrays.get(name, recorded))
        return golden.replaced(tensors)

    def _forward(self, point: str, choices: Choices) -> _Forward:
        i = self._points.index(point)
        until = {at: ids for at, ids in choices.items() if at[0] in self._points[: i + 1]}
        key = frozenset([point, *until.items()])
        if key not in self._forwards:
            if i:
                before = self._forward(self._points[i - 1], until).after
            else:
                before = AppendCache(self._config, self._case.inputs.max_len)
            self._forwards[key] = self._run(point, deepcopy(before), until)
        return self._forwards[key]

    def _run(self, point: str, cache: LatentCache, choices: Choices) -> _Forward:
        golden = self._case.expectation(point)
        tokens, positions, mask = (golden.get(name) for name in ("tokens", "positions", "mask"))
        assert tokens is not None
        assert positions is not None
        assert mask is not None
        here = {at[1:]: ids for at, ids in choices.items() if at[0] == point}
        shown = _Shown(self._config, self._weights, self._kept)
        forward(_Choosing(here), self._config, self._weights, cache, tokens, positions, mask, shown)
        self.n_rows += len(tokens)
        path = golden.get("path")
        return _Forward(
            shown.arrays, cache, tuple(range(len(tokens))) if path is None else tuple(path.tolist())
        )

    def _walk(self, point: str, done: _Forward, mode: Mode) -> dict[str, np.ndarray]:
        """The stages from targets on."""
        targets = done.arrays["logits"].argmax(axis=1)  # the first of equals: the lowest id
        if point.startswith("chunk"):
            root = {"root": targets[-1]} if "prefill" in mode.verbs else {}
            return {**root, **_cached(done.after)}
        entry = self._case.inputs.rounds[int(point.removeprefix("round"))]
        acceptance = accept(entry.tree, targets.tolist(), limit=entry.limit)
        length = int(done.arrays["slots"][0])
        walk = {
            "targets": targets,
            "path": np.array(acceptance.path),
            "bonus": np.array(acceptance.bonus),
            "emitted": np.array(emitted(entry.tree, acceptance)),
            "moves": np.array(commit_moves(acceptance.path, length)),
        }
        if mode.pinned:
            return {**walk, **_cached(done.after)}
        after = done.committed(acceptance.path)
        root = {"root": walk["bonus"], "committed_len": np.array(after.committed_len)}
        return {**walk, **root, **_cached(after)}


@dataclass(slots=True)
class _Forward:
    """Its stages by name, the cache with its rows uncommitted, and the path of the record."""

    arrays: dict[str, np.ndarray]
    cache: LatentCache
    path: tuple[int, ...]
    _after: LatentCache | None = field(default=None, init=False)

    @property
    def after(self) -> LatentCache:
        if self._after is None:
            self._after = self.committed(self.path)
        return self._after

    def committed(self, path: tuple[int, ...]) -> LatentCache:
        cache = deepcopy(self.cache)
        cache.commit(path)
        return cache


class _Choosing:
    """The truth's arithmetic, but for the choices [layer, row] that are given."""

    name = "choosing"
    sum, exp, log = FAST.sum, FAST.exp, FAST.log

    def __init__(self, given: Mapping[tuple[int, int], tuple[int, ...]]) -> None:
        self._given = given

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (FIXED if spec in _DECIDING else FAST).contract(spec, x, y)

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        if stage != "expert_ids":
            return x
        x = x.copy()
        for (at, row), ids in self._given.items():
            if at == layer:
                x[row] = ids
        return x


class _Shown:
    """A trace that keeps some stages, and how firm each choice of experts is."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, kept: frozenset[str]) -> None:
        self._kept = kept
        self._config = config
        self._weights = weights
        self.arrays: dict[str, np.ndarray] = {}

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        if stage in self._kept:
            self.arrays[stage_name(stage, layer)] = np.array(array)
        if stage == "router_scores":
            assert layer is not None
            moe = self._weights.layers[layer].mlp
            assert isinstance(moe, MoeWeights)
            gap = choice_gap(self._config, np.asarray(array), moe.bias)
            self.arrays[stage_name(EXPERT_GAP, layer)] = gap


def _cached(cache: LatentCache) -> dict[str, np.ndarray]:
    held = cache.snapshot()
    return {
        "cache_tokens": held.tokens,
        "cache_positions": held.positions,
        "cache_c_kv": held.c_kv,
        "cache_k_pe": held.k_pe,
    }
