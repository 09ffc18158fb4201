"""What the cache holds at a point of a case, and what it would hold if commits went wrong.

The rounds before the point are computed again, so that also the rows of rejected nodes are known:
a wrong commit keeps them, and a wrong mask reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType

import ml_dtypes
import numpy as np

from kdtr.conformance.bundle import Expectation
from kdtr.conformance.diagnosis_forward import (
    ROWS,
    Array,
    Setting,
    Workings,
    append,
    forward,
    frequencies,
    turned,
)
from kdtr.conformance.diagnosis_scene import Scene
from kdtr.contract import ModelConfig

_MOST_WORK = 5e8  # multiplications of one guess: it shall take moments


@dataclass(frozen=True, slots=True, eq=False)
class Commit:
    """One commit as it should be: rows [l, S, c + r], the path's at slots L + path[k]."""

    config: ModelConfig
    rows: Array
    committed_len: int
    path: tuple[int, ...]
    n: int
    unwritten: float = 0.0

    def moves(self) -> tuple[Array, Array]:
        """Source and destination slots of COMMIT-1."""
        path = np.array(self.path, dtype=int)
        return self.committed_len + path, self.committed_len + np.arange(len(path))


Keep = Callable[[Commit], Array]


def kept(commit: Commit) -> Array:
    """COMMIT-1."""
    source, destination = commit.moves()
    rows = commit.rows.copy()
    rows[:, destination] = commit.rows[:, source]
    return rows


@dataclass(frozen=True, slots=True)
class WrongCommit:
    says: str
    keep: Keep
    rules: tuple[str, ...] = ("COMMIT-1",)
    specific: int = 2


def _columns(keys: bool) -> Keep:
    """Only the latents move, or only the keys."""

    def keep(commit: Commit) -> Array:
        rows, c = kept(commit), commit.config.kv_lora_rank
        left = slice(None, c) if keys else slice(c, None)
        rows[..., left] = commit.rows[..., left]
        return rows

    return keep


def _layers(pick: slice) -> Keep:
    def keep(commit: Commit) -> Array:
        rows = commit.rows.copy()
        rows[pick] = kept(commit)[pick]
        return rows

    return keep


def _of_path(select: Callable[[Commit, Array, Array], tuple[Array, Array]]) -> Keep:
    """Other moves, all through a buffer."""

    def keep(commit: Commit) -> Array:
        source, destination = select(commit, *commit.moves())
        rows = commit.rows.copy()
        n_slots = rows.shape[1]
        fits = (source >= 0) & (source < n_slots) & (destination < n_slots)
        rows[:, destination[fits]] = commit.rows[:, source[fits]]
        return rows

    return keep


def _one_by_one(order: Callable[[Array], Array]) -> Keep:
    """Without a buffer, in some order."""

    def keep(commit: Commit) -> Array:
        source, destination = commit.moves()
        rows = commit.rows.copy()
        for k in order(np.arange(len(source))):
            rows[:, destination[k]] = rows[:, source[k]]
        return rows

    return keep


def _turned(by: Callable[[Array, Array], Array]) -> Keep:
    """Moved keys are rotated once more."""

    def keep(commit: Commit) -> Array:
        config = commit.config
        rows, (source, destination) = kept(commit), commit.moves()
        moved = source != destination
        source, destination = source[moved], destination[moved]
        angle = by(source, destination)[:, None] * frequencies(config)
        keys = rows[:, destination, config.kv_lora_rank :]
        rows[:, destination, config.kv_lora_rank :] = turned(keys, angle, 1.0)
        return rows

    return keep


def _through(dtype: type, *, moved_only: bool) -> Keep:
    def keep(commit: Commit) -> Array:
        rows, (source, destination) = kept(commit), commit.moves()
        if moved_only:
            destination = destination[source != destination]
        with np.errstate(over="ignore"):
            copied: Array = rows[:, destination].astype(dtype)
        rows[:, destination] = copied.astype(np.float64)
        return rows

    return keep


def _one_layer_for_all(commit: Commit) -> Array:
    """Every layer writes over the rows of layer 0."""
    rows = np.full_like(commit.rows, commit.unwritten)
    rows[0] = kept(commit)[-1]
    return rows


def _every_layer_as(layer: int) -> Keep:
    return lambda commit: np.broadcast_to(kept(commit)[layer], commit.rows.shape).copy()


def _zeros(commit: Commit) -> Array:
    rows, (_, destination) = kept(commit), commit.moves()
    rows[:, destination] = commit.unwritten
    return rows


