"""What Hypothesis makes of a law on a faulty engine: the example to which it shrinks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from shrinking_faults import FAULTS

from kdtr.property_tests.laws import laws, watch_examples
from kdtr.property_tests.subject import load_subject
from kdtr.property_tests.watch import Example

ENGINE = "shrinking_faults:make_engine"
EXAMPLES = 1000  # until the fault shows; then only shrinking counts

_SEED = "_hypothesis_internal_use_seed"
_SETTINGS = "_hypothesis_internal_use_settings"


def subject_of(fault: str) -> Any:
    """The faulty engine; both of a pair where the law compares two."""
    entry = FAULTS[fault]
    one = load_subject(fault, ENGINE, {"fault": fault})
    if not entry.twin:
        return one
    return one, load_subject(f"{fault}, twin", ENGINE, {"fault": fault, **entry.twin})


def failure(fault: str, subject: Any, seed: int) -> tuple[Example, BaseException] | None:
    """The shrunk example and the exception that Hypothesis lets through for it."""
    return failure_of(FAULTS[fault].law, subject, seed)


def failure_of(name: str, subject: Any, seed: int) -> tuple[Example, BaseException] | None:
    """The same of any law."""
    law = laws()[name]
    function: Any = law.function
    failed: list[Example] = []

    def take(example: Example) -> None:
        if example.verdict == "failed":
            failed[:] = [example]

    with _watched(law.name, function, take, seed):
        try:
            function(**{law.subject: subject})
        except Exception as error:
            return failed[0], error
    return None


@contextmanager
def _watched(name: str, function: Any, take: Any, seed: int) -> Iterator[None]:
    """The law with a sink, this seed and settings of our own, and afterwards as it was."""
    before = {key: getattr(function, key) for key in (_SEED, _SETTINGS)}
    body = function.hypothesis.inner_test
    watch_examples(name, function, take)
    setattr(function, _SEED, seed)
    setattr(
        function,
        _SETTINGS,
        settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            derandomize=False,
            phases=[Phase.generate, Phase.shrink],
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
    try:
        yield
    finally:
        function.hypothesis.inner_test = body
        for key, value in before.items():
            setattr(function, key, value)
