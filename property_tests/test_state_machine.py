"""Any history: moves that Hypothesis chooses (`state_machine.py`), as a law.

A state machine has no body that Hypothesis offers for wrapping, so what pytest and a campaign ask
of a law is given here by hand: a sink, one example alone, examples of a seed.
"""

from __future__ import annotations

from typing import Any

import hypothesis
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from kdtr.property_tests.state_machine import STEPS, Histories
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.watch import Example, Sink


def machine_for(engine: Subject, sink: Sink) -> type[Histories]:
    """The machine of one engine, whose examples go to the sink."""
    law = test_any_history_is_its_tokens.__name__.removeprefix("test_")
    return type(
        "Histories", (Histories,), {"law": law, "subject": engine, "sink": staticmethod(sink)}
    )


def bounded(**more: Any) -> settings:
    """Few moves an example; one failure at a time, as each takes long to shrink."""
    return settings(stateful_step_count=STEPS, report_multiple_bugs=False, **more)


def test_any_history_is_its_tokens(engine: Subject) -> None:
    """FWD-1 to FWD-4, FWD-6, POS-1, SLOT-1 to SLOT-3, ACC-1, ACC-3, ACC-4, COMMIT-1 to COMMIT-5,
    LOSSLESS: after any moves, refused ones too, on any of several sessions, a session is its
    tokens, its root and what is pending: its cache and its rows are those of one prefill."""
    law: Any = test_any_history_is_its_tokens
    machine: Any = machine_for(engine, law.sink)
    # What --kdtr-example leaves on a law.
    blob = "_hypothesis_internal_use_reproduce_failure"
    if hasattr(law, blob):
        setattr(machine, blob, getattr(law, blob))
    run_state_machine_as_test(machine, settings=bounded())


def run_seeded(engine: Subject, seed: int, examples: int) -> None:
    """The law with examples of this seed, as many."""
    law: Any = test_any_history_is_its_tokens
    machine = hypothesis.seed(seed)(machine_for(engine, law.sink))
    run_state_machine_as_test(machine, settings=bounded(max_examples=examples, database=None))


def _nobody(example: Example) -> None:
    """Where examples go while nobody asks for them."""


test_any_history_is_its_tokens.sink = _nobody  # type: ignore[attr-defined]
test_any_history_is_its_tokens.run_seeded = run_seeded  # type: ignore[attr-defined]
