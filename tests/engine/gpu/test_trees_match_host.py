"""Layouts, walk and best-first trees of the CUDA set against their host twins: equal."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_pair import TREES, Pair


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 129, 1000])
def test_layouts_and_walk(pair: Pair, n: int, shape: str) -> None:
    parents = np.array(TREES[shape](n))
    length = pair.cuda.device_int(70)
    positions, bits = pair.cuda.tree_layout(pair.cuda.upload(parents), length)
    expected_positions, expected = pair.host.tree_layout(parents, 70)

    np.testing.assert_array_equal(expected_positions, pair.cuda.to_host(positions))
    np.testing.assert_array_equal(expected, unpacked(pair.cuda.to_host(bits), n))
    positions, bits = pair.cuda.causal_layout(n, length)
    np.testing.assert_array_equal(70 + np.arange(n), pair.cuda.to_host(positions))
    np.testing.assert_array_equal(np.tri(n, dtype=bool), unpacked(pair.cuda.to_host(bits), n))

    tokens = np.arange(n) % 7 if shape == "chain" else np.arange(n)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        targets = rng.integers(0, 9, n)
        for i in range(1, n):
            if rng.random() < 0.5:
                targets[parents[i]] = tokens[i]
        stops = rng.integers(0, 9, seed % 3)
        most = int(rng.integers(1, n + 1))
        walk = pair.cuda.accept_walk(
            *(pair.cuda.upload(a) for a in (tokens, parents, targets, stops)),
            pair.cuda.device_int(most),
        )
        for mine, theirs in zip(
            pair.host.accept_walk(tokens, parents, targets, stops, most), walk, strict=True
        ):
            np.testing.assert_array_equal(mine, pair.cuda.to_host(theirs))


def unpacked(bits: np.ndarray, n: int) -> np.ndarray:
    return np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :n].astype(bool)


@pytest.mark.parametrize("seed", range(6))
def test_best_first(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    depth, w = [(4, 9), (1, 300), (7, 1000), (3, 5), (5, 64), (2, 33)][seed]
    logits = (
        np.round(rng.standard_normal((depth, w)) * 2)
        if seed % 2
        else rng.standard_normal((depth, w))
    )
    logits[rng.random((depth, w)) < 0.1] = -np.inf
    if seed == 4:
        logits[3] = -np.inf
    for budget in (0, 1, 4, 16, 65, 200):
        expected = pair.host.build_best_first(logits, budget)
        found = pair.cuda.build_best_first(logits, budget)
        for mine, theirs in zip(expected, found, strict=True):
            np.testing.assert_array_equal(mine, theirs)
