"""Golden bundles to judge against, recorded once per worker, and the gate in one line.

`tiny` holds the seed model and the first rounds of some cases of `make gate`'s bundle. `small` is
recorded from a smaller model in a fraction of a second: for tests of the judge itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance import GateResult, Selection, load_engine, run_gate
from kdtr.conformance.case import CasePlan, Drafted, Planted
from kdtr.conformance.cli import main
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.seed_model import seed_tensors
from kdtr.conformance.tiny_corpus import TINY_SEED, tiny_plans
from kdtr.contract import ModelConfig
from kdtr.kdtr_format import Bundle, write_bundle

# `kdtr gate --engine hostile_engines:make_engine` imports them by name, as it would a user's.
sys.path.append(str(Path(__file__).parent / "engines"))

# No two sizes are equal, and nothing sits at a published default.
SMALL = ModelConfig(
    vocab_size=37,
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=11,
    kv_lora_rank=10,
    qk_nope_head_dim=7,
    qk_rope_head_dim=6,
    v_head_dim=5,
    intermediate_size=24,
    first_k_dense_replace=1,
    moe_intermediate_size=9,
    n_routed_experts=8,
    n_shared_experts=2,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    rms_norm_eps=3e-5,
    max_position_embeddings=60,
    rope_theta=500.0,
    latent_norm_eps=2e-3,
)
_PROMPT = (3, 0, 36, 8, 8, 1)
_Y = (-1, 0, 0, 2)
SMALL_PLANS = (
    CasePlan("y", "a Y", ("MASK-2",), (Planted(_Y, (0, 2, 3)), Planted(_Y, (0,))), (_PROMPT,)),
    CasePlan("ar", "plain decoding", ("FWD-2",), (Planted((-1,)),) * 2, (_PROMPT,)),
    CasePlan("drafted", "built", ("TREE-3",), (Drafted((0, 1), budget=5),), (_PROMPT[:2],)),
    CasePlan("from-root", "no prompt", ("FWD-3",), (Planted(_Y, (0, 2)),), root=5),
)


def small_weights(config: ModelConfig = SMALL) -> dict[str, np.ndarray]:
    """Exact in bfloat16, as the seed model's."""
    return {name: a.astype(ml_dtypes.bfloat16) for name, a in seed_tensors(config, 1).items()}


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Five checkpoint directories (tests/data/README.md)."""
    return Path(__file__).resolve().parents[1] / "data" / "hf-deepseek-v3"


@pytest.fixture(scope="session")
def corpus() -> Path:
    """The committed bundles."""
    return Path(__file__).resolve().parents[2] / "conformance" / "corpus"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    n_rounds = {"ar": 2, "y-tree": 3, "chain": 1, "star": 2, "best-first": 7, "from-root": 2}
    plans = [
        replace(plan, rounds=plan.rounds[: n_rounds[plan.alias]])
        for plan in tiny_plans()
        if plan.alias in n_rounds
    ]
    path = tmp_path_factory.mktemp("golden") / "tiny.kdtr"
    config = ModelConfig.tiny()
    weights = {n: a.astype(ml_dtypes.bfloat16) for n, a in seed_tensors(config, TINY_SEED).items()}
    record_bundle(path, {"name": "tiny"}, config, weights, plans)
    return path


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """record(plans, config=SMALL, weights=None): a bundle of the small model or one like it."""

    def record(
        plans: Iterable[CasePlan],
        config: ModelConfig = SMALL,
        weights: dict[str, np.ndarray] | None = None,
    ) -> Path:
        path = tmp_path_factory.mktemp("golden") / "bundle.kdtr"
        record_bundle(path, {"name": "small"}, config, weights or small_weights(config), [*plans])
        return path

    return record


@pytest.fixture(scope="session")
def small(record: Callable[..., Path]) -> Path:
    return record(SMALL_PLANS)


@pytest.fixture
def rewritten(small: Path, tmp_path: Path) -> Callable[..., Path]:
    """rewritten(change): the small bundle after change(tensors, metadata), checksums and all."""

    def rewrite(change: Callable[[dict[str, np.ndarray], dict[str, Any]], object]) -> Path:
        with Bundle.open(small) as bundle:
            tensors = {name: np.array(bundle[name]) for name in bundle}
            metadata = dict(bundle.metadata)
            metadata["cases"] = [dict(entry) for entry in metadata["cases"]]
        change(tensors, metadata)
        path = tmp_path / "changed.kdtr"
        write_bundle(path, tensors, metadata)
        return path

    return rewrite


@pytest.fixture(scope="session")
def small_model() -> SimpleNamespace:
    """config, weights and plans of `small`, for bundles like it."""
    return SimpleNamespace(config=SMALL, weights=small_weights(), plans=SMALL_PLANS)


@pytest.fixture(scope="session")
def judge() -> Callable[..., GateResult]:
    """judge(engine, bundle, case, ..., modes=(), until=None, **options): the gate's result."""

    def judge(
        engine: Any,
        bundle: Path,
        *cases: str,
        modes: Iterable[str] = (),
        until: str | None = None,
        **options: Any,
    ) -> GateResult:
        name = engine if isinstance(engine, str) else "an object"
        return run_gate(
            load_engine(engine, options) if isinstance(engine, str) else engine,
            [bundle],
            engine_name=name,
            options=options,
            selection=Selection(frozenset(cases), frozenset(modes), until),
        )

    return judge


@pytest.fixture
def kdtr(capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """kdtr("gate", ...): exit code, out and err of the command."""

    def kdtr(*words: object) -> SimpleNamespace:
        capsys.readouterr()
        try:
            code: object = main([str(word) for word in words])
        except SystemExit as exit_:  # argparse's own refusals
            code = exit_.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return kdtr


@pytest.fixture
def cases_file(tmp_path: Path) -> Callable[[Any], Path]:
    """cases_file(entries): a file for `--cases`."""

    def write(entries: Any) -> Path:
        path = tmp_path / "cases.json"
        path.write_text(entries if isinstance(entries, str) else json.dumps(entries))
        return path

    return write
