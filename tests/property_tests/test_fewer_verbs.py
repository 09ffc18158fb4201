"""Engines with fewer verbs, or that show less: which laws run on them, and why others do not.

The laws run as a user runs them, in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINES = Path(__file__).resolve().parent / "engines"
_OUTCOME = re.compile(r"::test_(\w+)(?:\[[^]]*\])? (PASSED|SKIPPED|FAILED|ERROR)(?: \((.*)\))?")

# Laws that an engine of prefill, verify and commit is held to.
LEAST = {
    "a_chain_is_causal_verification",
    "a_commit_applies_once_to_the_latest_verify",
    "a_commit_then_a_verify_is_a_longer_prompt",
    "a_refused_call_changes_nothing",
    "a_rejected_overflow_is_never_seen_again",
    "a_row_is_the_plain_run_over_its_path",
    "a_verify_that_was_not_committed_is_never_seen",
    "an_overflow_stays_on_its_path",
    "another_topological_order_permutes_the_rows",
    "any_history_is_its_tokens",
    "capacity_is_legal_up_to_equality",
    "every_chunking_of_a_prompt_is_the_same_prefill",
    "greedy_output_does_not_depend_on_what_is_drafted",
    "no_token_is_lost_or_told_twice",
    "pruning_a_branch_changes_no_other_row",
    "rows_are_those_of_the_model",
    "sequences_of_one_model_do_not_meet",
    "the_order_of_siblings_does_not_matter",
    "the_same_calls_give_the_same_bits",
    "verify_twice_is_verify_once",
}
DRAWS = {"sampled_output_is_that_of_plain_sampling"}
# What every engine here lacks: NaN is refused, batches and batch invariance are not offered.
NOBODY = {
    "a_nan_stays_on_its_path": "refuses such weights",
    "a_rejected_nan_is_never_seen_again": "refuses such weights",
    "a_batch_is_its_requests_alone": "does not offer verify_batch",
    "a_row_alone_has_the_same_bits": "does not declare batch invariance",
    "cache_layouts_are_indistinguishable": "name one by --kdtr-twin-option",
}


def run_laws(folder: Path, *words: str) -> dict[str, tuple[str, str]]:
    """(outcome, reason) of every law, by its name."""
    command = [str(Path(sys.executable).with_name("pytest")), "--pyargs", "kdtr.property_tests"]
    command += ["-v", "-p", "no:cacheprovider", "-p", "few_examples", *words]
    path = os.pathsep.join([str(folder), str(ENGINES)])
    profile = {"KDTR_HYPOTHESIS_PROFILE": "few", "PYTHONPATH": path, "COLUMNS": "400"}
    run = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **profile},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {law: (how, why or "") for law, how, why in _OUTCOME.findall(run.stdout)}
    assert found, run.stdout + run.stderr
    failed = [law for law, (how, _) in found.items() if how not in ("PASSED", "SKIPPED")]
    assert [] == failed, run.stdout[-5000:]
    return found


def wrapped(variant: str) -> dict[str, tuple[str, str]]:
    option = f"variant={variant!r}"
    return run_laws(
        ENGINES, "--kdtr-engine", "law_faults:make_engine", "--kdtr-engine-option", option
    )


def held(found: dict[str, tuple[str, str]]) -> set[str]:
    from kdtr.property_tests.laws import laws

    return {law for law, (how, _) in found.items() if how == "PASSED" and laws()[law].subject}


def test_the_minimal_engine_is_held_to_most_laws() -> None:
    found = run_laws(
        ROOT / "docs" / "examples" / "python", "--kdtr-engine", "minimal_engine:make_engine"
    )

    assert LEAST | DRAWS == held(found)
    reasons = {law: why for law, (how, why) in found.items() if how == "SKIPPED"}
    missing = {law: why for law, why in reasons.items() if law not in NOBODY}
    assert [] == [why for why in missing.values() if "does not " not in why]
    for law, verb in (
        ("the_walk_follows_the_targets", "accept"),
        ("a_verify_leaves_the_committed_rows_alone", "set_root"),
        ("attention_sees_differences_of_positions_alone", "forward_tokens"),
    ):
        assert f"minimal_engine:make_engine does not offer {verb}" in reasons[law]


def test_full_verbs_without_stages_miss_what_only_stages_show() -> None:
    found = wrapped("logits_only")

    skipped = {law: why for law, (how, why) in found.items() if how == "SKIPPED"}
    stages = {
        "a_commit_moves_the_rows_that_the_verify_wrote": "does not show the latents that it stores"
    }
    assert (NOBODY | stages).keys() == skipped.keys()
    for law, why in (NOBODY | stages).items():
        assert why in skipped[law]


def test_an_engine_that_shows_tokens_alone_is_held_to_them() -> None:
    found = wrapped("least_targets_only")

    assert held(found) == LEAST
    assert "does not show logits to draw from" in found[min(DRAWS)][1]
