from __future__ import annotations

import numpy as np

from kdtr.engine.host_dense import argmax, rms_norm, sigmoid, silu_mul


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


def test_the_gate_comes_before_up() -> None:
    inner = silu_mul(np.array([[1.0, -2.0, 6.0, 3.0]], np.float32))

    expected = [[6.0 / (1.0 + np.exp(-1.0)), -6.0 / (1.0 + np.exp(2.0))]]
    assert np.allclose(expected, inner, rtol=8 * 2**-24, atol=0)


def test_argmax_takes_the_lowest_of_equal_logits() -> None:
    logits = np.array([[1, 3, 3, 0], [-5, -4, -9, -4], [0, 0, 0, 0]], np.float32)

    assert [1, 1, 0] == argmax(logits).tolist()
