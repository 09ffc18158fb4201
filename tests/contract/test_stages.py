"""The one ordered list: unique names, existing rules, and the order of the computation."""

import pytest

from kdtr.contract import STAGE, STAGES, TRACED, Source, rules, stage_order

NAMES = [stage.name for stage in STAGES]

each_stage = pytest.mark.parametrize("stage", STAGES, ids=NAMES)


def test_names_are_unique_and_found():
    assert len(set(NAMES)) == len(NAMES)
    assert NAMES == list(STAGE)
    assert all(STAGE[stage.name] is stage for stage in STAGES)


@each_stage
def test_a_stage_cites_existing_rules(stage):
    assert stage.rules
    assert [] == [rule for rule in stage.rules if rule not in rules()]
    assert len(set(stage.rules)) == len(stage.rules)


@each_stage
def test_axes_are_letters_of_the_page_once_each(stage):
    assert set(stage.axes) <= set("nshdrcmekwalt2")
    assert len(set(stage.axes)) == len(stage.axes)


def test_sources_come_in_the_order_of_a_round():
    """Build, forward, its layers, forward again, the judge's look, walk, commit, a last look."""
    sources = [stage.source for stage in STAGES]

    runs = [source for i, source in enumerate(sources) if i == 0 or sources[i - 1] != source]

    expected = [
        Source.BUILD,
        Source.FORWARD,
        Source.LAYER,
        Source.FORWARD,
        Source.JUDGE,
        Source.WALK,
        Source.COMMIT,
        Source.JUDGE,
    ]
    assert expected == runs


@pytest.mark.parametrize(
    "order",
    [
        ("tokens", "positions", "mask", "slots", "embedding", "q_nope"),
        ("q_nope", "q_pe", "c_kv", "k_pe", "scores", "out_latent", "attn_out", "router_scores"),
        ("router_scores", "expert_ids", "expert_weights", "mlp_out", "hidden", "final_hidden"),
        ("final_hidden", "logits", "targets", "path", "bonus", "emitted", "moves"),
        ("moves", "committed_len", "root", "cache_tokens", "cache_positions", "cache_c_kv"),
    ],
    ids=lambda order: order[0],
)
def test_what_is_computed_from_another_stage_comes_after_it(order):
    places = [NAMES.index(name) for name in order]

    assert sorted(places) == places


def test_integers_and_booleans_are_exact_and_nothing_else():
    numeric = {
        "embedding",
        "q_nope",
        "q_pe",
        "c_kv",
        "k_pe",
        "scores",
        "out_latent",
        "attn_out",
        "router_scores",
        "expert_weights",
        "mlp_out",
        "hidden",
        "final_hidden",
        "logits",
        "cache_c_kv",
        "cache_k_pe",
    }

    assert numeric == {stage.name for stage in STAGES if not stage.exact}


def test_what_is_traced_is_the_forward_and_the_walk():
    untraced = {stage.name for stage in STAGES} - TRACED

    expected = {
        "build_parents",
        "build_tokens",
        "untouched",
        "copied",
        "committed_len",
        "root",
        "cache_tokens",
        "cache_positions",
        "cache_c_kv",
        "cache_k_pe",
    }
    assert expected == untraced


@pytest.mark.parametrize("n_layers", [1, 3])
def test_the_order_repeats_the_layers_stages_once_per_layer(n_layers):
    order = stage_order(n_layers)

    outside = [stage for stage, layer in order if layer is None]
    assert [stage for stage in STAGES if stage.source is not Source.LAYER] == outside
    per_layer = [stage for stage in STAGES if stage.source is Source.LAYER]
    inside = [(stage, layer) for stage, layer in order if layer is not None]
    assert [(stage, i) for i in range(n_layers) for stage in per_layer] == inside
    names = [stage.name for stage, _ in order]
    assert "embedding" == names[names.index("q_nope") - 1]
    assert "final_hidden" == names[len(names) - names[::-1].index("hidden")]


@pytest.mark.parametrize(
    ("name", "row_axes"),
    [("logits", 1), ("scores", 1), ("cache_c_kv", 2), ("cache_k_pe", 2), ("root", 0), ("path", 1)],
)
def test_a_row_is_a_node_or_a_layers_token(name, row_axes):
    assert row_axes == STAGE[name].row_axes
