"""Every fault of `cuda_faults.py` is seen, by the gate or by a check of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_faults
import pytest
from cuda_faults import FAULTS, faulty_kernels
from cuda_models import needs_hopper, needs_three_stages, record_narrow
from test_attention_values import check_behind_the_last_slot
from test_large_index import SLOTS, C, R, check_far_rows, check_rows, large_cache

import kdtr.conformance
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_kernels import CudaKernels

BASE = Path(kdtr.conformance.__file__).parent / "corpus" / "base.kdtr"
# Of tiny and base: lone roots, smaller trees after larger ones of a bucket, more than 64 nodes, and
# a root whose target no child has.
CASES = ("ar", "orders", "scattered", "long", "star")
GENERAL = [name for name, fault in FAULTS.items() if fault.seen_at and not fault.fast]
FAST = [name for name, fault in FAULTS.items() if fault.seen_at and fault.fast]
# Five tiles: of four splits three are in use, two in the light block. What nothing wrote is NaN.
FAST_OPTIONS = {"dtype": "bfloat16", "page_size": 64, "splits": 4, "guarded": True}

# A process each: a faulty kernel may end the device's context, and all that follows with it.
_JUDGED = """
import json, sys
from kdtr.conformance import Selection, load_engine, run_gate
name, options, cases, bundles = sys.argv[1], *map(json.loads, sys.argv[2:4]), sys.argv[4:]
selection = Selection(cases=frozenset(cases), modes=frozenset({"stepwise", "round"}))
gate = run_gate(load_engine(name, options), bundles, engine_name=name, selection=selection)
bad = [finding for finding in gate.findings if finding.verdict.is_bad]
print(json.dumps([gate.passed, [[finding.stage, *finding.rules] for finding in bad]]))
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its cases have smaller trees after larger ones of their bucket, and many pages."""
    path = tmp_path_factory.mktemp("golden") / "tiny.kdtr"
    command = [sys.executable, "-m", "kdtr.conformance.cli", "golden", "--tiny", "--out", path]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_narrow(tmp_path_factory.mktemp("golden") / "narrow.kdtr")


def judged(
    name: str, options: dict[str, Any], *bundles: Path, cases: tuple[str, ...] = ()
) -> tuple[bool, list[list[str]]]:
    """Whether the gate passed, and of every bad finding the stage and its rules.

    cases  none: all of the bundles
    """
    done = subprocess.run(
        [sys.executable, "-c", _JUDGED, name, json.dumps(options), json.dumps(cases), *bundles],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        timeout=200,
    )
    assert done.stdout, done.stderr
    passed, findings = json.loads(done.stdout.splitlines()[-1])
    return passed, findings


def test_the_honest_engine_with_small_pages_and_splits_passes(tiny: Path) -> None:
    assert (True, []) == judged("cuda", {"page_size": 3, "split_size": 5}, tiny, BASE, cases=CASES)


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_the_honest_engine_passes_where_the_fast_kernels_run(narrow: Path, page_size: int) -> None:
    options = {**FAST_OPTIONS, "page_size": page_size, "fault": "none"}
    assert (True, []) == judged("cuda_faults:make_engine", options, narrow)
    assert (True, []) == judged("cuda", {"dtype": "bfloat16", "page_size": page_size}, narrow)


def test_the_honest_engine_passes_where_a_block_has_all_tiles(narrow: Path) -> None:
    """More than it has stages for."""
    options = {**FAST_OPTIONS, "splits": 1, "fault": "none"}
    assert (True, []) == judged("cuda_faults:make_engine", options, narrow)


@pytest.mark.parametrize("splits", [1, 4])
def test_the_honest_engine_passes_where_hoppers_own_attention_runs(
    narrow: Path, splits: int
) -> None:
    needs_hopper()
    options = {**FAST_OPTIONS, "splits": splits, "hopper": True, "fault": "none"}
    assert (True, []) == judged("cuda_faults:make_engine", options, narrow)


@pytest.mark.parametrize("name", GENERAL)
def test_the_gate_kills_it_and_names_the_stage(tiny: Path, name: str) -> None:
    passed, findings = judged("cuda_faults:make_engine", {"fault": name}, tiny, BASE, cases=CASES)

    assert not passed
    print(name, findings)
    assert {stage for stage, *_ in findings} & FAULTS[name].seen_at


@pytest.mark.parametrize("name", FAST)
def test_the_gate_kills_it_in_a_fast_kernel_and_names_the_stage(narrow: Path, name: str) -> None:
    fault = FAULTS[name]
    if fault.of_hopper():
        needs_hopper()
    if fault.three_stages:
        needs_three_stages()
    options = {**FAST_OPTIONS, "splits": fault.splits, "hopper": fault.of_hopper()}
    passed, findings = judged("cuda_faults:make_engine", {"fault": name, **options}, narrow)

    assert not passed
    print(name, findings)
    assert {stage for stage, *_ in findings} & FAULTS[name].seen_at


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
    cupy.cuda.Device().synchronize()  # on another stream
    kernels.new_rows = lambda *shape: memory[1:]
    cache = large_cache(kernels, small, 64)

    with pytest.raises(AssertionError):
        check_rows(kernels, cache)
    assert memory[0].any(), "the wrapped offset is not where it was thought to be"


def test_a_row_stride_of_32_bits_is_seen() -> None:
    """Row 2 of a view whose rows lie 2^30 + 8 apart, on the faulty kernel.

    Its wrapped offset is negative, and within the memory that leads to the view.
    """
    with faulty_kernels("row_stride_of_32_bits"):
        kernels = CudaKernels("bfloat16", graphs=False, guarded=False)

    with pytest.raises(AssertionError):
        check_far_rows(kernels, lead=2**31)


def test_values_behind_the_last_slot_are_seen() -> None:
    """The check of test_attention_values, on the faulty kernel.

    Several times: between NaN in shared memory and the kernel, another process may have its turn.
    """
    with faulty_kernels("fast_values_behind_the_last_slot"):
        kernels = CudaKernels("bfloat16", graphs=False, guarded=False)

    def check_often() -> None:
        for _ in range(50):
            check_behind_the_last_slot({"bfloat16": kernels}, "mma 16", 40)

    with pytest.raises(AssertionError):
        check_often()
