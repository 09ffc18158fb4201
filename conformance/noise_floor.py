"""The noise floor of a case: what rounding alone does to it at a declared precision (NUM-3).

MEMBERS honest engines of the profile (reference/noisy.py) live through the golden history, forward
by forward, each with its own order of sums and its own places of rounding. They are given the
truth's positions, masks, paths and choices of experts, so nothing but rounding moves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtr.conformance.alternatives_truth import AlternativeTruth
from kdtr.conformance.bundle import Expectation, GoldenBundle, GoldenCase
from kdtr.conformance.tolerance import UNIT_ROUNDOFF, row_bound, row_scale
from kdtr.contract import (
    Acceptance,
    Array,
    ModelConfig,
    NumericProfile,
    Session,
    Source,
    Stage,
    stage_order,
)
from kdtr.reference import make_engine
from kdtr.reference.cache import AppendCache
from kdtr.reference.engine import ReferenceModel
from kdtr.reference.noisy import NoisyArithmetic
from kdtr.reference.weights import ModelWeights

MEMBERS = 6

Rows = np.ndarray
Key = tuple[str, int | None]


class NoiseFloor:
    """Of one model at one profile; members are made when a case first needs them."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, np.ndarray], profile: NumericProfile
    ) -> None:
        self.config = config
        self.profile = profile
        self.tensors = weights
        self._members: list[tuple[NoisyArithmetic, ReferenceModel]] = []
        self._weights: ModelWeights | None = None

    @classmethod
    def of_bundle(cls, bundle: GoldenBundle, profile: NumericProfile) -> NoiseFloor:
        weights = {name: bundle.weights[name] for name in bundle.weights}
        return cls(bundle.config, weights, profile)

    def members(self) -> list[tuple[NoisyArithmetic, ReferenceModel]]:
        if not self._members:
            for seed in range(MEMBERS):
                self._members.append(_member(self.config, self.weights(), self.profile, seed))
        return self._members

    def weights(self) -> ModelWeights:
        """The truth's, as they were given."""
        if self._weights is None:
            self._weights = make_engine(arithmetic="fast").load((self.config, self.tensors)).weights
        return self._weights

    def case(self, case: GoldenCase, known: Mapping[str, PointNoise] | None = None) -> CaseNoise:
        """known: all points of the same case at the same profile, where they were measured."""
        return CaseNoise(self, case, known)


def _member(
    config: ModelConfig, weights: ModelWeights, profile: NumericProfile, seed: int
) -> tuple[NoisyArithmetic, ReferenceModel]:
    arithmetic = NoisyArithmetic(profile, seed)
    rounded = arithmetic.rounded_weights(weights)
    return arithmetic, ReferenceModel(arithmetic, AppendCache, config, rounded)


@dataclass(frozen=True, slots=True, eq=False)
class PointNoise:
    """Bounds at one point of a case.

    noise  by (stage, layer): the largest distance from the truth of each row in any member
    """

    profile: NumericProfile
    noise: Mapping[Key, Rows]

    def bound(self, stage: Stage, layer: int | None, expected: np.ndarray) -> np.ndarray:
        """Shape of `expected` with the axes within a row reduced to 1."""
        unit = UNIT_ROUNDOFF[stored_in(self.profile, stage)]
        return row_bound(expected, self.noise[stage.name, layer], stage.row_axes, unit)


