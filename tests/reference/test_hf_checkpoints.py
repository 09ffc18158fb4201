"""The reference equals Hugging Face's DeepSeek-V3, in float64, on five tiny checkpoints."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kdtr.contract import DraftTree
from kdtr.reference import make_engine, path, positions
from kdtr.reference.tree import tree_mask

DATA = Path(__file__).resolve().parents[1] / "data" / "hf-deepseek-v3"
VARIANTS = (
    "v01-qlora-g1",
    "v04-noqlora-g4-halfrope",
    "v05-qlora-g4-yarn-v3",
    "v09-qlora-g4-negbias",
    "v12-qlora-g2-wide",
)
TREES = (
    "bfs",
    "chain_full",
    "chain_partial",
    "dfs",
    "random_topo",
    "repeat_tokens",
    "root_only",
    "star_hit_last",
    "star_miss",
)
# Both sides compute in float64 with different orders of summation, over some twenty contractions
# of up to 128 terms: measured 2e-14; a wrong detail of the model shows from 1e-6 up.
TOLERANCE = 1e-12

each_variant = pytest.mark.parametrize("variant", VARIANTS)


class Part:
    """The arrays under one prefix of a variant's file; remembers which were read."""

    def __init__(self, variant: str, prefix: str) -> None:
        with np.load(DATA / variant / "cases.npz") as file:
            self._arrays = {
                name.removeprefix(prefix): file[name]
                for name in file.files
                if name.startswith(prefix)
            }
        self._unread = set(self._arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        self._unread.discard(name)
        return self._arrays[name]

    def same(self, name: str, actual) -> None:
        """Equal integers, or numbers within the tolerance of the largest of the array."""
        expected, actual = self[name], np.asarray(actual)
        assert expected.shape == actual.shape, name
        if expected.dtype.kind in "iub":
            np.testing.assert_array_equal(actual, expected, err_msg=name)
            return
        assert expected.dtype == np.float64
        worst = np.abs(actual - expected).max() / np.abs(expected).max()
        assert worst <= TOLERANCE, f"{name}: {worst:.1e} of the array's scale"

    def assert_all_read(self) -> None:
        assert self._arrays
        assert set() == self._unread


class Stages(dict):
    """A trace that keeps every stage: (name, layer) -> a copy of the array."""

    def __call__(self, stage, layer, array):
        self[stage, layer] = np.array(array)

    def layers(self, stage):
        """[layers that have the stage, ...]"""
        return np.stack([array for (name, _), array in self.items() if name == stage])


@cache
def loaded(variant):
    return make_engine().load(DATA / variant)


def prefilled(variant, trace):
    session = loaded(variant).open(max_len=64)
    prompt = Part(variant, "prompt_ids")[""]
    root = session.prefill(prompt, trace=trace)
    return session, root


def sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


@each_variant
def test_prefill(variant):
    expected, stages = Part(variant, "prefill."), Stages()

    session, root = prefilled(variant, stages)

    cached = session.snapshot()
    hiddens = np.concatenate([stages["embedding", None][None], stages.layers("hidden")])
    expected.same("logits.f64", stages["logits", None])
    expected.same("layer_hidden.f64", hiddens)
    expected.same("final_hidden.f64", stages["final_hidden", None])
    expected.same("cache_latent.f64", cached.c_kv)
    expected.same("cache_rope.f64", cached.k_pe)
    expected.same("router_experts.f64", stages.layers("expert_ids"))
    expected.same("router_weights.f64", stages.layers("expert_weights"))
    scores = sigmoid(expected["router_logits.f64"])
    np.testing.assert_allclose(stages.layers("router_scores"), scores, rtol=0, atol=TOLERANCE)
    assert expected["logits.f64"][-1].argmax() == root
    expected.assert_all_read()


@each_variant
def test_router_logits(variant):
    """Before the sigmoid, which would flatten a difference at its ends."""
    model, stages = loaded(variant), Stages()

    prefilled(variant, stages)

    expected = Part(variant, "prefill.")
    moe = [i for i in range(model.config.num_hidden_layers) if not model.config.is_dense(i)]
    scores = np.stack([stages["router_scores", i] for i in moe])
    # The inverse of the sigmoid magnifies its rounding by 1 / (score (1 - score)): weigh it back.
    margin = scores * (1 - scores)
    error = np.abs(np.log(scores / (1 - scores)) - expected["router_logits.f64"])
    assert margin.min() > 1e-4
    assert (error * margin).max() <= TOLERANCE


@each_variant
def test_ten_decodes(variant):
    expected, logits = Part(variant, "ar."), []
    session, root = prefilled(variant, Stages())
    length = session.committed_len
    fed, chosen, where = [], [], []

    for _ in range(10):
        stages = Stages()
        fed.append(session.root)
        chosen.append(session.decode(trace=stages))
        where.extend(stages["positions", None])
        logits.append(stages["logits", None][0])

    cached = session.snapshot()
    assert root == fed[0]
    expected.same("input_ids", fed)
    expected.same("argmax", chosen)
    expected.same("positions", where)
    expected.same("positions", cached.positions[length:])
    expected.same("logits.f64", logits)
    expected.same("cache_latent.f64", cached.c_kv[:, length:])
    expected.same("cache_rope.f64", cached.k_pe[:, length:])
    expected.assert_all_read()


@each_variant
@pytest.mark.parametrize("name", TREES)
def test_tree(variant, name):
    """Verify, walk, commit, and the step after it."""
    expected, stages, after = Part(variant, f"tree.{name}."), Stages(), Stages()
    tree = DraftTree(tokens=expected["tokens"], parents=expected["parents"])
    session, _ = prefilled(variant, Stages())
    length = session.committed_len
    before = session.snapshot()

    verified = session.verify(tree, trace=stages)
    acceptance = session.accept(tree)
    session.commit(acceptance)
    committed = session.snapshot()
    session.decode(trace=after)

    expected.same("depths", [len(path(tree, i)) - 1 for i in range(len(tree))])
    expected.same("positions", positions(tree, length))
    expected.same("positions", stages["positions", None])
    expected.same("mask", tree_mask(tree, length))
    expected.same("mask", stages["mask", None])
    expected.same("logits.f64", verified.logits)
    expected.same("argmax", verified.targets)
    expected.same("router_experts.f64", stages.layers("expert_ids"))
    expected.same("cache_latent.f64", stages.layers("c_kv"))
    expected.same("cache_rope.f64", stages.layers("k_pe"))
    expected.same("accepted_nodes", acceptance.path)
    expected.same("bonus_token", acceptance.bonus)
    expected.same("post_logits.f64", after["logits", None][0])
    assert acceptance.bonus == after["tokens", None][0]
    assert length + acceptance.accept_len == after["positions", None][0]
    kept = list(acceptance.path)
    np.testing.assert_array_equal(committed.c_kv[:, :length], before.c_kv)
    np.testing.assert_array_equal(committed.c_kv[:, length:], stages.layers("c_kv")[:, kept])
    np.testing.assert_array_equal(committed.k_pe[:, length:], stages.layers("k_pe")[:, kept])
    expected.assert_all_read()


@each_variant
def test_every_array_belongs_to_a_part(variant):
    """With assert_all_read in each part: no array of the file is left out."""
    prefixes = ("prompt_ids", "prefill.", "ar.", *(f"tree.{name}." for name in TREES))

    with np.load(DATA / variant / "cases.npz") as file:
        names = set(file.files)

    parts = [{name for name in names if name.startswith(prefix)} for prefix in prefixes]
    assert names == set().union(*parts)
    assert 132 == len(names) == sum(map(len, parts))
