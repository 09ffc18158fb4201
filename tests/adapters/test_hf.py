"""transformers, judged: `make _peer-hf` runs these where torch and transformers are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GateResult, GoldenBundle, Selection, Verdict, load_engine, run_gate
from kdtr.conformance.expectations_file import read_expectations
from kdtr.contract import DraftTree, EngineInfo, SessionError, UnsupportedError
from kdtr.kdtr_format import export_checkpoint

MISSING = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

ROOT = Path(__file__).resolve().parents[2]
CORPUS = ROOT / "conformance/corpus"
CHECKPOINTS = ROOT / "tests/data/hf-deepseek-v3"


def gate(bundle: str, *cases: str, **options: Any) -> GateResult:
    engine = load_engine("hf", options)
    selection = Selection(cases=frozenset(cases))
    return run_gate(engine, [CORPUS / bundle], engine_name="hf", selection=selection)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "sdpa"},
        {"attention": "sdpa", "mask": "boolean"},
        {"dtype": "float64"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "attention": "sdpa"},
    ],
    ids=str,
)
def test_base_passes(options: dict[str, str]) -> None:
    result = gate("base.kdtr", "trees", "ar", **options)

    assert result.passed, [str(finding) for finding in result.findings]
    assert all(one.headroom is None or one.headroom < 1 for one in result.results)


@pytest.mark.parametrize("name", ["half-split", "no-q-lora", "yarn-both", "negative-bias"])
def test_variants_pass(name: str) -> None:
    result = gate(f"{name}.kdtr", "trees")

    assert result.passed
    assert {Verdict.PASS} == {one.verdict for one in result.results}


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("softmax", "scoring_func = 'softmax'"),
        ("latent-eps", "latent_norm_eps = 0.03"),
        ("raw-weights", "n_shared_experts = 0"),
    ],
)
def test_what_transformers_cannot_say_is_unsupported_by_name(name: str, field: str) -> None:
    result = gate(f"{name}.kdtr")

    (only,) = result.results
    assert not result.passed
    assert Verdict.UNSUPPORTED is only.verdict
    assert f"cannot say this model: {field}; transformers" in only.refused


class WithoutIslands:
    """The hf engine in float64, which says that its sums are in float64 too."""

    def __init__(self) -> None:
        self._engine = load_engine("hf", {"dtype": "float64"})
        self.load = self._engine.load

    @property
    def info(self) -> EngineInfo:
        info = self._engine.info
        return replace(info, profile=replace(info.profile, accumulation="float64"))


def test_islands_of_float32_that_are_not_declared_fail() -> None:
    """The first is the first norm's: what it gives to the queries is of float32."""
    selection = Selection(cases=frozenset({"trees"}), modes=frozenset({"stepwise"}))

    result = run_gate(
        WithoutIslands(), [CORPUS / "base.kdtr"], engine_name="hf", selection=selection
    )

    (finding,) = (one for one in result.findings if one.verdict is Verdict.FAIL)
    assert ("q_nope", "layer 0") == (finding.stage, finding.where[:7])


def test_files_that_are_damaged_are_refused_and_the_others_compute_the_same() -> None:
    """transformers itself gives a tensor that is not there random numbers, and a warning."""
    result = gate("all-moe.kdtr", "files")

    (files,) = result.results
    assert (Verdict.PASS, []) == (files.verdict, files.findings)
    assert not files.unshown


def test_what_it_does_otherwise_is_what_its_expectations_say() -> None:
    expected = read_expectations(ROOT / "adapters/hf-expectations.toml")
    bundles = [CORPUS / f"{name}.kdtr" for name in ("expert-ties", "half-split", "softmax")]

    result = run_gate(load_engine("hf"), bundles, engine_name="hf", expectations=expected)

    assert result.passed, result.unmet
    assert {"equal-router-scores", "other-models"} == {
        name for one in result.results for name in one.expected
    }


def test_equal_router_scores_go_to_other_experts_than_the_lowest_ids() -> None:
    """A fact of torch.topk (docs/findings.md); when this fails, the fact has changed."""
    result = gate("expert-ties.kdtr", "ar")

    first = next(one for one in result.findings if one.verdict is Verdict.FAIL)
    assert ("expert_ids", "MOE-2") == (first.stage, first.rules[0])


def test_a_mask_that_leaks_is_refused_at_load() -> None:
    engine = load_engine("hf", {"mask": "boolean"})

    with (
        closing(GoldenBundle.open(CORPUS / "base.kdtr")) as bundle,
        pytest.raises(UnsupportedError, match=r"a masked token is read: with attention = 'eager'"),
    ):
        engine.load((bundle.config, bundle.weights))


def test_grouped_mm_is_refused_for_widths_that_torch_does_not_take() -> None:
    engine = load_engine("hf", {"experts": "grouped_mm"})

    with (
        closing(GoldenBundle.open(CORPUS / "base.kdtr")) as bundle,
        pytest.raises(UnsupportedError, match="hidden_size = 45 in float32 is 180 bytes"),
    ):
        engine.load((bundle.config, bundle.weights))


def session(**options: str) -> Any:
    return load_engine("hf", options).load(CHECKPOINTS / "v01-qlora-g1").open(max_len=32)


def test_a_commit_gathers_rows_and_crops_the_rest() -> None:
    held = session()
    root = held.prefill([3, 1, 4])
    tree = DraftTree(tokens=(root, 5, 6, 7), parents=(-1, 0, 0, 2))
    stages: dict[tuple[str, int | None], np.ndarray] = {}
    held.verify(tree, trace=lambda name, layer, a: stages.__setitem__((name, layer), np.array(a)))

    held.commit(held.accept(tree, [6, 0, 7, 9]))

    cache = held.snapshot()
    assert (6, 9) == (held.committed_len, held.root)
    assert [3, 1, 4, root, 6, 7] == cache.tokens.tolist()
    assert [0, 1, 2, 3, 4, 5] == cache.positions.tolist()
    for layer in range(len(cache.c_kv)):
        for name, kept in (("c_kv", cache.c_kv), ("k_pe", cache.k_pe)):
            shown = stages[name, layer][[0, 2, 3]]
            np.testing.assert_array_equal(shown, kept[layer, 3:])


def test_a_directory_that_transformers_reads_itself_is_given_to_it(tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5]
    mask = np.tri(5, dtype=bool)
    with closing(GoldenBundle.open(CORPUS / "base.kdtr")) as bundle:
        export_checkpoint((bundle.config, bundle.weights), tmp_path / "model")
        models = [
            load_engine("hf").load(source)
            for source in (tmp_path / "model", (bundle.config, bundle.weights))
        ]

    rows = [m.open(max_len=5).forward_tokens(prompt, np.arange(5), mask) for m in models]

    assert (tmp_path / "model/model.safetensors").is_file()
    np.testing.assert_array_equal(*rows)


def test_a_closed_model_closes_its_sessions() -> None:
    model = load_engine("hf").load(CHECKPOINTS / "v01-qlora-g1")
    held = model.open(max_len=4)

    model.close()

    calls: list[Callable[[], object]] = [lambda: held.prefill([1]), lambda: model.open(max_len=4)]
    for call in calls:
        with pytest.raises(SessionError, match="closed"):
            call()
