"""What the laws draw: small models, prompts, draft trees, planted paths, targets, draft logits.

Everything shrinks to its simplest member: the plain model, token 0, one chunk, a chain. A node is
drawn as a token and the steps back to its parent, so a branch in a counterexample is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from hypothesis import strategies as st
from hypothesis.vendor.pretty import RepresentationPrinter

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import SIGMOID, SOFTMAX, DraftTree, EmitLimit, ModelConfig, Yarn
from kdtr.property_tests import sizes
from kdtr.property_tests.trees import children

SIZES = sizes.sizes(sizes.chosen())
Q_LORA_RANKS = sizes.q_lora_ranks(sizes.chosen())
# Trained on 8 positions, so that the positions of these tests lie on both sides of it.
_STRETCH = Yarn(factor=5.0, original_max_position_embeddings=8, beta_fast=4.0)
YARNS: dict[str, Yarn | None] = {
    "none": None,
    "no mscale": _STRETCH,
    "mscale alone": Yarn(factor=5.0, original_max_position_embeddings=8, mscale=0.7),
    "mscale_all_dim alone": Yarn(
        factor=5.0, original_max_position_embeddings=8, mscale_all_dim=0.6
    ),
    "both, equal": Yarn(
        factor=5.0, original_max_position_embeddings=8, mscale=1.0, mscale_all_dim=1.0
    ),
    "both, unequal": Yarn(
        factor=5.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=1.3
    ),
    "mscale_all_dim zero": Yarn(
        factor=5.0, original_max_position_embeddings=8, mscale=0.7, mscale_all_dim=0.0
    ),
    "attention_factor": Yarn(factor=5.0, original_max_position_embeddings=8, attention_factor=1.2),
}
MAX_LEN = 64  # max_position_embeddings of every small model

PLAIN = ModelConfig(
    **{name: choices[0] for name, choices in SIZES.items()},  # type: ignore[arg-type]
    num_hidden_layers=1,
    num_attention_heads=3,
    q_lora_rank=Q_LORA_RANKS[0],
    first_k_dense_replace=1,
    n_routed_experts=9,
    n_shared_experts=1,
    num_experts_per_tok=2,
    n_group=3,
    topk_group=1,
    scoring_func=SIGMOID,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    rms_norm_eps=2e-5,
    max_position_embeddings=MAX_LEN,
    rope_theta=100.0,
)


@dataclass(frozen=True, slots=True, repr=False)
class SmallModel:
    """A configuration and the seed of its weights.

    bias_shift  added to every correction bias; -4 makes every biased score negative (MOE-2)
    poisoned    a token whose embedding is NaN, or with an overflow its unit vector of channel 0
    overflow    channel 0 belongs to the poisoned token, and kv_a multiplies it by this: all
                weights are finite, and its latents are not where 4 times this is infinite
    """

    config: ModelConfig = PLAIN
    seed: int = 0
    bias_shift: float = 0.0
    poisoned: int | None = None
    overflow: float = 0.0

    @property
    def is_poisoned(self) -> bool:
        """Whether some rows are NaN by right."""
        return self.poisoned is not None

    def tensors(self) -> dict[str, np.ndarray]:
        """The checkpoint, float32; the arrays are shared and cannot be written to."""
        return dict(_tensors(self))

    def __repr__(self) -> str:
        """Only what is not plain: the rest does not matter to the counterexample."""
        changes = [
            f"{name}={getattr(self.config, name)!r}"
            for name in ModelConfig.__dataclass_fields__
            if getattr(self.config, name) != getattr(PLAIN, name)
        ]
        config = [f"config=PLAIN.replace({', '.join(changes)})"] if changes else []
        seed = [f"seed={self.seed}"] if self.seed else []
        shift = [f"bias_shift={self.bias_shift}"] if self.bias_shift else []
        poison = [] if self.poisoned is None else [f"poisoned={self.poisoned}"]
        over = [f"overflow={self.overflow}"] if self.overflow else []
        return f"SmallModel({', '.join([*config, *seed, *shift, *poison, *over])})"

    def _repr_pretty_(self, printer: RepresentationPrinter, cycle: bool) -> None:
        """For Hypothesis, which would write out every field of a dataclass."""
        printer.text(repr(self))


@lru_cache(maxsize=64)  # an example loads the same model into several engines
def _tensors(model: SmallModel) -> dict[str, np.ndarray]:
    tensors = {
        name: array + np.float32(model.bias_shift) if name.endswith("_bias") else array
        for name, array in seed_tensors(model.config, model.seed).items()
    }
    if model.overflow:
        _reserve_channel_0(tensors, model.overflow)
    if model.poisoned is not None:
        row = tensors["model.embed_tokens.weight"][model.poisoned]
        row[:] = 0 if model.overflow else np.nan
        row[0] = 1 if model.overflow else np.nan
    for array in tensors.values():
        array.flags.writeable = False
    return tensors


def _reserve_channel_0(tensors: dict[str, np.ndarray], factor: float) -> None:
    """No embedding has channel 0 and nothing writes it; kv_a multiplies it by the factor."""
    tensors["model.embed_tokens.weight"][:, 0] = 0
    for name, array in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[0] = 0
        elif name.endswith("kv_a_proj_with_mqa.weight"):
            array[:, 0] = np.float32(factor) * (-1.0) ** np.arange(len(array))


@st.composite
def small_models(draw: st.DrawFn) -> SmallModel:
    """The plain model, with any of its switches turned."""
    layers, dense = draw(st.sampled_from([(1, 1), (1, 0), (2, 1), (2, 0)]))
    topk_group, experts = draw(st.sampled_from([(1, 2), (2, 4), (2, 1), (3, 5)]))
    config = PLAIN.replace(
        **{name: draw(st.sampled_from(choices)) for name, choices in SIZES.items()},
        q_lora_rank=draw(st.sampled_from([*Q_LORA_RANKS, None])),
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        n_shared_experts=draw(st.sampled_from([1, 0, 2])),
        num_experts_per_tok=experts,
        topk_group=topk_group,
        scoring_func=draw(st.sampled_from([SIGMOID, SOFTMAX])),
        norm_topk_prob=draw(st.sampled_from([True, False])),
        rope_interleave=draw(st.sampled_from([True, False])),
        latent_norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        yarn=YARNS[draw(st.sampled_from(list(YARNS)))],
    )
    return SmallModel(
        config=config,
        seed=draw(st.integers(0, 7)),
        bias_shift=draw(st.sampled_from([0.0, -4.0])),
    )


def tokens(vocab_size: int = PLAIN.vocab_size) -> st.SearchStrategy[int]:
    """Token ids: few, so that they meet, and the last one, which engines take for padding."""
    # Not just(last): a branch without a choice of its own would count as the simplest.
    return st.one_of(st.sampled_from([0, 1, 2, 3, vocab_size - 1]), st.integers(0, vocab_size - 1))


def prompts(
    vocab_size: int = PLAIN.vocab_size, *, min_size: int = 0, max_size: int = 7
) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(tokens(vocab_size), min_size=min_size, max_size=max_size).map(tuple)


@st.composite
def chunkings(draw: st.DrawFn, prompt: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The prompt cut in any places: in one piece first, in single tokens last."""
    cuts = [i for i in range(1, len(prompt)) if draw(st.booleans())]
    ends = [*cuts, len(prompt)]
    return tuple(tuple(prompt[a:b]) for a, b in zip([0, *cuts], ends, strict=True))


