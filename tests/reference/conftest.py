"""A small model in which no two sizes coincide, and what the tests of the reference draw."""

import numpy as np
import pytest
from hypothesis import strategies as st

from kdtr.contract import DraftTree, ModelConfig, tensor_shapes
from kdtr.reference import make_engine

SMALL = ModelConfig(
    vocab_size=23,
    hidden_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=14,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    intermediate_size=18,
    first_k_dense_replace=1,
    moe_intermediate_size=7,
    n_routed_experts=12,
    n_shared_experts=1,
    num_experts_per_tok=3,
    n_group=4,
    topk_group=2,
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=1.3,
    rms_norm_eps=3e-5,
    max_position_embeddings=64,
    rope_theta=300.0,
    latent_norm_eps=2e-6,
)


def random_tensors(config, seed, *, stacked_experts=False):
    """Float32 weights of the usual scale: a linear layer keeps the size of what it is given."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config, stacked_experts=stacked_experts).items():
        drawn = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            drawn = 1 + 0.2 * drawn
        elif name.endswith("e_score_correction_bias"):
            drawn = 0.1 * drawn
        elif name != "model.embed_tokens.weight":
            drawn = 1.5 * drawn / np.sqrt(shape[-1])
        tensors[name] = drawn.astype(np.float32)
    return tensors


def random_tree(rng, n, vocab, root):
    """n nodes or fewer: each steps back to its parent; a child like an older sibling is dropped."""
    tokens, parents, taken = [root], [-1], set()
    for i in range(1, n):
        edge = (max(0, min(i, len(tokens)) - 1 - int(rng.integers(4))), int(rng.integers(vocab)))
        if edge not in taken:
            taken.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


@pytest.fixture(scope="session")
def small():
    return SMALL


@pytest.fixture(scope="session")
def draw_tensors():
    return random_tensors


@pytest.fixture(scope="session")
def draw_tree():
    return random_tree


@pytest.fixture(scope="session", params=["append", "scratch"])
def model(request):
    """The small model under each of the two cache strategies."""
    return make_engine(cache=request.param).load((SMALL, random_tensors(SMALL, seed=1)))


@st.composite
def _draft_trees(draw, vocab=4, max_nodes=14, root=None):
    """Per node a token and the steps back to its parent; shrinks to a chain of token 0."""
    tokens, parents = [draw(st.integers(0, vocab - 1)) if root is None else root], [-1]
    for token, back in draw(
        st.lists(st.tuples(st.integers(0, vocab - 1), st.integers(0, 5)), max_size=max_nodes - 1)
    ):
        parent = max(0, len(tokens) - 1 - back)
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


@pytest.fixture(scope="session")
def draft_trees():
    return _draft_trees
