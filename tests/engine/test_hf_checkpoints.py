"""The engine beside Hugging Face's DeepseekV3ForCausalLM in float64 (tests/data/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtr.contract import DraftTree
from kdtr.engine import make_engine
from kdtr.engine.model import TreeModel

VARIANTS = (
    "v01-qlora-g1",
    "v04-noqlora-g4-halfrope",
    "v05-qlora-g4-yarn-v3",
    "v09-qlora-g4-negbias",
    "v12-qlora-g2-wide",
)
TREES = (
    "root_only",
    "chain_full",
    "chain_partial",
    "star_miss",
    "star_hit_last",
    "bfs",
    "dfs",
    "random_topo",
    "repeat_tokens",
)


@dataclass(frozen=True)
class Checkpoint:
    model: TreeModel
    cases: dict[str, np.ndarray]
    within: Callable[[np.ndarray, np.ndarray], bool]

    def after_prompt(self) -> Any:
        """A session that has read the prompt; its root is the first greedy token."""
        session = self.model.open(max_len=100)
        session.prefill(self.cases["prompt_ids"].tolist())
        return session

    def tree(self, name: str) -> tuple[DraftTree, dict[str, np.ndarray]]:
        prefix = f"tree.{name}."
        case = {k[len(prefix) :]: v for k, v in self.cases.items() if k.startswith(prefix)}
        return DraftTree(tuple(case["tokens"].tolist()), tuple(case["parents"].tolist())), case


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(
    request: pytest.FixtureRequest, hf_root: Path, float32_bound: Callable[..., float]
) -> Checkpoint:
    directory = hf_root / request.param
    model = make_engine(page_size=7, split_size=5).load(directory)
    with np.load(directory / "cases.npz") as stored:
        cases = dict(stored)

    def within(truth: np.ndarray, found: np.ndarray) -> bool:
        assert truth.shape == np.shape(found)
        return bool(np.abs(found - truth).max() <= float32_bound(truth, model.config))

    return Checkpoint(model, cases, within)


def test_prefill(checkpoint: Checkpoint, trace: Any) -> None:
    cases, within = checkpoint.cases, checkpoint.within
    session = checkpoint.model.open(max_len=60)

    root = session.prefill(cases["prompt_ids"].tolist(), trace=trace)

    assert cases["ar.input_ids"][0] == root
    assert within(cases["prefill.logits.f64"], trace["logits", None])
    assert within(cases["prefill.final_hidden.f64"], trace["final_hidden", None])
    cache = session.snapshot()
    assert within(cases["prefill.cache_latent.f64"], cache.c_kv)
    assert within(cases["prefill.cache_rope.f64"], cache.k_pe)
    first_moe = checkpoint.model.config.first_k_dense_replace
    for layer in range(checkpoint.model.config.num_hidden_layers):
        assert within(cases["prefill.layer_hidden.f64"][layer + 1], trace["hidden", layer])
        if layer >= first_moe:
            experts = cases["prefill.router_experts.f64"][layer - first_moe]
            weights = cases["prefill.router_weights.f64"][layer - first_moe]
            assert np.array_equal(experts, trace["expert_ids", layer])
            assert within(weights, trace["expert_weights", layer])


def test_autoregressive_decoding(checkpoint: Checkpoint, trace: Any) -> None:
    cases, within = checkpoint.cases, checkpoint.within
    session = checkpoint.after_prompt()

    for token, position, target, logits in zip(
        cases["ar.input_ids"],
        cases["ar.positions"],
        cases["ar.argmax"],
        cases["ar.logits.f64"],
        strict=True,
    ):
        assert (token, position) == (session.root, session.committed_len)
        assert target == session.decode(trace=trace)
        assert within(logits[None], trace["logits", None])

    cache, p = session.snapshot(), len(cases["prompt_ids"])
    assert within(cases["ar.cache_latent.f64"], cache.c_kv[:, p:])
    assert within(cases["ar.cache_rope.f64"], cache.k_pe[:, p:])


@pytest.mark.parametrize("name", TREES)
def test_tree(checkpoint: Checkpoint, name: str, trace: Any) -> None:
    """Verify, walk, compaction and the next step, for each of Hugging Face's nine trees."""
    within = checkpoint.within
    session = checkpoint.after_prompt()
    prompt_len = session.committed_len
    tree, case = checkpoint.tree(name)

    verified = session.verify(tree, trace=trace)

    assert np.array_equal(case["positions"], trace["positions", None])
    assert np.array_equal(case["mask"], trace["mask", None])
    assert within(case["logits.f64"], verified.logits)
    assert case["argmax"].tolist() == list(verified.targets)
    layers = range(checkpoint.model.config.num_hidden_layers)
    rows = [np.stack([trace[stage, i] for i in layers]) for stage in ("c_kv", "k_pe")]
    assert within(case["cache_latent.f64"], rows[0])
    assert within(case["cache_rope.f64"], rows[1])
    for i, experts in enumerate(case["router_experts.f64"]):
        moe_layer = i + checkpoint.model.config.first_k_dense_replace
        assert np.array_equal(experts, trace["expert_ids", moe_layer])

    acceptance = session.accept(tree)
    session.commit(acceptance)

    accepted = case["accepted_nodes"].tolist()
    assert (tuple(accepted), case["bonus_token"]) == (acceptance.path, acceptance.bonus)
    cache = session.snapshot()
    assert np.array_equal(rows[0][:, accepted], cache.c_kv[:, prompt_len:])  # moved, not computed
    assert np.array_equal(rows[1][:, accepted], cache.k_pe[:, prompt_len:])
    assert session.committed_len == prompt_len + len(accepted)

    session.decode(trace=trace)

    assert within(case["post_logits.f64"][None], trace["logits", None])


@pytest.mark.parametrize("name", TREES)
def test_fused_round_of_the_same_tree(checkpoint: Checkpoint, name: str) -> None:
    session = checkpoint.after_prompt()
    tree, case = checkpoint.tree(name)

    done = session.round(tree)

    assert case["accepted_nodes"].tolist() == list(done.acceptance.path)
    assert case["bonus_token"] == session.root == done.emitted[-1]