@st.composite
def tree_parents(draw: st.DrawFn, *, max_nodes: int = 9) -> tuple[int, ...]:
    """The shape of a tree in any topological order; a chain first (TREE-1)."""
    steps = draw(st.lists(st.integers(0, max_nodes - 2), max_size=max_nodes - 1))
    return (-1, *(max(0, i - back) for i, back in enumerate(steps)))


@st.composite
def draft_trees(
    draw: st.DrawFn, vocab_size: int = PLAIN.vocab_size, *, max_nodes: int = 9
) -> DraftTree:
    """Per node a token and the steps back from the node before to its parent (TREE-1, TREE-2).

    A token is drawn as its distance from the node's number, so the simplest are 0, 1, 2 and not all
    the same: a row that is read for another one shows only where their tokens differ, and a
    counterexample of equal tokens cannot shrink through its smaller neighbours.
    """
    root = draw(tokens(vocab_size))
    node = st.tuples(tokens(vocab_size), st.integers(0, max_nodes - 2))
    drawn = draw(st.lists(node, max_size=max_nodes - 1))
    parents = [-1, *(max(0, i - back) for i, (_, back) in enumerate(drawn))]
    below = [(i + distance) % vocab_size for i, (distance, _) in enumerate(drawn, start=1)]
    return with_distinct_siblings([root, *below], parents, vocab_size)


def with_distinct_siblings(
    wanted: Sequence[int], parents: Sequence[int], vocab_size: int
) -> DraftTree:
    """The tree with these tokens, the later of two equal siblings moved to the next free id."""
    taken: set[tuple[int, int]] = set()
    chosen = []
    for token, parent in zip(wanted, parents, strict=True):
        while (parent, token) in taken:
            token = (token + 1) % vocab_size
        taken.add((parent, token))
        chosen.append(token)
    return DraftTree(tuple(chosen), tuple(parents))


