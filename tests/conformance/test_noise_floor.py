"""The noise of a case depends on its bundle and the profile alone, so that tests may share it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from kdtr.conformance import GoldenBundle
from kdtr.conformance.noise_floor import CaseNoise, Key, NoiseFloor, Rows
from kdtr.contract import NumericProfile

FLOAT32, BFLOAT16 = NumericProfile(), NumericProfile(activations="bfloat16", logits="bfloat16")


def afresh(bundle: GoldenBundle, profile: NumericProfile) -> NoiseFloor:
    """Of nothing that is known: `of_bundle` shares it between the tests (tests/conftest.py)."""
    weights = {name: bundle.weights[name] for name in bundle.weights}
    return NoiseFloor(bundle.config, weights, profile)


def noise(of_case: CaseNoise, points: Sequence[str]) -> list[dict[Key, Rows]]:
    return [dict(of_case.point(point).noise) for point in points]


def equal(one: list[dict[Key, Rows]], other: list[dict[Key, Rows]]) -> bool:
    return all(
        mine.keys() == theirs.keys() and all(np.array_equal(mine[key], theirs[key]) for key in mine)
        for mine, theirs in zip(one, other, strict=True)
    )


def test_what_the_tests_share_is_what_is_measured_afresh(
    record: Callable[..., Path], small: Path, small_model: SimpleNamespace
) -> None:
    """Of two profiles, and of two bundles whose cases have the same names."""
    doubled = {name: array * 2 for name, array in small_model.weights.items()}
    found = []
    for path in (small, record(small_model.plans, weights=doubled)):
        bundle = GoldenBundle.open(path)
        for profile in (FLOAT32, BFLOAT16):
            for case in bundle.cases:
                points = case.inputs.points()
                shared = noise(NoiseFloor.of_bundle(bundle, profile).case(case), points)
                assert equal(noise(afresh(bundle, profile).case(case), points), shared)
            found.append(shared)
        bundle.close()

    assert not any(equal(one, other) for i, one in enumerate(found) for other in found[:i])
