"""Parts of a judgement, timed by pytest-benchmark; `make bench` runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle, load_engine
from kdtr.conformance.compare import compare_numeric
from kdtr.conformance.gate import run_gate
from kdtr.conformance.noise_floor import NoiseFloor
from kdtr.conformance.tolerance import row_bound
from kdtr.conformance.xray import run_xray
from kdtr.contract import NumericProfile

BASE = Path(__file__).resolve().parents[1] / "conformance" / "corpus" / "base.kdtr"


def test_rows_of_logits_are_compared(benchmark: Any) -> None:
    """64 rows of a vocabulary of 160k: bound and comparison."""
    random = np.random.default_rng(0)
    expected = random.standard_normal((64, 163_840))
    actual = (expected * (1 + 1e-7)).astype(np.float32)

    def compare() -> bool:
        bound = row_bound(expected, np.full(64, 1e-6), 1, 2.0**-24)
        return compare_numeric(expected, actual, bound, 1).difference is None

    assert benchmark(compare)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_noise_floor_of_a_case(benchmark: Any, dtype: str) -> None:
    bundle = GoldenBundle.open(BASE)
    profile = NumericProfile(weights=dtype, activations=dtype, latents=dtype, logits=dtype)
    floor = NoiseFloor.of_bundle(bundle, profile)
    floor.members()
    case = next(case for case in bundle.cases if case.inputs.alias == "trees")

    benchmark(lambda: floor.case(case).point(case.inputs.points()[-1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bundle_is_judged(benchmark: Any, dtype: str) -> None:
    engine = load_engine("host", {"dtype": dtype})

    assert benchmark(lambda: run_gate(engine, [BASE], engine_name="host")).passed


def test_the_xray_models_are_read(benchmark: Any) -> None:
    engine = load_engine("host")

    assert benchmark.pedantic(lambda: run_xray(engine), rounds=2).passed
