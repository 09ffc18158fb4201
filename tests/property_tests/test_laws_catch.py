"""Every law can fail: a fault breaks it. None fails an engine for what it does not declare.

The laws of eight faults more are in `test_shrinking.py`, with what they shrink to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import Unsatisfiable
from hypothesis.stateful import run_state_machine_as_test

from kdtr.conformance.bundle import GoldenBundle
from kdtr.contract import KdtrError
from kdtr.kdtr_format import reader
from kdtr.property_tests import judge, rounding
from kdtr.property_tests.laws import laws
from kdtr.property_tests.state_machine import STEPS
from kdtr.property_tests.strategies import SmallModel
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.test_state_machine import machine_for

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "engines"), str(HERE.parent / "conformance" / "engines")]

# law: faults that it must see, of law_faults.py, planted_faults.py or shrinking_faults.py
CATCHES = {
    "an_overflow_stays_on_its_path": ["invisible_times_zero", "sibling_visible"],
    "a_nan_stays_on_its_path": ["nan_is_mended"],
    "a_rejected_overflow_is_never_seen_again": ["stale_times_zero", "stale_row_visible"],
    "rows_are_those_of_the_model": [
        "scale_from_latent",
        "half_split_pairs",
        "columns_swapped",
        "softmax_router",
        "groups_ignored",
        "groups_masked_with_zero",
        "weights_from_biased",
        "scaled_twice",
        "first_weight_for_all",
        "shared_expert_missing",
        "final_norm_twice",
        "latent_eps_of_other_norms",
    ],
    "attention_sees_differences_of_positions_alone": ["positions_wrap", "positions_forgotten"],
    "sequences_of_one_model_do_not_meet": ["one_scratch_for_all"],
    "a_batch_is_its_requests_alone": ["batch_lengths_rolled", "batch_offset_of_request_1"],
    "sampled_output_is_that_of_plain_sampling": [
        "targets_ignored",
        "visibility_transposed",
        "first_child_only",
    ],
    "a_commit_then_a_verify_is_a_longer_prompt": ["no_compaction", "rotated_again"],
    "the_same_calls_give_the_same_bits": ["restless"],
    "a_row_alone_has_the_same_bits": ["bits_by_size"],
    "any_history_is_its_tokens": [
        "commit_keeps_the_last_bonus",
        "refusal_drops_pending",
        "no_compaction",
        "only_c_kv_moves",
        "bonus_of_last_row",
        "round_accepts_its_root",
        "root_from_path",
        "flips_last_bit",
        "position_by_index",
    ],
    "a_refused_call_changes_nothing": ["refusal_drops_pending"],
    "greedy_output_does_not_depend_on_what_is_drafted": ["bonus_of_last_row"],
    "the_build_takes_the_best_prefixes": ["build_one_short"],
    "builds_are_nested_in_the_budget": ["build_by_size"],
    "a_build_depends_on_the_numbers_alone": ["build_beside_a_verify"],
    "a_verify_leaves_the_committed_rows_alone": ["flips_last_bit"],
    "verify_twice_is_verify_once": ["restless", "page_edge_low"],
    "a_commit_moves_the_rows_that_the_verify_wrote": ["rows_through_float16"],
    "positions_are_indices_after_any_history": ["length_grows_by_tree", "page_edge_low"],
    "a_reset_session_is_a_new_one": ["reset_keeps_the_root", "stale_row_visible"],
    "a_chain_is_causal_verification": ["drafts_high", "page_edge_low"],
    "decode_is_a_round_with_budget_0": ["decode_tells_the_root"],
    "pruning_a_branch_changes_no_other_row": ["sibling_visible", "page_edge_low"],
    "another_topological_order_permutes_the_rows": ["position_by_index", "page_edge_low"],
    "the_order_of_siblings_does_not_matter": ["sibling_visible", "page_edge_low"],
    "a_rejected_nan_is_never_seen_again": ["stale_nan_times_zero"],
    "capacity_is_legal_up_to_equality": ["one_slot_less"],
    "a_commit_applies_once_to_the_latest_verify": ["second_commit_is_nothing"],
    "greedy_output_does_not_depend_on_drafter_and_budget": ["bonus_of_last_row"],
    "no_token_is_lost_or_told_twice": ["limit_ignored", "root_from_path"],
    "a_fused_round_is_its_steps": ["round_without_limit"],
    "the_walk_follows_the_targets": ["first_child_only"],
    "the_walk_stops_at_a_stop_token_and_at_the_length_limit": ["no_stop_tokens", "no_max_emitted"],
    "the_walk_does_not_see_the_order_of_the_nodes": ["first_child_only"],
    "cache_layouts_are_indistinguishable": ["next_tokens"],
    "a_row_is_the_plain_run_over_its_path": ["page_edge_low"],
    "a_commit_is_plain_decoding_of_the_path": ["page_edge_low"],
    "every_chunking_of_a_prompt_is_the_same_prefill": ["page_edge_low"],
}
# Laws that speak of no engine, and the test here that has a fault for them.
WITHOUT_ENGINE = {
    "a_damaged_bundle_is_refused_or_unharmed": "test_an_unchecked_reader_is_seen",
    "a_bundle_with_other_contents_is_refused_or_read": "test_a_careless_golden_bundle_is_seen",
    "commit_moves_close_the_gaps": "test_moves_that_overtake_each_other_are_seen",
}
# In how many examples a fault must be seen.
EXAMPLES = 600


def subject_of(name: str) -> Subject:
    import law_faults
    import planted_faults
    import shrinking_faults

    rooms = (law_faults.VARIANTS, law_faults), (planted_faults.FAULTS, planted_faults)
    room: Any = next((room for names, room in rooms if name in names), shrinking_faults)
    return Subject(name, room.make_engine(name))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(law, subject): without shrinking, as that it fails is all that is asked.

    Of a law of twins, the subject is the second: nobody may tell it from the honest engine.
    """

    def run(law: str, subject: Subject | None, examples: int = EXAMPLES) -> None:
        entry = laws()[law]
        function: Any = entry.function
        few = settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        if law == "any_history_is_its_tokens":
            machine = machine_for(subject, lambda example: None)
            run_state_machine_as_test(machine, settings=settings(few, stateful_step_count=STEPS))
            return
        monkeypatch.setattr(function, "_hypothesis_internal_use_settings", few)
        given = {"": {}, "engine": {"engine": subject}}
        given["twins"] = {"twins": (subject_of("honest"), subject)}
        function(**given[entry.subject])

    return run


