"""What rounding alone may do to a plain run: the bounds of laws that compare numbers (NUM-3).

A law compares an engine with itself, on token histories of its own. The truth and an ensemble of
honest engines of the declared profile run the same history; their distance bounds the engine's,
as in the gate (`kdtr.conformance.noise_floor`). It is asked for only where two answers differ by
more than storing them once may explain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kdtr.conformance.noise_floor import NoiseFloor, stored_in
from kdtr.conformance.tolerance import UNIT_ROUNDOFF, row_bound, row_scale
from kdtr.contract import STAGE, Acceptance, Array, NumericProfile, Session, Stage
from kdtr.property_tests.strategies import MAX_LEN, SmallModel
from kdtr.reference import make_engine
from kdtr.reference.moe import choice_gap
from kdtr.reference.weights import MoeWeights

Key = tuple[str, int | None]

_SEEN = ("logits", "router_scores")


@dataclass(frozen=True, slots=True, eq=False)
class Rounding:
    """A plain run over a history, and its noise.

    truth   logits [n, w], router_scores [n, e] by layer, and the cache's stages
    noise   of each of their rows
    """

    profile: NumericProfile
    truth: Mapping[Key, np.ndarray]
    noise: Mapping[Key, np.ndarray]
    gaps: Mapping[int, np.ndarray]

    def bound(self, stage: str, layer: int | None = None) -> np.ndarray:
        """Of every row of the stage, its last axes reduced to 1."""
        unit = UNIT_ROUNDOFF[stored_in(self.profile, STAGE[stage])]
        truth, noise = self.truth[stage, layer], self.noise[stage, layer]
        return row_bound(truth, noise, STAGE[stage].row_axes, unit)

    @property
    def routing_is_thin(self) -> bool:
        """Whether some choice of experts along the history may fall either way (NUM-2)."""
        return any(
            bool((gap <= self.bound("router_scores", layer)[:, 0]).any())
            for layer, gap in self.gaps.items()
        )


def stored_once(
    profile: NumericProfile, stage: Stage, expected: np.ndarray, bounds: int
) -> np.ndarray:
    """What storing alone may move: a unit for each side that has a bound, of which it is a part."""
    unit = UNIT_ROUNDOFF[stored_in(profile, stage)]
    return bounds * unit * row_scale(expected, stage.row_axes)


@lru_cache(maxsize=64)
def rounding(profile: NumericProfile, model: SmallModel, history: tuple[int, ...]) -> Rounding:
    """Of a plain run over the history, from an empty cache."""
    truth_model = make_engine(arithmetic="fast").load((model.config, model.tensors()))
    n = len(history)
    positions, mask = np.arange(n), np.tri(n, dtype=bool)
    truth = _Shown()
    _run(truth_model.open(max_len=MAX_LEN), history, positions, mask, truth)
    gaps, chosen = {}, {}
    for (stage, layer), array in truth.arrays.items():
        if layer is None:
            continue
        if stage == "router_scores":
            moe = truth_model.weights.layers[layer].mlp
            assert isinstance(moe, MoeWeights)
            gaps[layer] = choice_gap(model.config, array, moe.bias)
        if stage == "expert_ids":
            chosen[layer] = array
    numeric = {key: array for key, array in truth.arrays.items() if key[0] != "expert_ids"}
    noise = {key: np.zeros(array.shape[: STAGE[key[0]].row_axes]) for key, array in numeric.items()}
    for arithmetic, member in _floor(profile, model).members():
        arithmetic.follow(model.config, positions, chosen)
        shown = _Shown()
        _run(member.open(max_len=MAX_LEN), history, positions, mask, shown)
        for key, expected in numeric.items():
            distance = row_scale(shown.arrays[key] - expected, STAGE[key[0]].row_axes)
            noise[key] = np.maximum(noise[key], distance.reshape(noise[key].shape))
    return Rounding(profile, numeric, noise, gaps)


@lru_cache(maxsize=4)
def _floor(profile: NumericProfile, model: SmallModel) -> NoiseFloor:
    return NoiseFloor(model.config, model.tensors(), profile)


class _Shown:
    def __init__(self) -> None:
        self.arrays: dict[Key, np.ndarray] = {}

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        if stage in (*_SEEN, "expert_ids"):
            self.arrays[stage, layer] = np.array(array)


def _run(
    session: Session, history: Sequence[int], positions: np.ndarray, mask: np.ndarray, shown: _Shown
) -> None:
    session.forward_tokens(history, positions, mask, trace=shown)
    session.commit(Acceptance(tuple(range(len(history))), 0))
    cache = session.snapshot()
    shown.arrays["cache_c_kv", None] = cache.c_kv
    shown.arrays["cache_k_pe", None] = cache.k_pe
