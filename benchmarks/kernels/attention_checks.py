"""The checks of verify_attn.py, beside this file: values against float64, and graphs of launches.

They end at the first that fails.
"""

from __future__ import annotations

import numpy as np
from attention_cases import CASES, Case, Operands
from attention_data import PAGE, Inputs, pack_bits, random_ancestors
from attention_device import Captured, Device
from attention_shapes import SCALE, Shape

from kdtr.engine.cuda_cuts import Cut

# Of the largest value.
_BF16_ERROR = 6e-3  # 3 roundings of 2^-9
_F32_ERROR = 2e-6
_SCORE_ERROR = 1e-4
_REPLAYED = ("8/17/8k", "8/65/1k", "8/1/8k")


def check(device: Device) -> None:
    for case in CASES:
        for cut in case.cuts(device):
            error = check_case(device, case, cut)
            what = f"n {case.n} of {case.counted} h {case.h} L {case.committed}"
            by = "as chosen" if cut is None else f"{cut.rows} rows a block, {cut.splits} splits"
            print(f"{what:28s} page {case.page_size:3d} {by:28s} error {error:.2e}", flush=True)
            assert error < (_BF16_ERROR if case.bf16 else _F32_ERROR), (case, error)
    for rows in device.block_rows(PAGE):
        growing(device, Cut(rows, 13))
    for text in _REPLAYED:
        replays(device, Shape.parse(text))


def check_case(device: Device, case: Case, cut: Cut | None) -> float:
    """The largest error over the largest value; raises where a promise is broken."""
    operands, count = Operands(case), case.counted
    scores = device.cp.full((case.n, case.h, operands.max_slots), -np.inf, device.cp.float32)
    out = operands.to_host(operands.attend(device, cut=cut))[:count]
    traced = operands.to_host(operands.attend(device, scores, cut))[:count]
    assert np.array_equal(out, traced, equal_nan=True), "scores change the result"
    seen = operands.seen[:count]
    keep = np.ones(count, bool)
    if case.poisoned_node >= 0:
        keep = ~seen[:, case.committed + case.poisoned_node]
        assert np.isnan(out[~keep]).all(), "a node that sees a NaN must be NaN"
    assert np.isfinite(out[keep]).all(), f"{(~np.isfinite(out[keep])).sum()} values are not finite"
    expected, expected_scores = reference(operands.query[:count], operands.rows, seen, case.c)
    got = scores.get()[:count]
    assert np.isneginf(got[..., operands.n_slots :]).all(), "a score beyond n_slots"
    got = got[..., : operands.n_slots]
    visible = np.broadcast_to(seen[:, None, :], got.shape)
    assert np.isneginf(got[~visible]).all(), "a score of a hidden slot"
    near = np.abs(np.where(visible, got - np.where(visible, expected_scores, 0), 0))[keep]
    largest = np.abs(expected_scores[visible]).max()
    assert near.max(initial=0.0) < _SCORE_ERROR * largest, near.max()
    return error_of(out, expected, keep)


def growing(device: Device, cut: Cut) -> None:
    """One graph while the sequence grows: n_slots, open_len and count change on the device."""
    case = Case(9, 9, 8, 400, spare=40)
    operands = Operands(case)
    numbers = operands.visibility[:3]
    captured = Captured(lambda: operands.attend(device, cut=cut))
    for committed, counted in ((400, 9), (390, 7), (33, 9), (0, 1), (400, 9)):
        n_slots = committed + counted
        block = random_ancestors(np.random.default_rng(committed), case.n, counted)
        seen = np.ones((counted, n_slots), bool)
        seen[:, committed:] = block[:counted, :counted]
        for number, value in zip(numbers, (counted, committed, n_slots), strict=True):
            number.fill(value)
        operands.visibility.bits[...] = device.cp.asarray(pack_bits(block))
        captured.replay()
        out = operands.to_host(captured.results)[:counted]
        expected, _ = reference(operands.query[:counted], operands.rows[:n_slots], seen, case.c)
        error = error_of(out, expected)
        assert error < _BF16_ERROR, (committed, counted, error)
    print("one graph serves a growing sequence", flush=True)


def replays(device: Device, shape: Shape) -> None:
    """Leave the same bits."""
    inputs = Inputs(shape, copies=1)
    captured = Captured(lambda: inputs.attend_all(device))
    captured.replay()
    first = captured.results.copy()
    for _ in range(100):
        captured.results.fill(0)
        captured.replay()
        assert bool((captured.results == first).all()), "a replay differs"
    print(f"{shape}: 100 replays give the same bits", flush=True)


def reference(
    query: np.ndarray, rows: np.ndarray, seen: np.ndarray, c: int
) -> tuple[np.ndarray, np.ndarray]:
    """float64 on the device: query [n, h, c + r], rows [s, c + r], seen [n, s] -> out, scores."""
    import cupy as cp

    q, k = cp.asarray(query, cp.float64), cp.asarray(rows, cp.float64)
    visible = cp.asarray(seen)[:, None, :]
    scores = cp.where(visible, cp.einsum("nhe,se->nhs", q, k) * SCALE, -np.inf)
    p = cp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return cp.asnumpy(cp.einsum("nhs,sc->nhc", p, k[:, :c])), cp.asnumpy(scores)


def error_of(out: np.ndarray, expected: np.ndarray, keep: np.ndarray | None = None) -> float:
    """The largest of the rows to keep, of all if None, over the largest value."""
    error = np.abs(out - expected)
    kept = error if keep is None else error[keep]
    return float(kept.max(initial=0.0) / np.abs(expected).max())