@dataclass(frozen=True, slots=True)
class Scene:
    """A model, the committed tokens, and a tree under verification."""

    model: SmallModel
    prompt: tuple[int, ...]
    tree: DraftTree


@st.composite
def scenes(draw: st.DrawFn, *, max_nodes: int = 9) -> Scene:
    model = draw(small_models())
    vocab_size = model.config.vocab_size
    prompt = draw(prompts(vocab_size))
    return Scene(model, prompt, draw(draft_trees(vocab_size, max_nodes=max_nodes)))


def nodes_of(tree: DraftTree, *, first: int = 0) -> st.SearchStrategy[int]:
    """A node, `first` or later, drawn as the steps back from the last one.

    So it stays the same node when shrinking takes nodes out before it.
    """
    last = len(tree) - 1
    return st.integers(0, last - first).map(lambda back: last - back)


@st.composite
def topological_orders(draw: st.DrawFn, tree: DraftTree) -> tuple[int, ...]:
    """The nodes in another legal order; the tree's own first (TREE-1)."""
    order: list[int] = []
    waiting = [0]
    while waiting:
        node = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        order.append(node)
        waiting = sorted([*waiting, *children(tree, node)])
    return tuple(order)


@st.composite
def targets_of(draw: st.DrawFn, tree: DraftTree, vocab_size: int) -> tuple[int, ...]:
    """One target per node: a token of one of its children, or any other token."""
    return tuple(
        draw(
            st.one_of(
                # Any token first: examples shrink to a short walk.
                tokens(vocab_size),
                st.sampled_from([tree.tokens[child] for child in children(tree, i)] or [0]),
            )
        )
        for i in range(len(tree))
    )


def emit_limits(vocab_size: int = PLAIN.vocab_size) -> st.SearchStrategy[EmitLimit]:
    return st.builds(
        EmitLimit,
        stop_tokens=st.frozensets(tokens(vocab_size), max_size=2),
        max_emitted=st.one_of(st.none(), st.integers(1, 4)),
    )


@dataclass(frozen=True, slots=True)
class Plant:
    """A tree to be, with the path that the truth will accept (ACC-1).

    parents  its shape
    path     the nodes to be accepted, root first
    misses   per node the token it gets if it is not on the path, moved on until it misses
    """

    parents: tuple[int, ...]
    path: tuple[int, ...]
    misses: tuple[int, ...]

    def tree(self, ahead: Sequence[int], vocab_size: int) -> DraftTree:
        """ahead  the root and the tokens that follow it by plain decoding."""
        target = {node: ahead[k + 1] for k, node in enumerate(self.path)}
        chosen = [ahead[0]]
        taken: set[tuple[int, int]] = set()
        for node in range(1, len(self.parents)):
            parent = self.parents[node]
            token = self.misses[node]
            if node in self.path:
                token = target[parent]
            else:
                while token == target.get(parent) or (parent, token) in taken:
                    token = (token + 1) % vocab_size
            taken.add((parent, token))
            chosen.append(token)
        return DraftTree(tuple(chosen), self.parents)


@st.composite
def plants(draw: st.DrawFn, vocab_size: int = PLAIN.vocab_size, *, max_nodes: int = 8) -> Plant:
    """A shape and a path down it: no node accepted first, then any sibling, to any depth."""
    parents = draw(tree_parents(max_nodes=max_nodes))
    shape = DraftTree(tuple(range(len(parents))), parents)
    path = [0]
    # Often down to a leaf: a walk that stops early hides what a deep commit does.
    while (below := children(shape, path[-1])) and draw(st.sampled_from([False, True, True])):
        path.append(draw(st.sampled_from(below)))
    size = len(parents)
    misses = draw(st.lists(tokens(vocab_size), min_size=size, max_size=size))
    return Plant(parents, tuple(path), tuple(misses))


@st.composite
def draft_logits(
    draw: st.DrawFn, vocab_size: int, *, max_depth: int = 3, float_type: str = "float64"
) -> np.ndarray:
    """[depth, w] of a few values, with ties, -inf, and rows without a finite logit (TREE-3)."""
    entry = st.sampled_from([0.0, 1.0, -1.0, 0.3, 2.7, -40.0, -np.inf])
    row = st.lists(entry, min_size=vocab_size, max_size=vocab_size)
    rows = draw(st.lists(row, max_size=max_depth))
    return np.array(rows, dtype=float_type).reshape(len(rows), vocab_size)