def wrong_commits() -> tuple[WrongCommit, ...]:
    """Ways to keep the wrong rows, told of one commit at L with a path."""
    return (
        WrongCommit(
            "the accepted rows were not moved: slot L + k holds node k, not path[k]",
            lambda commit: commit.rows.copy(),
            specific=3,
        ),
        WrongCommit(
            "only c_kv was moved; k_pe stayed: slot L + k has that of node k", _columns(False)
        ),
        WrongCommit(
            "only k_pe was moved; c_kv stayed: slot L + k has that of node k", _columns(True)
        ),
        WrongCommit("rows were moved in layer 0 only", _layers(slice(1))),
        WrongCommit("rows were moved in every layer but the last", _layers(slice(-1))),
        WrongCommit("rows were moved in every layer but layer 0", _layers(slice(1, None))),
        WrongCommit(
            "the last move is missing: the deepest accepted node was not moved",
            _of_path(lambda commit, s, d: (s[:-1], d[:-1])),
        ),
        WrongCommit(
            "the root's row is missing: slot L + k holds path[k + 1], accepted drafts alone",
            _of_path(lambda commit, s, d: (s[1:], d[:-1])),
        ),
        WrongCommit(
            "rows were moved in descending order without a buffer, and some were overwritten "
            "before they were read",
            _one_by_one(lambda k: k[::-1]),
        ),
        WrongCommit(
            "the moves go the other way: from L + k to L + path[k]",
            _of_path(lambda commit, s, d: (d, s)),
        ),
        WrongCommit(
            "slot L + k holds node path[k] - 1", _of_path(lambda commit, s, d: (s - (s > d[0]), d))
        ),
        WrongCommit(
            "slot L + k holds node path[k] + 1", _of_path(lambda commit, s, d: (s + (s > d[0]), d))
        ),
        WrongCommit(
            "the accepted rows are in reverse order", _of_path(lambda commit, s, d: (s[::-1], d))
        ),
        WrongCommit(
            "slot L + k holds slot path[k], as if L were 0",
            _of_path(lambda commit, s, d: (s - commit.committed_len, d)),
        ),
        WrongCommit(
            "the moved keys were rotated once more, by the position of their new slot",
            _turned(lambda source, destination: destination),
        ),
        WrongCommit(
            "the moved keys were rotated once more, by the position of their old slot",
            _turned(lambda source, destination: source),
        ),
        WrongCommit(
            "the moved keys were rotated back by path[k] - k, as if their position changed",
            _turned(lambda source, destination: destination - source),
        ),
        *(
            WrongCommit(
                f"{which} rows were rounded to {name} on the way: no pure copy",
                _through(dtype, moved_only=which == "moved"),
                ("COMMIT-1", "NUM-2"),
                2,
            )
            for which in ("moved", "all kept")
            for name, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16))
        ),
        WrongCommit(
            "every layer is written to the cache of layer 0: that holds the rows of the last, the "
            "others none",
            _one_layer_for_all,
            specific=3,
        ),
        WrongCommit("every layer holds the rows of the last layer", _every_layer_as(-1)),
        WrongCommit("every layer holds the rows of layer 0", _every_layer_as(0)),
        WrongCommit("the kept rows were never written", _zeros),
    )


