"""One Hypothesis profile for the tests, and what rounding does to a bundle measured once a worker.

The profile: the same examples every time, and no deadline. A busy machine is not a fault: time is
never asserted.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping

import pytest
from hypothesis import settings

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor, PointNoise
from kdtr.contract import NumericProfile

settings.register_profile("tests", deadline=None, derandomize=True, database=None)
settings.load_profile("tests")


_Cases = dict[str, Mapping[str, PointNoise]]  # by alias, point by point


class _SharedFloor(NoiseFloor):
    """Of one of several bundles of the same bytes, at the same profile."""

    def __init__(self, floor: NoiseFloor, cases: _Cases) -> None:
        super().__init__(floor.config, floor.tensors, floor.profile)
        self._cases = cases

    def case(self, case: GoldenCase, known: Mapping[str, PointNoise] | None = None) -> CaseNoise:
        alias = case.inputs.alias
        if alias not in self._cases:
            self._cases[alias] = super().case(case).points()
        return super().case(case, known or self._cases[alias])


@pytest.fixture(scope="session", autouse=True)
def noise_is_measured_once() -> Iterator[None]:
    """Six forwards for every point of every gate were a fifth of the time of all tests, and nothing
    but the bundle's bytes and the engine's profile goes into them. What an engine is told of other
    choices of experts is not kept: its search may cost so much and no more."""
    of_bundle = NoiseFloor.of_bundle
    known: defaultdict[tuple[str, NumericProfile], _Cases] = defaultdict(dict)

    def shared(bundle: GoldenBundle, profile: NumericProfile) -> NoiseFloor:
        sha256 = hashlib.sha256(bundle.path.read_bytes()).hexdigest()
        return _SharedFloor(of_bundle(bundle, profile), known[sha256, profile])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoiseFloor, "of_bundle", shared)
        yield
