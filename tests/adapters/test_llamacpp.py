"""llama.cpp, judged: `make _peer-llamacpp` runs these where llama-cpp-python is installed."""

from __future__ import annotations

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GateResult, Selection, Verdict, load_engine, run_gate
from kdtr.contract import (
    DraftTree,
    Engine,
    EngineInfo,
    NumericProfile,
    SessionError,
    UnsupportedError,
)

MISSING = importlib.util.find_spec("llama_cpp") is None
pytestmark = pytest.mark.skipif(MISSING, reason="not installed: llama_cpp")

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "conformance/corpus"
CHECKPOINTS = ROOT / "tests/data/hf-deepseek-v3"
FLASH = {"flash_attention": True}


def gate(bundle: str, *cases: str, engine: Engine | None = None, **options: Any) -> GateResult:
    engine = engine or load_engine("llamacpp", options)
    selection = Selection(cases=frozenset(cases))
    return run_gate(engine, [CORPUS / bundle], engine_name="llamacpp", selection=selection)


@pytest.mark.parametrize(
    "options",
    [{}, {"cache": "float16"}, FLASH, {"cache": "float16", **FLASH}, {"threads": 2}],
    ids=str,
)
def test_base_passes(options: dict[str, Any]) -> None:
    result = gate("base.kdtr", "trees", "ar", "state", **options)

    assert result.passed, [str(finding) for finding in result.findings]
    assert all(one.headroom is None or one.headroom < 1 for one in result.results)
    unsupported = {one.mode for one in result.results if one.verdict is Verdict.UNSUPPORTED}
    assert {"forward"} == unsupported


@pytest.mark.parametrize("name", ["yarn", "yarn-both", "yarn-factor", "latent-eps", "raw-weights"])
def test_what_gguf_cannot_say_passes_as_a_model_that_computes_the_same(name: str) -> None:
    result = gate(f"{name}.kdtr", "trees")

    assert result.passed
    assert {Verdict.PASS, Verdict.UNSUPPORTED} == {one.verdict for one in result.results}


def test_files_that_are_damaged_are_refused_and_the_others_compute_the_same() -> None:
    result = gate("all-moe.kdtr", "files")

    (files,) = result.results
    assert (Verdict.PASS, []) == (files.verdict, files.findings)
    assert not files.unshown


def test_equal_router_scores_go_to_the_lowest_ids() -> None:
    result = gate("expert-ties.kdtr", "ar")

    assert result.passed
    assert [] == result.findings


class DeclaringFloat32:
    """An engine that says that all of it is float32."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.load = engine.load

    @property
    def info(self) -> EngineInfo:
        return replace(self._engine.info, profile=NumericProfile())


@pytest.mark.parametrize("options", [{"cache": "float16"}, FLASH], ids=str)
def test_float16_that_is_declared_as_float32_fails(options: dict[str, Any]) -> None:
    """Flash attention reads a cache of float32 in float16: without its profile it is not passed."""
    honest = load_engine("llamacpp", options)

    result = gate("base.kdtr", "trees", engine=DeclaringFloat32(honest))

    assert not result.passed
    first = next(finding for finding in result.findings if finding.verdict is Verdict.FAIL)
    assert any("would fit a rounding to" in hint.says for hint in first.looks_like), first


def session(max_len: int = 32) -> Any:
    return load_engine("llamacpp").load(CHECKPOINTS / "v01-qlora-g1").open(max_len=max_len)


def test_a_commit_keeps_the_path_and_forgets_its_siblings() -> None:
    held = session()
    root = held.prefill([3, 1, 4])
    tree = DraftTree(tokens=(root, 5, 6, 7, 8), parents=(-1, 0, 0, 2, 2))
    stages: dict[tuple[str, int | None], np.ndarray] = {}
    held.verify(tree, trace=lambda name, layer, a: stages.__setitem__((name, layer), np.array(a)))

    held.commit(held.accept(tree, [6, 0, 8, 1, 9]))

    cache = held.snapshot()
    assert (6, 9) == (held.committed_len, held.root)
    assert [3, 1, 4, root, 6, 8] == cache.tokens.tolist()
    for layer in range(len(cache.c_kv)):
        np.testing.assert_array_equal(stages["c_kv", layer][[0, 2, 4]], cache.c_kv[layer, 3:])
        np.testing.assert_array_equal(stages["k_pe", layer][[0, 2, 4]], cache.k_pe[layer, 3:])


def test_more_leaves_than_sequences_are_refused_and_change_nothing() -> None:
    held = session(max_len=300)
    root = held.prefill([3])
    vocab_size = 64
    # 257 leaves: five inner nodes with more than fifty children each
    parents = (-1, 0, 0, 0, 0, 0, *(1 + i % 5 for i in range(257)))
    tokens = (root, 0, 1, 2, 3, 4, *(i // 5 for i in range(257)))
    assert max(tokens) < vocab_size

    with pytest.raises(UnsupportedError, match=r"has 257 leaves; llama\.cpp has 256 sequences"):
        held.verify(DraftTree(tokens, parents))

    assert (1, root) == (held.committed_len, held.root)
    assert 2 == len(held.verify(DraftTree((root, 5), (-1, 0))).targets)


def test_a_mask_cannot_be_given() -> None:
    held = session()

    with pytest.raises(UnsupportedError, match=r"does not offer forward_tokens\(\)"):
        held.forward_tokens([1], np.array([0]), np.ones((1, 1), bool))


def test_a_session_that_is_dropped_gives_its_context_back() -> None:
    model = load_engine("llamacpp").load(CHECKPOINTS / "v01-qlora-g1")
    held = model.open(max_len=4)
    backend = held._backend

    del held
    gc.collect()

    assert backend._context is None
    model.close()


def test_a_closed_model_closes_its_sessions() -> None:
    model = load_engine("llamacpp").load(CHECKPOINTS / "v01-qlora-g1")
    held = model.open(max_len=4)

    model.close()
    model.close()

    for call in (lambda: held.prefill([1]), lambda: model.open(max_len=4)):
        with pytest.raises(SessionError, match="closed"):
            call()