class CaseNoise:
    """Bounds of a case, point by point, in the order of the case; asked again, remembered."""

    def __init__(
        self,
        floor: NoiseFloor,
        case: GoldenCase,
        known: Mapping[str, PointNoise] | None = None,
    ) -> None:
        self._floor = floor
        self._case = case
        self._sessions: list[tuple[NoisyArithmetic, Session]] = []
        self._points: dict[str, PointNoise] = {**(known or {})}
        self._truths: dict[bool, AlternativeTruth] = {}

    def alternatives(self, *, traced: bool) -> AlternativeTruth:
        """The truth under other choices of experts, to which the same bounds apply."""
        if traced not in self._truths:
            floor = self._floor
            self._truths[traced] = AlternativeTruth(
                floor.config, floor.weights(), self._case, traced=traced
            )
        return self._truths[traced]

    def point(self, point: str) -> PointNoise:
        for earlier in self._case.inputs.points():
            if earlier not in self._points:
                self._points[earlier] = self._run(earlier)
            if earlier == point:
                break
        return self._points[point]

    def points(self) -> Mapping[str, PointNoise]:
        """Every point, measured to the end of the case."""
        self.point(self._case.inputs.points()[-1])
        return self._points

    def _run(self, point: str) -> PointNoise:
        inputs, expectation = self._case.inputs, self._case.expectation(point)
        if not self._sessions:
            self._sessions = [
                (arithmetic, model.open(max_len=inputs.max_len))
                for arithmetic, model in self._floor.members()
            ]
        i = int(point.removeprefix("chunk").removeprefix("round"))
        tokens = inputs.chunks[i] if point.startswith("chunk") else inputs.rounds[i].tree.tokens
        noise: dict[Key, Rows] = {}
        for arithmetic, session in self._sessions:
            shown = _shown(self._floor.config, arithmetic, session, tokens, expectation)
            for key, distance in _distances(self._floor.config, expectation, shown):
                noise[key] = np.maximum(distance, noise[key]) if key in noise else distance
        _weights_by_their_scores(self._floor.config, expectation, noise)
        return PointNoise(self._floor.profile, noise)


@dataclass(slots=True)
class _Shown:
    arrays: dict[Key, np.ndarray] = field(default_factory=dict)

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        self.arrays[stage, layer] = np.array(array)


def _shown(
    config: ModelConfig,
    arithmetic: NoisyArithmetic,
    session: Session,
    tokens: tuple[int, ...],
    expectation: Expectation,
) -> dict[Key, np.ndarray]:
    """One forward of a member along the golden history, and its commit."""
    positions, mask = expectation.get("positions"), expectation.get("mask")
    path, root = expectation.get("path"), expectation.get("root")
    assert positions is not None
    assert mask is not None
    assert root is not None
    chosen = {
        layer: ids
        for layer in range(config.num_hidden_layers)
        if (ids := expectation.get("expert_ids", layer)) is not None
    }
    arithmetic.follow(config, positions, chosen)
    shown = _Shown()
    session.forward_tokens(tokens, positions, mask, trace=shown)
    nodes = range(len(tokens)) if path is None else path.tolist()
    session.commit(Acceptance(tuple(nodes), int(root)))
    cache = session.snapshot()
    shown("cache_c_kv", None, cache.c_kv)
    shown("cache_k_pe", None, cache.k_pe)
    return shown.arrays


def _distances(
    config: ModelConfig, expectation: Expectation, shown: Mapping[Key, np.ndarray]
) -> list[tuple[Key, Rows]]:
    found = []
    for stage, layer in stage_order(config.num_hidden_layers):
        if stage.exact:
            continue
        expected = expectation.get(stage.name, layer)
        mine = shown.get((stage.name, layer))
        if expected is None or mine is None:
            continue
        both = np.isfinite(expected) & np.isfinite(mine)
        distance = np.zeros(expected.shape)
        np.subtract(mine, expected, out=distance, where=both)
        found.append(((stage.name, layer), row_scale(distance, stage.row_axes)))
    return found


def _weights_by_their_scores(
    config: ModelConfig, expectation: Expectation, noise: dict[Key, Rows]
) -> None:
    """In place: expert weights err at least as their scores, times what a score is multiplied by.

    A row's few weights may be lucky in all members: two that are divided by their sum err as one
    number. Its scores are as many as there are experts.
    """
    for layer in range(config.num_hidden_layers):
        weights, scores, ids = (
            expectation.get(name, layer)
            for name in ("expert_weights", "router_scores", "expert_ids")
        )
        if weights is None or scores is None or ids is None:
            continue
        chosen = np.take_along_axis(scores, ids, axis=1)  # [n, k]
        ratio = np.divide(weights, chosen, out=np.zeros_like(weights), where=chosen > 0)
        through = noise["router_scores", layer] * ratio.max(axis=1, keepdims=True)  # [n, 1]
        own = noise["expert_weights", layer]
        noise["expert_weights", layer] = np.maximum(own, through)


def stored_in(profile: NumericProfile, stage: Stage) -> str:
    """The dtype in which the profile stores a numeric stage."""
    if stage.name in ("scores", "logits"):
        return str(getattr(profile, stage.name))
    if stage.name in ("router_scores", "expert_weights"):
        return profile.accumulation
    latent = stage.source is Source.COMMIT or stage.name in ("c_kv", "k_pe")
    return profile.latents if latent else profile.activations
