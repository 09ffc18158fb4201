"""The corpus: small models, each different from a published configuration in one way, and cases.

In the base configuration no two sizes that could be confused are equal and nothing sits at a
published default. Prompts come from corpus_prompts.json: golden_search.py chose them, token by
token, so that no decision on an accepted path is thin in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kdtr.conformance.case import CasePlan, Drafted, Planted, RoundPlan
from kdtr.conformance.seed_model import SeedModel
from kdtr.contract import SIGMOID, SOFTMAX, ModelConfig, Yarn

_BASE = ModelConfig(
    vocab_size=61,
    hidden_size=45,
    num_hidden_layers=3,
    num_attention_heads=3,
    q_lora_rank=23,
    kv_lora_rank=19,
    qk_nope_head_dim=14,
    qk_rope_head_dim=6,
    v_head_dim=11,
    intermediate_size=50,
    first_k_dense_replace=1,
    moe_intermediate_size=17,
    n_routed_experts=9,
    n_shared_experts=1,
    num_experts_per_tok=4,
    n_group=3,
    topk_group=2,
    scoring_func=SIGMOID,
    norm_topk_prob=True,
    routed_scaling_factor=1.3,
    rms_norm_eps=2e-3,
    max_position_embeddings=600,
    rope_theta=3000.0,
)
_YARN = Yarn(factor=6.0, original_max_position_embeddings=100, beta_fast=9.0, beta_slow=0.7)

_ROOT = Planted((-1,))
_Y = (-1, 0, 0, 2)
_STAR = (-1, 0, 0, 0)
_CHAIN = (-1, 0, 1, 2)
_SCATTERED = (-1, 0, 0, 1, 0, 2, 5)
# 65 and 129 nodes: more ancestors than one and two 64-bit words; 40 siblings, then 24 and more.
_NODES_65 = (-1, *((i - 1) // 40 for i in range(1, 65)))
_NODES_129 = (-1, *((i - 1) // 40 for i in range(1, 129)))

_TREES: tuple[RoundPlan, ...] = (
    Planted(_Y, (0, 2, 3)),
    Planted(_STAR, (0,)),
    Drafted((1, None), budget=5),
    Planted(_SCATTERED, (0, 2, 5, 6)),
)


@dataclass(frozen=True, slots=True)
class Template:
    """A case whose prompt is searched for.

    chunks    sizes of the pieces in which the prompt is prefilled
    level     how much of the truth is recorded: case.STAGES or case.DECISIONS
    ends      tokens that the prompt ends with
    """

    alias: str
    why: str
    rules: tuple[str, ...]
    chunks: tuple[int, ...]
    rounds: tuple[RoundPlan, ...]
    level: str = "decisions"
    ends: tuple[int, ...] = ()

    @property
    def accepted(self) -> int:
        """The most rows that may be accepted over all rounds."""
        return sum(
            len(plan.path) if isinstance(plan, Planted) else len(plan.ranks) + 1
            for plan in self.rounds
            if isinstance(plan, Planted | Drafted)
        )


@dataclass(frozen=True, slots=True)
class CorpusModel:
    """A model, why it is there, and its cases; `thin`: decisions are thin on purpose."""

    model: SeedModel
    why: str
    templates: tuple[Template, ...]
    thin: bool = False


def _trees(prompt: int, *, rounds: int = 4, level: str = "decisions") -> Template:
    return Template(
        "trees",
        "a sibling that is not the first, a miss, a best-first tree",
        ("POS-1", "MASK-2", "ACC-1", "COMMIT-1", "TREE-3"),
        (prompt,),
        _TREES[:rounds],
        level,
    )


def _ar(prompt: int) -> Template:
    return Template("ar", "plain decoding", ("FWD-1", "FWD-2", "COMMIT-2"), (prompt,), (_ROOT,) * 6)


def _stages() -> Template:
    """Plain decoding once more, short, so that every stage can be recorded: where a variant goes
    wrong is seen at the stage at which it does, and judged before the cases that decide alone."""
    return Template(
        "stages",
        "every stage of plain decoding",
        ("FWD-1", "FWD-2", "MLA-3", "NORM-1"),
        (4,),
        (_ROOT,) * 2,
        "stages",
    )


def _variant(
    number: int,
    name: str,
    why: str,
    prompt: int,
    *,
    rounds: int = 4,
    thin: bool = False,
    **changes: Any,
) -> CorpusModel:
    """The base configuration changed in one way; `rounds` of the usual four.

    Every stage is recorded where the configuration is another, not the weights alone.
    """
    bent = {k: v for k, v in changes.items() if k in SeedModel.__dataclass_fields__}
    fields = {k: v for k, v in changes.items() if k not in bent}
    model = SeedModel(name, _BASE.replace(**fields), 4100 + number, **bent)
    staged = (_stages(),) if fields else ()
    return CorpusModel(model, why, (*staged, _trees(prompt, rounds=rounds), _ar(prompt)), thin)


_EDGES = (
    _trees(7, level="stages"),
    _ar(7),
    Template(
        "one-token",
        "a prompt of one token: L = 1 at the first tree",
        ("FWD-1", "MASK-1"),
        (1,),
        (Planted(_Y, (0, 2, 3)), Planted(_STAR, (0, 3))),
    ),
    Template(
        "chunk-edges",
        "prefill in pieces of 1, 6 and 1: a piece of one row, and a last piece of one row",
        ("FWD-1", "FWD-6"),
        (1, 6, 1),
        (Planted(_CHAIN, (0, 1)), Planted(_Y, (0, 1))),
    ),
    Template(
        "page-end",
        "15 tokens, so that the tree's second row opens a page of 16",
        ("SLOT-1", "COMMIT-1"),
        (15,),
        (Planted(_SCATTERED, (0, 2, 5, 6)), Planted(_STAR, (0, 2))),
    ),
    Template(
        "page-full",
        "16 tokens, a page exactly: the root opens the next one",
        ("SLOT-1", "COMMIT-1"),
        (16,),
        (Planted(_SCATTERED, (0, 2, 5)), Planted(_Y, (0,))),
    ),
    Template(
        "page-begun",
        "17 tokens in pieces of 16 and 1: one row past a page",
        ("SLOT-1", "FWD-1"),
        (16, 1),
        (Planted(_SCATTERED, (0, 1, 3)), Planted(_Y, (0, 2))),
    ),
    Template(
        "edge-tokens",
        "a prompt that ends with token 0 and the last id",
        ("TREE-2", "PAD-1"),
        (6,),
        (Planted(_STAR, (0, 3)), Planted(_Y, (0, 2, 3))),
        ends=(0, 60),
    ),
    Template(
        "chain",
        "chains taken whole, in part and not at all",
        ("FWD-5", "ACC-2"),
        (5,),
        (Planted(_CHAIN, (0, 1, 2)), Planted(_CHAIN, (0,)), Planted(_CHAIN, (0, 1))),
    ),
    Template(
        "limits",
        "a length limit inside the accepted path, a stop token on it, a stop token as the bonus",
        ("ACC-4", "ACC-3", "COMMIT-2"),
        (7,),
        (
            Planted(_CHAIN, (0, 1, 2, 3), max_emitted=2),
            Planted(_Y, (0, 2, 3), stop_at=0),
            Planted(_Y, (0, 2), stop_at=1),
        ),
    ),
    Template(
        "long",
        "70 tokens in pieces that cross 16, 32 and 64; trees of 65 and 129 nodes over 200 slots",
        ("MASK-2", "SLOT-1", "MLA-3", "COMMIT-1"),
        (15, 18, 37),
        (Planted(_NODES_65, (0, 1, 62)), Planted(_NODES_129, (0, 3, 128))),
    ),
)


def corpus_models() -> tuple[CorpusModel, ...]:
    """Every model of the corpus, the base first."""
    both = {"mscale": 0.8, "mscale_all_dim": 1.2}
    return (
        CorpusModel(SeedModel("base", _BASE, 4100), "the configuration that others vary", _EDGES),
        _variant(1, "half-split", "pairs (i, i + r/2)", 6, rope_interleave=False),
        _variant(2, "no-q-lora", "queries from q_proj", 5, q_lora_rank=None),
        _variant(3, "softmax", "softmax routing", 6, scoring_func=SOFTMAX),
        _variant(4, "negative-bias", "0 for -inf would choose a closed group", 7, bias=-1.5),
        _variant(5, "all-moe", "no dense layer, two shared experts", 6, **_ALL_MOE),
        _variant(6, "raw-weights", "expert weights not normalised, no shared one", 5, **_RAW),
        _variant(7, "one-group", "no groups", 6, n_group=1, topk_group=1),
        _variant(8, "yarn", "YaRN without mscale keys", 9, yarn=_YARN),
        _variant(9, "yarn-both", "both mscale keys, unequal", 8, yarn=_yarn(**both)),
        _variant(10, "yarn-one", "mscale alone: MLA-5 ignores it", 7, yarn=_yarn(mscale=0.8)),
        _variant(11, "yarn-all-dim", "mscale_all_dim alone", 7, yarn=_yarn(mscale_all_dim=1.2)),
        _variant(
            12, "yarn-factor", "attention_factor", 6, yarn=_yarn(attention_factor=0.9, **both)
        ),
        _variant(
            13, "negative-logits", "no logit is above zero", 5, rounds=3, negative_logits=True
        ),
        _variant(16, "latent-eps", "latent norms with an eps of their own", 6, **_LATENT_EPS),
        _variant(14, "token-ties", "equal rows in the head", 5, thin=True, twins=_TWINS),
        _variant(
            17, "near-ties", "rows of the head that nearly agree", 6, thin=True, near_twins=_TWINS
        ),
        _variant(15, "expert-ties", "all experts alike", 5, thin=True, flat_router=True),
    )


_ALL_MOE: dict[str, Any] = {"first_k_dense_replace": 0, "n_shared_experts": 2}
_LATENT_EPS: dict[str, Any] = {"latent_norm_eps": 0.03}
_RAW: dict[str, Any] = {"norm_topk_prob": False, "n_shared_experts": 0}
_TWINS = tuple((token, token + 30) for token in range(30))  # every token but 60 has a twin


def _yarn(**keys: float) -> Yarn:
    return Yarn(
        factor=_YARN.factor,
        original_max_position_embeddings=_YARN.original_max_position_embeddings,
        beta_fast=_YARN.beta_fast,
        beta_slow=_YARN.beta_slow,
        **keys,
    )


@cache
def _prompts() -> dict[str, list[int]]:
    page = resources.files(__package__).joinpath("corpus_prompts.json")
    prompts: dict[str, list[int]] = json.loads(page.read_text(encoding="utf-8"))
    return prompts


def corpus_plans(entry: CorpusModel) -> Iterator[CasePlan]:
    """The cases of a model, with their prompts."""
    for template in entry.templates:
        prompt = _prompts()[f"{entry.model.name}/{template.alias}"]
        yield with_prompt(template, prompt)


def with_prompt(template: Template, prompt: list[int]) -> CasePlan:
    """The template with this prompt, cut into its chunks."""
    chunks, start = [], 0
    for size in template.chunks:
        chunks.append(tuple(prompt[start : start + size]))
        start += size
    assert start == len(prompt), f"{template.alias}: {len(prompt)} tokens for {template.chunks}"
    return CasePlan(
        template.alias,
        template.why,
        template.rules,
        template.rounds,
        tuple(chunks),
        level=template.level,
    )
