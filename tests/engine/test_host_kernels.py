from __future__ import annotations

import numpy as np

from kdtr.engine.host_kernels import HostKernels

U = 2.0**-24


class Doubling(HostKernels):
    """Its `linear` is off by a factor that shows how often it ran."""

    def linear(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return 2 * super().linear(x, weight)


def test_swiglu_gates_before_up() -> None:
    """gate rows first, then up rows: down(silu(gate x) * up x) (MOE-4)."""
    x = np.array([[1.0, 2.0]], np.float32)
    gate_up = np.array([[1.0, 0.0], [0.0, 3.0]], np.float32)  # gate x = 1, up x = 6
    down = np.array([[1.0], [-2.0]], np.float32)

    out = HostKernels().swiglu(x, gate_up, down)

    inner = 6.0 / (1.0 + np.exp(-1.0))
    assert np.allclose([[inner, -2.0 * inner]], out, rtol=8 * U, atol=0)


def test_experts_and_swiglu_are_made_of_the_sets_own_linear() -> None:
    """Out of down: twice; into gate and up: twice each, here where silu is the identity."""
    x, weights = np.array([[64.0]], np.float32), np.ones((1, 1), np.float32)
    gate_up, down = np.ones((1, 2, 1), np.float32), np.ones((1, 1, 1), np.float32)
    ids = np.zeros((1, 1), np.int64)

    plain = HostKernels().experts(x, ids, weights, gate_up, down)
    doubled = Doubling().experts(x, ids, weights, gate_up, down)

    assert [[64.0 * 64.0]] == plain.tolist()
    assert [[2 * (2 * 64.0) * (2 * 64.0)]] == doubled.tolist()


def test_the_profile_is_float32_and_repeats_its_bits() -> None:
    profile = HostKernels().profile

    assert {"float32"} == {
        profile.weights,
        profile.activations,
        profile.latents,
        profile.scores,
        profile.logits,
        profile.accumulation,
    }
    assert (True, False) == (profile.deterministic, profile.batch_invariant)