@pytest.mark.parametrize(
    ("law", "fault"), [(law, fault) for law, faults in CATCHES.items() for fault in faults]
)
def test_a_law_sees_its_faults(run: Callable[..., None], law: str, fault: str) -> None:
    # What an engine then refuses, or does not, ends a law too.
    with pytest.raises((AssertionError, KdtrError, pytest.fail.Exception)):
        run(law, subject_of(fault))


@pytest.mark.parametrize("law", ["a_nan_stays_on_its_path", "a_rejected_nan_is_never_seen_again"])
def test_the_laws_of_nan_hold_where_it_is_taken(run: Callable[..., None], law: str) -> None:
    run(law, subject_of("takes_nan"), 20)


def test_an_honest_batch_is_its_requests_alone(run: Callable[..., None]) -> None:
    run("a_batch_is_its_requests_alone", subject_of("batch"), 20)


def test_every_law_has_a_fault_that_it_sees() -> None:
    from shrinking_faults import FAULTS

    seen = CATCHES.keys() | {fault.law for fault in FAULTS.values()}

    assert WITHOUT_ENGINE.keys() == {law.name for law in laws().values() if not law.subject}
    assert [] == [name for name in WITHOUT_ENGINE.values() if name not in globals()]
    assert set() == laws().keys() - seen - WITHOUT_ENGINE.keys()


# Laws that ask two sessions the same, or one by different verbs.
BETWEEN_SESSIONS = (
    "a_reset_session_is_a_new_one",
    "a_refused_call_changes_nothing",
    "a_fused_round_is_its_steps",
    "decode_is_a_round_with_budget_0",
    "greedy_output_does_not_depend_on_what_is_drafted",
    "any_history_is_its_tokens",
)


@pytest.mark.parametrize("law", BETWEEN_SESSIONS)
def test_bits_between_sessions_are_asked_of_who_declares_them(
    run: Callable[..., None], law: str
) -> None:
    run(law, subject_of("unsteady"), 20)


@pytest.mark.parametrize("law", BETWEEN_SESSIONS)
def test_a_near_tie_may_fall_either_way_in_any_verb(
    run: Callable[..., None], law: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token has a twin of the same logits, and of both a choice may take either."""
    tensors = SmallModel.tensors

    def tied(model: SmallModel) -> dict[str, Any]:
        found = tensors(model)
        head = found["lm_head.weight"].copy()
        head[1::2] = head[: len(head) - 1 : 2]
        return {**found, "lm_head.weight": head}

    monkeypatch.setattr(SmallModel, "tensors", tied)
    for cached in (rounding.rounding, rounding._floor):
        cached.cache_clear()

    with suppress(Unsatisfiable):  # where all that was drawn is excused
        run(law, subject_of("undecided"), 2)

    for cached in (rounding.rounding, rounding._floor):
        cached.cache_clear()


def test_near_ties_and_bounds_are_those_of_the_declared_model(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = set()

    def noted(profile: Any, model: SmallModel, history: Any) -> Any:
        asked.add(model.config.latent_norm_eps)
        return rounding.rounding(profile, model, history)

    monkeypatch.setattr(judge, "rounding", noted)

    run("rows_are_those_of_the_model", subject_of("own_eps"), 10)
    run("a_row_is_the_plain_run_over_its_path", subject_of("own_eps"), 30)

    assert {0.5} == asked


def test_an_unchecked_reader_is_seen(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_check_payload", lambda entry, payload: None)

    with pytest.raises(AssertionError):
        run("a_damaged_bundle_is_refused_or_unharmed", None, 300)


def test_a_careless_golden_bundle_is_seen(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata that is trusted to be an object raises what is no BundleError."""

    def trusting(self: Any, model: Any) -> None:
        self.weights_sha256 = model["weights_sha256"]

    monkeypatch.setattr(GoldenBundle, "_check_model", trusting)

    with pytest.raises((TypeError, KeyError)):
        run("a_bundle_with_other_contents_is_refused_or_read", None, 300)


def test_moves_that_overtake_each_other_are_seen(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdtr.reference import commit_moves

    name = "commit_moves_close_the_gaps"
    module = sys.modules[laws()[name].function.__module__]
    monkeypatch.setattr(module, "commit_moves", lambda *args: commit_moves(*args)[::-1])

    with pytest.raises(AssertionError):
        run(name, None, 300)
