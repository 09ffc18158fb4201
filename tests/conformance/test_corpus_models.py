"""The corpus's models: the base has no two sizes to confuse, and each variant differs once."""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations

import pytest

from kdtr.conformance.case import DECISIONS, STAGES, Planted
from kdtr.conformance.corpus_models import corpus_models, corpus_plans
from kdtr.contract import ModelConfig, rules

MODELS = {entry.model.name: entry for entry in corpus_models()}
BASE = MODELS["base"].model.config
TEMPLATES = [
    pytest.param(entry, template, id=f"{name}/{template.alias}")
    for name, entry in MODELS.items()
    for template in entry.templates
]


def test_no_two_sizes_that_could_be_confused_are_equal() -> None:
    """Widths, sums of widths and products that name an array's axis."""
    c = BASE
    assert c.q_lora_rank is not None
    sizes = {
        "vocab": c.vocab_size,
        "hidden": c.hidden_size,
        "q_lora": c.q_lora_rank,
        "kv_lora": c.kv_lora_rank,
        "nope": c.qk_nope_head_dim,
        "rope": c.qk_rope_head_dim,
        "v": c.v_head_dim,
        "dense": c.intermediate_size,
        "moe": c.moe_intermediate_size,
        "experts": c.n_routed_experts,
        "chosen": c.num_experts_per_tok,
        "nope + rope": c.qk_nope_head_dim + c.qk_rope_head_dim,
        "kv_lora + rope": c.kv_lora_rank + c.qk_rope_head_dim,
        "heads * v": c.num_attention_heads * c.v_head_dim,
        "heads * (nope + rope)": c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim),
        "heads * (nope + v)": c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim),
    }
    alike = [(x, y) for x, y in combinations(sizes, 2) if sizes[x] == sizes[y]]
    assert [] == alike


def test_groups_and_choices_are_real_ones() -> None:
    per_group = BASE.n_routed_experts // BASE.n_group

    assert 1 < BASE.topk_group < BASE.n_group
    assert per_group > 2  # a group's two best are not all of it
    assert per_group < BASE.num_experts_per_tok < per_group * BASE.topk_group
    assert BASE.rms_norm_eps != BASE.latent_norm_eps


def test_names_and_seeds_are_each_one_s_own() -> None:
    entries = corpus_models()

    assert len(entries) == len(MODELS) == len({entry.model.seed for entry in entries})
    for entry in entries:
        aliases = [template.alias for template in entry.templates]
        assert len(aliases) == len(set(aliases))
        assert "state" not in aliases  # the script's name
        assert entry.why


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("base", "no-two-alike")])
def test_a_variant_differs_from_the_base_in_one_way(name: str) -> None:
    """By a field or two that belong together, or by its weights."""
    config = MODELS[name].model.config
    changed = {
        f.name for f in fields(ModelConfig) if getattr(config, f.name) != getattr(BASE, f.name)
    }
    together = {
        "all-moe": {"first_k_dense_replace", "n_shared_experts"},
        "raw-weights": {"norm_topk_prob", "n_shared_experts"},
        "one-group": {"n_group", "topk_group"},
    }
    ties = {"token-ties", "near-ties", "close-logits", "expert-ties"}
    of_weights = {"negative-bias", "negative-logits", *ties}

    assert changed == together.get(name, changed)
    assert (0 if name in of_weights else len(together.get(name, {name}))) == len(changed)


@pytest.mark.parametrize(("entry", "template"), TEMPLATES)
def test_every_case_can_be_planned(entry: object, template: object) -> None:
    plans = {plan.alias: plan for plan in corpus_plans(entry)}  # type: ignore[arg-type]
    plan = plans[template.alias]  # type: ignore[attr-defined]

    assert set(plan.rules) <= set(rules())
    assert plan.rules
    assert plan.level in (STAGES, DECISIONS)
    assert len(plan.rounds) >= 2
    ends = template.ends  # type: ignore[attr-defined]
    prompt = sum(plan.chunks, ())
    assert ends == prompt[len(prompt) - len(ends) :]


def test_some_limits_cut_a_path_short() -> None:
    """ACC-4: by length, by a token on the path, by the bonus."""
    (limits,) = (t for t in MODELS["base"].templates if t.alias == "limits")
    plans = [plan for plan in limits.rounds if isinstance(plan, Planted)]

    assert any(p.max_emitted is not None and p.max_emitted < len(p.path) for p in plans)
    assert any(p.stop_at is not None and p.stop_at < len(p.path) - 1 for p in plans)
    assert any(p.stop_at == len(p.path) - 1 for p in plans)
