"""The search for choices of experts: from the first misfit, by effects, and with an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kdtr.conformance import alternatives_search
from kdtr.conformance.alternatives_fit import ShownPoint
from kdtr.conformance.alternatives_reach import Reach
from kdtr.conformance.alternatives_search import Search, Spent
from kdtr.conformance.alternatives_truth import Choices, Place
from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.drive import MODE
from kdtr.conformance.near_tie import admissible_choices, thin_rows
from kdtr.conformance.noise_floor import NoiseFloor, PointNoise
from kdtr.contract import NumericProfile

STEPWISE = MODE["stepwise"]
PROFILE = NumericProfile()
THIN = 0.01  # of a router score: of 6 + 4 + 4 rows in two layers, some are thin


class Bench:
    """Case y of a model of two MoE layers; its router scores are as noisy as is asked for."""

    def __init__(self, bundle: GoldenBundle) -> None:
        self.case = next(case for case in bundle.cases if case.inputs.alias == "y")
        self.config = bundle.config
        self.points = self.case.inputs.points()
        self._noise = NoiseFloor.of_bundle(bundle, PROFILE).case(self.case)

    def shown(self, choices: Choices, leak: float = 0.0) -> list[ShownPoint]:
        """Logits of the rounds of an engine that makes these choices, with a leak into the last."""
        truth, shown = self._noise.alternatives(traced=False), []
        for point in self.points:
            logits = truth.expectation(point, choices, STEPWISE).get("logits")
            assert logits is not None
            leaked = leak * np.sin(np.arange(logits.shape[1])) * (point == self.points[-1])
            arrays = {} if point.startswith("chunk") else {("logits", None): logits + leaked}
            shown.append(
                ShownPoint(point, arrays, self._thin(point), STEPWISE, self.config, PROFILE)
            )
        return shown

    def search(self, choices: Choices, leak: float = 0.0) -> Search:
        reach = Reach(self.case, self.config.num_hidden_layers)
        truth = self._noise.alternatives(traced=False)
        return Search(truth, reach, self.points, self.shown(choices, leak))

    def others(self, point: str) -> dict[Place, tuple[int, ...]]:
        """The thin places of a point, and what may be chosen there instead."""
        golden, found = self.case.expectation(point), {}
        for layer in range(2):
            rows, scores = thin_rows(golden, layer, self._thin(point)), None
            scores, ids = golden.get("router_scores", layer), golden.get("expert_ids", layer)
            assert rows is not None
            assert scores is not None
            assert ids is not None
            for row in np.flatnonzero(rows.thin).tolist():
                biased = scores[row] + golden.router_bias(layer)
                choices = admissible_choices(self.config, biased, float(rows.bound[row]))
                found[point, layer, row] = next(
                    one for one in choices or () if one != tuple(ids[row].tolist())
                )
        return found

    def _thin(self, point: str) -> PointNoise:
        noise = self._noise.point(point)
        return PointNoise(
            noise.profile,
            {
                key: np.full_like(rows, THIN / 6) if key[0] == "router_scores" else rows
                for key, rows in noise.noise.items()
            },
        )


@pytest.fixture(scope="module")
def bench(record: Callable[..., Path], small_model: SimpleNamespace) -> Iterator[Bench]:
    bundle = GoldenBundle.open(
        record(small_model.plans[:1], small_model.config.replace(first_k_dense_replace=0))
    )
    yield Bench(bundle)
    bundle.close()


def test_what_fits_is_left_as_it_is(bench: Bench) -> None:
    search = bench.search({})

    assert {} == search.run({})
    assert sum(len(bench.others(point)) for point in bench.points) == search.n_thin({})


@pytest.mark.parametrize("point", ["chunk0", "round0", "round1"])
def test_any_one_choice_is_found(bench: Bench, point: str) -> None:
    """Also one of the prompt, of which nothing is shown but what the rounds make of it."""
    others = bench.others(point)
    assert others
    for place, ids in others.items():
        choices = {place: ids}

        found = bench.search(choices).run({})

        assert found is not None
        for mine, its in zip(bench.shown(choices), bench.shown(found), strict=True):
            for key, logits in mine.arrays.items():
                np.testing.assert_allclose(logits, its.arrays[key], atol=1e-4)


def test_several_choices_are_found_together(bench: Bench) -> None:
    choices = {**bench.others("round0")}
    assert len(choices) > 1

    found = bench.search(choices).run({})

    assert found is not None
    for mine, its in zip(bench.shown(choices), bench.shown(found), strict=True):
        for key, logits in mine.arrays.items():
            np.testing.assert_allclose(logits, its.arrays[key], atol=1e-4)


def test_a_leak_is_explained_by_none_and_the_nearest_is_told(bench: Bench) -> None:
    search = bench.search({}, leak=1.0)

    assert search.run({}) is None
    assert search.complete
    assert search.tried > 1
    assert np.isfinite(search.nearest)
    assert search.nearest > 1


def test_a_leak_behind_another_choice_is_explained_by_none(bench: Bench) -> None:
    place, ids = next(iter(bench.others("round1").items()))

    assert bench.search({place: ids}, leak=1.0).run({}) is None


@pytest.mark.parametrize("limit", ["MOST_OUTCOMES", "MOST_ROWS"])
def test_it_has_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(alternatives_search, limit, -1)
    search = bench.search({}, leak=1.0)

    with pytest.raises(Spent):
        search.run({})


def test_more_choices_of_one_row_than_can_be_listed_are_no_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives_search, "admissible_choices", lambda *_: None)
    search = bench.search({}, leak=1.0)

    assert search.run({}) is None
    assert not search.complete


def test_what_is_not_finite_is_explained_by_none(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever could not be listed: it is no excuse for NaN."""
    monkeypatch.setattr(alternatives_search, "admissible_choices", lambda *_: None)
    search = bench.search({}, leak=np.nan)

    assert search.run({}) is None
    assert search.complete


@pytest.mark.parametrize(("error", "explained"), [(61.1, False), (60.9, True)])
def test_a_search_that_is_spent_knows_what_is_out_of_reach(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: float, explained: bool
) -> None:
    """Three choices, none of which moved anything by more than ten bounds: 1 + 2 * 3 * 10."""
    search = bench.search({}, leak=1.0)

    def spent(_: Choices) -> None:
        search.start, search.furthest = (error, 3), 10.0
        raise Spent

    monkeypatch.setattr(search, "_run", spent)

    if explained:
        with pytest.raises(Spent):
            search.run({})
    else:
        assert search.run({}) is None
    assert search.out_of_reach is not explained


def test_the_start_and_the_largest_effect_are_those_of_the_search(bench: Bench) -> None:
    search = bench.search({}, leak=1e6)

    assert search.run({}) is None
    assert search.start is not None
    assert search.start[0] > 1e6
    assert search.start[1] >= 1
    assert 0 < search.furthest
    assert search.out_of_reach
