"""Every fault of `cuda_faults.py` is seen, by the gate or by a check of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_faults
import pytest
from cuda_faults import FAULTS, faulty_kernels
from test_large_index import SLOTS, C, R, check_far_rows, check_rows, large_cache

import kdtr.conformance
from kdtr.conformance import load_engine, run_gate
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_kernels import CudaKernels

BASE = Path(kdtr.conformance.__file__).parent / "corpus" / "base.kdtr"
BY_THE_GATE = [name for name, fault in FAULTS.items() if fault.seen_at]


def test_the_honest_engine_with_small_pages_and_splits_passes() -> None:
    engine = load_engine("cuda", {"page_size": 3, "split_size": 5})

    gate = run_gate(engine, [BASE], engine_name="cuda")

    assert gate.passed, gate.findings


@pytest.mark.parametrize("name", BY_THE_GATE)
def test_the_gate_kills_it_and_names_the_stage(name: str) -> None:
    gate = run_gate(cuda_faults.make_engine(name), [BASE], engine_name="cuda_faults:make_engine")

    assert not gate.passed
    first = {finding.stage for finding in gate.findings if finding.verdict.is_bad}
    print(name, sorted(first))
    assert first <= FAULTS[name].seen_at


def test_a_merge_in_no_order_is_not_deterministic(
    small: ModelConfig, weights_of: Callable[[ModelConfig], Any]
) -> None:
    """NUM-4: the same call, other bits."""

    def logits(engine: Any) -> set[bytes]:
        session = engine.load((small, weights_of(small))).open(max_len=300)
        session.prefill([i * 7 % 37 for i in range(200)])
        tree = DraftTree((session.root, 1, 2), (-1, 0, 0))
        return {session.verify(tree).logits.tobytes() for _ in range(20)}

    assert 1 == len(logits(make_cuda_engine(split_size=5)))
    assert 1 < len(logits(cuda_faults.make_engine("merge_in_no_order")))


def test_a_row_offset_of_32_bits_is_seen(small: ModelConfig) -> None:
    """The check of test_large_index, on the faulty kernel.

    The wrapped offset is negative. The cache is the upper half of a larger allocation here, so that
    what the faulty kernel overwrites is ours.
    """
    cupy = pytest.importorskip("cupy")
    with faulty_kernels("row_offset_of_32_bits"):
        kernels = CudaKernels("bfloat16", graphs=False, guarded=False)
    memory = cupy.zeros((2, SLOTS, C + R), cupy.uint16)
    kernels.new_rows = lambda *shape: memory[1:]
    cache = large_cache(kernels, small, 64)

    with pytest.raises(AssertionError):
        check_rows(kernels, cache)
    assert memory[0].any(), "the wrapped offset is not where it was thought to be"


def test_a_row_stride_of_32_bits_is_seen() -> None:
    """Row 2 of a view whose rows lie 2^30 + 8 apart, on the faulty kernel."""
    with faulty_kernels("row_stride_of_32_bits"):
        kernels = CudaKernels("bfloat16", graphs=False, guarded=False)

    with pytest.raises(AssertionError):
        check_far_rows(kernels)
