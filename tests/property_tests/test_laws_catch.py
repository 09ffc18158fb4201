"""Every law can fail: a fault breaks it, and the honest engine that the fault is in does not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kdtr.conformance.bundle import GoldenBundle
from kdtr.contract import KdtrError
from kdtr.kdtr_format import reader
from kdtr.property_tests.laws import laws
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.test_state_machine import STEPS, machine_for

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "engines"), str(HERE.parent / "conformance" / "engines")]

# law: faults that it must see, of law_faults.py or planted_faults.py
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
        "length_grows_by_tree",
        "flips_last_bit",
        "position_by_index",
    ],
    "a_refused_call_changes_nothing": ["refusal_drops_pending"],
    "greedy_output_does_not_depend_on_what_is_drafted": ["bonus_of_last_row"],
}
# In how many examples a fault must be seen.
EXAMPLES = 600


def subject_of(name: str) -> Subject:
    import law_faults
    import planted_faults

    room = law_faults if name in law_faults.VARIANTS else planted_faults
    return Subject(name, room.make_engine(name))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """run(law, subject): without shrinking, as that it fails is all that is asked."""

    def run(law: str, subject: Subject | None, examples: int = EXAMPLES) -> None:
        function: Any = laws()[law].function
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
        function(**({} if subject is None else {"engine": subject}))

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


def test_a_rejected_nan_is_seen_where_it_is_read(run: Callable[..., None]) -> None:
    import law_faults

    engine = law_faults.takes_nan(law_faults.make_engine("stale_times_zero"))

    with pytest.raises(AssertionError, match=r"after the poison|differ in being finite"):
        run("a_rejected_nan_is_never_seen_again", Subject("takes NaN, reads it", engine))


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