class Past:
    """The points before a scene, computed again, and the scene's own forward to be done."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.weight = cache(scene.expectation.weight)
        self.right = Workings.right(scene.config)
        self._right_rows: dict[int, Array] = {}  # of the points before, [l, n, c + r]
        self._sizes = [_length(one) for one in scene.history] + [(scene.committed_len, scene.n)]

    @cached_property
    def is_small(self) -> bool:
        """Whether guesses can be computed in moments."""
        config = self.scene.config
        heads, layers = config.num_attention_heads, config.num_hidden_layers
        pairs = sum(n * (length + n) for length, n in self._sizes)
        scores = pairs * heads * layers * config.kv_lora_rank
        experts = config.num_experts_per_tok + config.n_shared_experts
        inner = max(config.intermediate_size, experts * config.moe_intermediate_size)
        layer = config.hidden_size * (3 * inner + heads * config.v_head_dim)
        weights = layers * layer + config.hidden_size * config.vocab_size
        return scores + weights * sum(n for _, n in self._sizes) <= _MOST_WORK

    @property
    def n_slots(self) -> int:
        """Slots that were ever written, or will be at this point."""
        return max(length + n for length, n in self._sizes)

    @cached_property
    def unwritten(self) -> float:
        """What the engine's memory seems to hold before anything is written to it."""
        actual, cache = self.scene.actual, self.scene.seen.get(("cache_c_kv", None))
        if cache is not None and np.isnan(cache.astype(np.float64)).any():
            return np.nan
        if actual.dtype.kind not in "fV" or not self.scene.same_form:
            return 0.0
        return np.nan if (np.isnan(self.scene.numbers) & self.scene.differs).any() else 0.0

    def _setting(self, expectation: Expectation, rows: Array, committed_len: int) -> Setting:
        tokens, positions = expectation.get("tokens"), expectation.get("positions")
        mask = expectation.get("mask")
        assert tokens is not None
        assert positions is not None
        assert mask is not None
        return Setting(self.right, tokens, positions, mask, rows, committed_len)

    def _written(
        self,
        how: Workings,
        keep: Keep,
        *,
        chunks: bool = True,
        told: Mapping[int, tuple[Array, Array]] = MappingProxyType({}),
    ) -> Array:
        """Rows [l, S, c + r] after the points before, each forward and commit done so.

        told  by number of the point: other positions and mask than it should have
        """
        config = self.scene.config
        width = config.kv_lora_rank + config.qk_rope_head_dim
        rows = np.full((config.num_hidden_layers, self.n_slots, width), self.unwritten)
        for number, (expectation, (length, n)) in enumerate(
            zip(self.scene.history, self._sizes, strict=False)
        ):
            fresh = self._right_rows.get(number)
            if how is not self.right or told or fresh is None:
                setting = replace(self._setting(expectation, rows, length), workings=how)
                if number in told:
                    positions, mask = told[number]
                    setting = replace(setting, positions=positions, mask=mask)
                fresh = forward(self.weight, setting, until=ROWS)[ROWS]
                if how is self.right and keep is kept and not told:
                    self._right_rows[number] = fresh
            rows = np.stack(
                [how.append(old, new, length) for old, new in zip(rows, fresh, strict=True)]
            )
            path = expectation.get("path")
            nodes = tuple(range(n)) if path is None else tuple(int(i) for i in path)
            commit = Commit(config, rows, length, nodes, n, self.unwritten)
            rows = keep(commit) if chunks or path is not None else kept(commit)
        return rows

    @cached_property
    def setting(self) -> Setting:
        """The scene's forward as it should be."""
        rows = self._written(self.right, kept)
        return self._setting(self.scene.expectation, rows, self.scene.committed_len)

    def wrongly_kept(self, keep: Keep, *, chunks: bool = True) -> Setting:
        """The same over what wrong commits left; chunks: those of prompts are wrong too."""
        return replace(self.setting, rows=self._written(self.right, keep, chunks=chunks))

    def ever(self, how: Workings) -> Setting:
        """The same, where this forward and all before it were done so."""
        return replace(self.setting, workings=how, rows=self._written(how, kept))

    def before(self, how: Workings) -> Setting:
        """The same, where all forwards before it were done so."""
        return replace(self.setting, rows=self._written(how, kept))

    def after_others(self, told: Mapping[int, tuple[Array, Array]]) -> Setting:
        """The same, where forwards before it were told other positions and masks."""
        return replace(self.setting, rows=self._written(self.right, kept, told=told))

    @cached_property
    def shown(self) -> dict[tuple[str, int | None], Array]:
        """All stages of the scene's forward as it should be."""
        return forward(self.weight, self.setting)

    def commit(self, rows: Array) -> Commit:
        """The scene's own commit, over rows [l, S, c + r] after the forward."""
        scene = self.scene
        length = scene.committed_len
        return Commit(scene.config, rows, length, scene.path, scene.n, self.unwritten)

    def rows_after(self, fresh: Array) -> Array:
        """All rows [l, S, c + r] after a forward that adds `fresh` [l, n, c + r]."""
        pairs = zip(self.setting.rows, fresh, strict=True)
        return np.stack([append(old, new, self.scene.committed_len) for old, new in pairs])

    def fresh(self) -> Array:
        """The forward's new rows [l, n, c + r] as the engine showed them, or as they should be."""
        shown = self.shown_rows()
        return self.shown[ROWS] if shown is None else shown

    def shown_rows(self) -> Array | None:
        """The forward's new rows as the engine showed them; None: not all, or not in this form."""
        config, seen = self.scene.config, self.scene.seen
        widths = (("c_kv", config.kv_lora_rank), ("k_pe", config.qk_rope_head_dim))
        rows = []
        for layer in range(config.num_hidden_layers):
            for name, width in widths:
                one = seen.get((name, layer))
                if one is None or one.shape != (self.scene.n, width):
                    return None
                rows.append(one.astype(np.float64))
        pairs = zip(rows[::2], rows[1::2], strict=True)
        return np.stack([np.concatenate(pair, axis=-1) for pair in pairs])

    def rejected(self) -> dict[str, dict[int, Array]]:
        """By round before the scene: of each node that it rejected the row [l, c + r]."""
        assert self.setting is not None  # computes the rows of the points before
        found: dict[str, dict[int, Array]] = {}
        chunks = sum(one.get("parents") is None for one in self.scene.history)
        for number, expectation in enumerate(self.scene.history):
            path = expectation.get("path")
            if path is None:
                continue
            rows, kept_nodes = self._right_rows[number], {int(node) for node in path}
            found[f"round{number - chunks}"] = {
                node: rows[:, node] for node in range(rows.shape[1]) if node not in kept_nodes
            }
        return {name: nodes for name, nodes in found.items() if nodes}

    def stale(self) -> list[tuple[int, str]]:
        """Slots behind this forward's that a node of an earlier one wrote, and which."""
        found: dict[int, str] = {}
        chunks = sum(one.get("parents") is None for one in self.scene.history)
        for i, (length, n) in enumerate(self._sizes[:-1]):
            name = f"chunk{i}" if i < chunks else f"round{i - chunks}"
            found |= {length + node: f"node {node} of {name}" for node in range(n)}
        end = self.scene.committed_len + self.scene.n
        return sorted((slot, who) for slot, who in found.items() if slot >= end)


def _length(expectation: Expectation) -> tuple[int, int]:
    slots = expectation.get("slots")
    assert slots is not None
    return int(slots[0]), len(slots)
