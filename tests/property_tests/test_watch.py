"""Every example reaches whoever counts them, and what an engine raises is a failure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis.errors import UnsatisfiedAssumption

from kdtr.property_tests.tally import Tally
from kdtr.property_tests.watch import DISCARDED, FAILED, HELD, Example, Played, watching


class CannotClose:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def close(self) -> None:
        raise self.error


def watched(error: BaseException | None, closing: BaseException | None = None) -> tuple[str, Any]:
    """How an example ends that raises this, and then this: its verdict, and what comes out."""
    ended: list[Example] = []
    out = None
    try:
        with watching("a_law", ended.append) as example:
            if closing is not None:
                session: Any = CannotClose(closing)
                example.opened(session, Played(None, 1))  # type: ignore[arg-type]
            if error is not None:
                raise error
    except BaseException as raised:
        out = raised
    (one,) = ended
    return one.verdict, out


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (None, HELD),
        (AssertionError("broken"), FAILED),
        (SystemExit(0), FAILED),
        (UnsatisfiedAssumption(), DISCARDED),
        (KeyboardInterrupt(), DISCARDED),
    ],
)
def test_an_engine_that_ends_the_process_has_failed(
    error: BaseException | None, verdict: str
) -> None:
    assert (verdict, error) == watched(error)


@pytest.mark.parametrize("closing", [RuntimeError("freed twice"), SystemExit(1)])
def test_a_session_that_cannot_close_fails_the_example_that_held(closing: BaseException) -> None:
    assert (FAILED, closing) == watched(None, closing)


def test_of_a_failed_example_the_failure_is_the_news() -> None:
    error = AssertionError("broken")

    assert (FAILED, error) == watched(error, RuntimeError("freed twice"))


def test_an_interrupted_close_loses_no_example() -> None:
    stop = KeyboardInterrupt()

    assert (HELD, stop) == watched(None, stop)


def test_a_tally_counts_the_laws_of_all_examples() -> None:
    tally = Tally()
    for law, verdict in (("a", FAILED), ("a", HELD), ("b", FAILED), ("c", DISCARDED)):
        tally.count(Example(law, verdict=verdict))
    both = Tally.from_dict(tally.as_dict())
    both.add(tally)

    expected = "8 examples of 3 laws: 2 held, 2 discarded, 4 failed"
    assert expected == both.lines()[0]
