"""The state machine as a law: by seed, watched, and with the moves that an engine has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis.stateful import run_state_machine_as_test

from kdtr.contract import KdtrError
from kdtr.property_tests.laws import laws, watch_examples
from kdtr.property_tests.subject import HOST, REFERENCE, Subject, load_subject
from kdtr.property_tests.test_state_machine import bounded, machine_for
from kdtr.property_tests.watch import FAILED, HELD, Example

sys.path.append(str(Path(__file__).resolve().parent / "engines"))

LAW = "any_history_is_its_tokens"


@pytest.fixture
def examples() -> Any:
    """What the law reports while a test runs."""
    function: Any = laws()[LAW].function
    before, found = function.sink, list[Example]()
    watch_examples(LAW, function, found.append)
    yield found
    function.sink = before


def played(examples: list[Example]) -> list[Any]:
    return [(p.model, p.events) for example in examples for p in example.played]


def run(subject: Subject, seed: int, n: int) -> None:
    function: Any = laws()[LAW].function
    function.run_seeded(subject, seed=seed, examples=n)


def test_a_seed_plays_the_same_moves_again(examples: list[Example]) -> None:
    host = load_subject("host", HOST)

    run(host, 3, 4)
    first = played(examples)
    examples.clear()
    run(host, 3, 4)

    assert first == played(examples)
    examples.clear()
    run(host, 4, 4)
    assert first != played(examples)


def test_every_example_is_reported_and_closed(examples: list[Example]) -> None:
    run(load_subject("reference", REFERENCE), 0, 5)

    assert [LAW] == sorted({example.law for example in examples})
    assert 5 == sum(example.verdict == HELD for example in examples)
    assert all(not example._open for example in examples)


def test_a_failed_example_is_reported_as_failed(examples: list[Example]) -> None:
    import law_faults

    subject = Subject("faulty", law_faults.make_engine("commit_keeps_the_last_bonus"))

    few = bounded(max_examples=60, derandomize=True, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, KdtrError, pytest.fail.Exception)):
        run_state_machine_as_test(machine_for(subject, examples.append), settings=few)
    assert FAILED in {example.verdict for example in examples}


def test_the_least_engine_moves_by_prefill_verify_and_commit(examples: list[Example]) -> None:
    import law_faults

    run(Subject("least", law_faults.make_engine("least")), 1, 12)

    verbs = {verb for example in examples for p in example.played for verb, _ in p.events}
    assert {"prefill", "verify", "commit"} == verbs
