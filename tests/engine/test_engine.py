from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.contract import TRACED, EngineError, ModelConfig
from kdtr.engine import make_engine
from kdtr.engine.engine import TreeEngine
from kdtr.engine.host_kernels import HostKernels


def test_what_the_engine_says_of_itself() -> None:
    info = make_engine().info

    assert "kdtr.engine" == info.name
    assert "cpu" == info.device
    assert TRACED == info.stages
    assert {"verify_batch", "commit_batch"}.isdisjoint(info.verbs)
    assert {"round", "verify", "forward_tokens"} <= info.verbs
    assert ("float32", "float32", True, False) == (
        info.profile.latents,
        info.profile.accumulation,
        info.profile.deterministic,
        info.profile.batch_invariant,
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dtype": "float32", "summation": "blas", "summation_seed": 7}, "kdtr.engine"),
        ({"dtype": "bfloat16"}, "kdtr.engine (bfloat16)"),
        ({"summation": "shuffled"}, "kdtr.engine (sums shuffled by seed 0)"),
        (
            {"dtype": "float16", "summation": "shuffled", "summation_seed": 7},
            "kdtr.engine (float16, sums shuffled by seed 7)",
        ),
    ],
)
def test_the_name_tells_how_the_numbers_differ(options: dict[str, Any], name: str) -> None:
    info = make_engine(**options).info

    dtype = options.get("dtype", "float32")
    assert name == info.name
    assert (dtype, dtype, dtype, "float32", dtype, "float32") == (
        info.profile.weights,
        info.profile.activations,
        info.profile.latents,
        info.profile.scores,
        info.profile.logits,
        info.profile.accumulation,
    )


def test_float32_sums_by_blas_unless_asked(
    small: ModelConfig, small_weights: dict[str, np.ndarray], trace: Any
) -> None:
    """The default is the plain HostKernels, and has its bits at every stage."""
    stages: list[dict[Any, np.ndarray]] = []
    plain = TreeEngine(HostKernels(), page_size=16, split_size=64)
    for engine in (plain, make_engine(), make_engine(dtype="float32", summation="blas")):
        session = engine.load((small, small_weights)).open(max_len=9)
        trace.clear()
        session.prefill([1, 2, 3], trace=trace)
        stages.append(dict(trace))

    for other in stages[1:]:
        assert stages[0].keys() == other.keys()
        assert all(np.array_equal(stages[0][at], other[at]) for at in other)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_in_low_precision_loads_in_any(
    small: ModelConfig, small_weights: dict[str, np.ndarray], stored: Any, dtype: str
) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in small_weights.items()}

    session = make_engine(dtype=dtype).load((small, tensors)).open(max_len=4)

    assert 0 <= session.prefill([3, 1, 2]) < small.vocab_size


def test_every_declared_verb_of_a_session_is_there(session: Any) -> None:
    assert all(callable(getattr(session, verb)) for verb in make_engine().info.verbs)
    assert not hasattr(session, "verify_batch")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"page_size": 0}, "page_size = 0; expected at least 1"),
        ({"split_size": -3}, "split_size = -3; expected at least 1"),
        ({"page_size": 2.0}, "page_size = 2.0; expected an integer"),
        ({"dtype": "fp8"}, "dtype = 'fp8'; expected 'float32', 'bfloat16' or 'float16'"),
        ({"dtype": 16}, "dtype = 16; expected 'float32', 'bfloat16' or 'float16'"),
        ({"summation": "pairwise"}, "summation = 'pairwise'; expected 'blas' or 'shuffled'"),
        ({"summation_seed": -1}, "summation_seed = -1; expected at least 0"),
        ({"summation_seed": "a"}, "summation_seed = 'a'; expected an integer"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(EngineError) as refusal:
        make_engine(**options)

    assert text == str(refusal.value)


def test_a_directory_and_a_pair_load_the_same_model(hf_root: Path) -> None:
    directory = hf_root / "v01-qlora-g1"
    engine = make_engine()

    from_directory = engine.load(directory)
    from_text = engine.load(str(directory))

    logits = []
    for model in (from_directory, from_text):
        session = model.open(max_len=4)
        session.set_root(3)
        logits.append(session.forward_tokens([3], [0], np.ones((1, 1), bool)))
    assert from_directory.config == from_text.config
    assert np.array_equal(*logits)
