"""The corpus: small models, each different from a published configuration in one way, and cases.

In the base configuration no two widths that could be confused are equal and nothing sits at a
published default; in no-two-alike the counts differ too. Prompts come from corpus_prompts.json:
golden_search.py chose them, token by token, so that no decision on an accepted path is thin in
bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kdtr.conformance.case import CasePlan
from kdtr.conformance.corpus_cases import (
    EDGES,
    LIMITS,
    SIZES,
    TIED,
    TWIN,
    Template,
    plain,
    stages,
    trees,
    with_prompt,
)
from kdtr.conformance.golden_margins import PRECISIONS
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
# Counts too differ from one another: a loop over the wrong one ends elsewhere.
_UNLIKE = ModelConfig(
    vocab_size=67,
    hidden_size=41,
    num_hidden_layers=4,
    num_attention_heads=5,
    q_lora_rank=29,
    kv_lora_rank=19,
    qk_nope_head_dim=13,
    qk_rope_head_dim=8,
    v_head_dim=10,
    intermediate_size=54,
    first_k_dense_replace=2,
    moe_intermediate_size=17,
    n_routed_experts=18,
    n_shared_experts=1,
    num_experts_per_tok=7,
    n_group=6,
    topk_group=3,
    scoring_func=SIGMOID,
    norm_topk_prob=True,
    routed_scaling_factor=1.7,
    rms_norm_eps=3e-3,
    max_position_embeddings=900,
    rope_theta=2000.0,
)
_YARN = Yarn(factor=6.0, original_max_position_embeddings=100, beta_fast=9.0, beta_slow=0.7)


@dataclass(frozen=True, slots=True)
class CorpusModel:
    """A model, why it is there, and its cases.

    thin  precisions of golden_margins.py in which decisions are thin on purpose
    """

    model: SeedModel
    why: str
    templates: tuple[Template, ...]
    thin: tuple[str, ...] = ()


def _variant(
    number: int,
    name: str,
    why: str,
    prompt: int,
    *,
    rounds: int = 4,
    thin: tuple[str, ...] = (),
    more: tuple[Template, ...] = (),
    **changes: Any,
) -> CorpusModel:
    """The base configuration changed in one way; `rounds` of the usual four.

    Every stage is recorded where the configuration is another, not the weights alone.
    """
    bent = {k: v for k, v in changes.items() if k in SeedModel.__dataclass_fields__}
    fields = {k: v for k, v in changes.items() if k not in bent}
    model = SeedModel(name, _BASE.replace(**fields), 4100 + number, **bent)
    staged = (stages(),) if fields else ()
    return CorpusModel(
        model, why, (*staged, trees(prompt, rounds=rounds), plain(prompt), *more), thin
    )


def corpus_models() -> tuple[CorpusModel, ...]:
    """Every model of the corpus, the base first."""
    both = {"mscale": 0.8, "mscale_all_dim": 1.2}
    return (
        CorpusModel(SeedModel("base", _BASE, 4100), "the configuration that others vary", EDGES),
        _variant(1, "half-split", "pairs (i, i + r/2)", 6, rope_interleave=False),
        _variant(2, "no-q-lora", "queries from q_proj", 5, q_lora_rank=None),
        _variant(3, "softmax", "softmax routing", 6, scoring_func=SOFTMAX, more=LIMITS),
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
        _variant(
            14,
            "token-ties",
            "equal rows in the head",
            5,
            thin=PRECISIONS,
            twins=_TWINS,
            more=(TIED,),
        ),
        _variant(
            17,
            "near-ties",
            "rows of the head that nearly agree",
            6,
            thin=PRECISIONS,
            near_twins=_TWINS,
        ),
        _variant(
            18,
            "close-logits",
            "rows of the head that float32 tells apart and bfloat16 does not",
            6,
            thin=("bfloat16",),
            near_twins=_TWINS,
            near_gap=2.0**-11,
        ),
        CorpusModel(
            SeedModel("no-two-alike", _UNLIKE, 4119, matrix_bits=8),
            "no two numbers of the configuration are equal; weights of 8 bits",
            (stages(), trees(6), plain(6), *SIZES),
        ),
        _variant(15, "expert-ties", "all experts alike", 5, thin=PRECISIONS, flat_router=True),
    )


_ALL_MOE: dict[str, Any] = {"first_k_dense_replace": 0, "n_shared_experts": 2}
_LATENT_EPS: dict[str, Any] = {"latent_norm_eps": 0.03}
_RAW: dict[str, Any] = {"norm_topk_prob": False, "n_shared_experts": 0}
_TWINS = tuple((token, token + TWIN) for token in range(TWIN))  # every token but 60 has a twin


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
