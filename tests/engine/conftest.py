"""Small models for the engine's tests, and the one bound that they use.

A bound is a formula: float32 rounds with relative error u = 2**-24, a sum of k products carries
at most k u of the sum of their magnitudes, and the layers' errors add up in the residual stream.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.contract import LogicalCache, ModelConfig, tensor_shapes
from kdtr.engine import make_engine
from kdtr.engine.model import TreeModel
from kdtr.engine.session import TreeSession

# So that tests find cuda_stand_in.py, and on any machine the faults that a GPU's tests plant.
sys.path += [str(Path(__file__).parent), str(Path(__file__).parent / "gpu")]

UNIT_ROUNDOFF = 2.0**-24
DATA = Path(__file__).resolve().parents[1] / "data"

# No two sizes are equal, and nothing sits at a published default.
SMALL = ModelConfig(
    vocab_size=37,
    hidden_size=20,
    num_hidden_layers=3,
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
    max_position_embeddings=300,
    rope_theta=500.0,
    latent_norm_eps=2e-4,
)


def random_weights(config: ModelConfig, seed: int = 5) -> dict[str, np.ndarray]:
    """A checkpoint of this shape: every norm off 1, the correction bias of both signs."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config, stacked_experts=True).items():
        values = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif len(shape) > 1 and "embed" not in name:
            values *= 1.5 / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    return weights


@pytest.fixture(scope="session")
def small() -> ModelConfig:
    return SMALL


@pytest.fixture(scope="session")
def small_weights() -> dict[str, np.ndarray]:
    return random_weights(SMALL)


@pytest.fixture(scope="session")
def weights_of() -> Callable[[ModelConfig], dict[str, np.ndarray]]:
    """weights_of(config): random weights of its shapes."""
    return random_weights


@pytest.fixture(scope="session")
def load(small_weights: dict[str, np.ndarray]) -> Callable[..., TreeModel]:
    """load(config=SMALL, **engine options): the small model, or one of another configuration."""

    def load(config: ModelConfig = SMALL, **options: Any) -> TreeModel:
        weights = small_weights if config is SMALL else random_weights(config)
        return make_engine(**options).load((config, weights))

    return load


@pytest.fixture
def session(load: Callable[..., TreeModel]) -> TreeSession:
    """A session of 40 slots on pages of 4, with splits of 3: no edge falls on another."""
    return load(page_size=4, split_size=3).open(max_len=40)


@pytest.fixture(scope="session")
def started(load: Callable[..., TreeModel]) -> Callable[..., TreeSession]:
    """started(root=None, **engine options): 60 slots, the prompt read, the root replaced."""

    def started(root: int | None = None, **options: Any) -> TreeSession:
        session = load(**options).open(max_len=60)
        session.prefill([3, 0, 36, 8, 8, 1])  # token 0, the last token and a repeat
        if root is not None:
            session.set_root(root)
        return session

    return started


@pytest.fixture(scope="session")
def float32_bound() -> Callable[[np.ndarray, ModelConfig], float]:
    """Largest error of a float32 forward's values beside float64 ones of this scale."""

    def bound(truth: np.ndarray, config: ModelConfig) -> float:
        longest_sum = max(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads * config.v_head_dim,
        )
        scale = float(np.abs(truth).max())
        return UNIT_ROUNDOFF * longest_sum * config.num_hidden_layers * scale

    return bound


@pytest.fixture(scope="session")
def same_cache() -> Callable[[LogicalCache, LogicalCache], bool]:
    """Whether two snapshots are equal bit for bit."""

    def same(one: LogicalCache, other: LogicalCache) -> bool:
        return all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for name in ("tokens", "positions", "c_kv", "k_pe")
        )

    return same


@pytest.fixture
def trace() -> Recorder:
    return Recorder()


class Recorder(dict[tuple[str, "int | None"], np.ndarray]):
    """A trace that keeps a copy of every stage, in the order of the calls."""

    def __call__(self, stage: str, layer: int | None, array: object, /) -> None:
        self[stage, layer] = np.array(array)


@pytest.fixture(scope="session")
def ddtree_cases() -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """The official DDTree's drafts: a case's figures and its arrays (tests/data/README.md)."""
    lines = (DATA / "ddtree" / "tree_cases.jsonl").read_text(encoding="utf-8").splitlines()
    with np.load(DATA / "ddtree" / "tree_arrays.npz") as stored:
        arrays = dict(stored)
    cases = []
    for line in lines:
        case = json.loads(line)
        prefix = case["case"] + "/"
        own = {name[len(prefix) :]: a for name, a in arrays.items() if name.startswith(prefix)}
        cases.append((case, own))
    return cases


@pytest.fixture(scope="session")
def hf_root() -> Path:
    return DATA / "hf-deepseek-v3"
