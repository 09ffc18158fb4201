"""The one ordered list of stages: what is recorded, stored, compared and diagnosed, in this order.

The first stage that differs names the fault's class; everything after it is consequence.

Axes: n rows (nodes of a tree, tokens of a prefill), s visible slots 0..L+n-1, h heads,
d qk_nope_head_dim, r qk_rope_head_dim, c kv_lora_rank, m hidden_size, e n_routed_experts,
k num_experts_per_tok, w vocab_size, a accept_len, l layers, t committed tokens, 2 (source slot,
destination slot).
"""

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Which verb shows the stage."""

    BUILD = "build"  # the tree that Session.build returns
    FORWARD = "forward"  # traced by forward_tokens, prefill, decode, verify and round
    LAYER = "layer"  # the same, once per layer
    JUDGE = "judge"  # two observations of the engine against each other, bit for bit
    WALK = "walk"  # traced by round; stepwise, the values that verify and accept return
    COMMIT = "commit"  # the session after commit: committed_len, root, snapshot


@dataclass(frozen=True, slots=True)
class Stage:
    """A named intermediate.

    axes   letters of the module docstring; "" for a single number
    exact  integers and booleans, compared exactly; False: numbers, compared within a bound
    rules  what a difference that is first seen here breaks, most likely first
    note   what the array holds, where the name does not say it
    """

    name: str
    axes: str
    exact: bool
    source: Source
    rules: tuple[str, ...]
    note: str = ""

    @property
    def row_axes(self) -> int:
        """How many leading axes number a row: the unit in which bounds hold (NUM-3)."""
        return 2 if self.axes.startswith("lt") else min(1, len(self.axes))


_EXACT, _NUMERIC = True, False

STAGES: tuple[Stage, ...] = (
    Stage("build_parents", "n", _EXACT, Source.BUILD, ("TREE-3", "TREE-4")),
    Stage("build_tokens", "n", _EXACT, Source.BUILD, ("TREE-3", "TREE-2")),
    Stage(
        "parents",
        "n",
        _EXACT,
        Source.FORWARD,
        ("TREE-1", "PAD-1"),
        "of a tree; not traced in prefill",
    ),
    Stage("tokens", "n", _EXACT, Source.FORWARD, ("FWD-3", "TREE-2"), "ids fed to the model"),
    Stage("positions", "n", _EXACT, Source.FORWARD, ("POS-1", "FWD-1")),
    Stage("mask", "ns", _EXACT, Source.FORWARD, ("MASK-2", "MASK-1"), "true where visible"),
    Stage("slots", "n", _EXACT, Source.FORWARD, ("SLOT-1",), "logical slot each row is written to"),
    Stage("embedding", "nm", _NUMERIC, Source.FORWARD, ("FWD-4",)),
    Stage("q_nope", "nhd", _NUMERIC, Source.LAYER, ("MLA-1", "NORM-1")),
    Stage("q_pe", "nhr", _NUMERIC, Source.LAYER, ("MLA-7", "MLA-6", "MLA-5"), "half-split"),
    Stage("c_kv", "nc", _NUMERIC, Source.LAYER, ("MLA-2", "NORM-1"), "normed"),
    Stage(
        "k_pe", "nr", _NUMERIC, Source.LAYER, ("MLA-7", "MLA-6", "MLA-5", "NORM-1"), "half-split"
    ),
    Stage(
        "scores",
        "nhs",
        _NUMERIC,
        Source.LAYER,
        ("MLA-4", "MLA-3", "MASK-2", "SLOT-1"),
        "scaled, before the softmax; -inf where invisible",
    ),
    Stage("out_latent", "nhc", _NUMERIC, Source.LAYER, ("MLA-3", "MASK-3")),
    Stage("attn_out", "nm", _NUMERIC, Source.LAYER, ("MLA-3",), "after o_proj, no residual"),
    Stage("router_scores", "ne", _NUMERIC, Source.LAYER, ("MOE-1", "NORM-1"), "unbiased"),
    Stage("expert_ids", "nk", _EXACT, Source.LAYER, ("MOE-2",), "ascending"),
    Stage("expert_weights", "nk", _NUMERIC, Source.LAYER, ("MOE-3",), "in the order of expert_ids"),
    Stage("mlp_out", "nm", _NUMERIC, Source.LAYER, ("MOE-4", "MOE-3"), "no residual"),
    Stage("hidden", "nm", _NUMERIC, Source.LAYER, ("FWD-4",), "residual stream after the layer"),
    Stage("final_hidden", "nm", _NUMERIC, Source.FORWARD, ("NORM-1",), "after the final norm"),
    Stage("logits", "nw", _NUMERIC, Source.FORWARD, ("FWD-4", "LOSSLESS")),
    Stage("untouched", "t", _EXACT, Source.JUDGE, ("SLOT-2",), "committed row left as it was"),
    Stage("targets", "n", _EXACT, Source.WALK, ("ACC-1", "NUM-2")),
    Stage("path", "a", _EXACT, Source.WALK, ("ACC-1", "ACC-4")),
    Stage("bonus", "", _EXACT, Source.WALK, ("ACC-2", "ACC-4")),
    Stage("emitted", "a", _EXACT, Source.WALK, ("ACC-3", "LOSSLESS")),
    Stage("moves", "a2", _EXACT, Source.WALK, ("COMMIT-1",), "logical slots"),
    Stage("committed_len", "", _EXACT, Source.COMMIT, ("COMMIT-2", "FWD-1")),
    Stage("root", "", _EXACT, Source.COMMIT, ("COMMIT-2", "FWD-1")),
    Stage("cache_tokens", "t", _EXACT, Source.COMMIT, ("COMMIT-3", "COMMIT-1")),
    Stage("cache_positions", "t", _EXACT, Source.COMMIT, ("COMMIT-3", "POS-1")),
    Stage("cache_c_kv", "ltc", _NUMERIC, Source.COMMIT, ("COMMIT-1", "COMMIT-3", "COMMIT-4")),
    Stage("cache_k_pe", "ltr", _NUMERIC, Source.COMMIT, ("COMMIT-1", "COMMIT-3"), "half-split"),
    Stage("copied", "a", _EXACT, Source.JUDGE, ("COMMIT-1", "NUM-2"), "cached as it was computed"),
)

STAGE: dict[str, Stage] = {stage.name: stage for stage in STAGES}
TRACED: frozenset[str] = frozenset(
    stage.name for stage in STAGES if stage.source in (Source.FORWARD, Source.LAYER, Source.WALK)
)


def stage_order(n_layers: int) -> list[tuple[Stage, int | None]]:
    """Every stage with its layer (None: not per layer), in the order of the computation.

    >>> [f"{stage.name} {layer}" for stage, layer in stage_order(2)][19:24]
    ['hidden 0', 'q_nope 1', 'q_pe 1', 'c_kv 1', 'k_pe 1']
    """
    per_layer = [stage for stage in STAGES if stage.source is Source.LAYER]
    first = STAGES.index(per_layer[0])
    order: list[tuple[Stage, int | None]] = [(stage, None) for stage in STAGES[:first]]
    order += [(stage, layer) for layer in range(n_layers) for stage in per_layer]
    order += [(stage, None) for stage in STAGES[first + len(per_layer) :]]
    return order
