from __future__ import annotations

import numpy as np

from kdtr.engine.host_dense import argmax, rms_norm, sigmoid, swiglu


def test_rms_norm_of_each_row_by_itself() -> None:
    x = np.array([[3.0, 4.0], [0.0, 0.0]], np.float32)

    normed = rms_norm(x, np.array([1.0, 2.0], np.float32), 0.0 + 1e-5)

    expected = np.array([[3.0, 8.0]]) / np.sqrt(12.5 + 1e-5)
    assert np.allclose(expected, normed[:1], rtol=4 * 2**-24, atol=0)
    assert not normed[1].any()


def test_sigmoid_does_not_overflow() -> None:
    x = np.array([-1000.0, -90.0, 0.0, 90.0, 1000.0], np.float32)

    values = sigmoid(x)

    assert 0.0 == values[0]
    assert np.isclose(np.exp(-90.0), values[1], rtol=1e-5, atol=0)
    assert [0.5, 1.0, 1.0] == values[2:].tolist()


def test_swiglu_gates_before_up() -> None:
    """gate rows first, then up rows: down(silu(gate x) * up x) (MOE-4)."""
    x = np.array([[1.0, 2.0]], np.float32)
    gate_up = np.array([[1.0, 0.0], [0.0, 3.0]], np.float32)  # gate x = 1, up x = 6
    down = np.array([[1.0], [-2.0]], np.float32)

    out = swiglu(x, gate_up, down)

    inner = 6.0 / (1.0 + np.exp(-1.0))
    assert np.allclose([[inner, -2.0 * inner]], out, rtol=8 * 2**-24, atol=0)


def test_argmax_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([[1, 3, 3, 0], [-5, -4, -9, -4], [0, 0, 0, 0]], np.float32)

    assert [1, 1, 0] == argmax(logits).tolist()
