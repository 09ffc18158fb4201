"""One work unit: a law on an engine, from a seed, every example of it noted.

Hypothesis runs as the profile `campaign` says. Its draws follow from the seed alone, once it is
kept from taking constants out of the modules that happen to be loaded.
"""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.errors import Unsatisfiable
from hypothesis.internal.conjecture import providers

from kdtr.contract import EngineInfo, UnsupportedError
from kdtr.property_tests import campaign_plan, watch
from kdtr.property_tests.campaign_plan import COMPLETE, EXHAUSTED, SKIPPED, Unit, versions
from kdtr.property_tests.failure import explain_failure
from kdtr.property_tests.laws import Law, watch_examples
from kdtr.property_tests.subject import Subject
from kdtr.property_tests.watch import Example

# Examples that are cases: rows of a shard. Only those that held are proof.
CASES = (watch.HELD, watch.EXCUSED, watch.FAILED)
# Stands in a failure's text for the directory of its files, which the campaign knows.
FILES = "@failures/"


@dataclass(frozen=True, slots=True)
class Case:
    """An example in short, as it becomes a row (`campaign_shard.py`).

    trees, rows  by shape class
    worst        the largest error as a fraction of its bound, and the stage it was seen at
    """

    verdict: str
    excuse: str
    trees: dict[str, int]
    rows: dict[str, int]
    deepest: int
    widest: int
    scattered: int
    worst: float | None
    worst_stage: str


@dataclass(frozen=True, slots=True)
class Failure:
    """What a unit that went wrong leaves: a text for people, and the files that it speaks of."""

    text: str
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What running a unit gave.

    why        what ended it early, in words; "" for a complete unit
    discarded  examples that the law did not speak of
    info       of the engine that it ran on; None where its process died
    versions   of the laws and what they need, where it ran
    """

    unit: Unit
    verdict: str
    why: str = ""
    cases: tuple[Case, ...] = ()
    discarded: int = 0
    failure: Failure | None = None
    info: EngineInfo | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Cases that show something: an excused one shows nothing."""
        return sum(case.verdict == watch.HELD for case in self.cases)


def freeze_draws() -> None:
    """Keep Hypothesis' draws from depending on which modules a process has loaded.

    It draws one value in twenty from the constants in the source of all local modules. An engine
    that imports late, or a unit that ran before, would change what a unit draws.
    """
    if not hasattr(providers, "_get_local_constants"):
        raise UnsupportedError(
            f"Hypothesis {hypothesis.__version__} has no providers._get_local_constants, so units "
            "would not repeat; campaigns are tried with hypothesis 6.170.17"
        )
    nothing: Any = providers.Constants()  # type: ignore[attr-defined]
    providers._get_local_constants = lambda: nothing


@dataclass(slots=True)
class _Notes:
    """The examples of a unit. What follows the first failed one is shrinking, and no case."""

    cases: list[Case] = field(default_factory=list)
    discarded: int = 0
    failed: Example | None = None

    def take(self, example: Example) -> None:
        if self.failed is None and example.verdict in CASES:
            self.cases.append(case_of(example))
        elif self.failed is None and example.verdict == watch.DISCARDED:
            self.discarded += 1
        if example.verdict == watch.FAILED:
            self.failed = example


def case_of(example: Example) -> Case:
    worst_stage = max(example.headroom, key=lambda s: example.headroom[s], default="")
    return Case(
        verdict=example.verdict,
        excuse=example.excuse,
        trees=dict(example.trees),
        rows=dict(example.rows),
        deepest=example.deepest,
        widest=example.widest,
        scattered=example.scattered,
        worst=float(example.headroom[worst_stage]) if worst_stage else None,
        worst_stage=worst_stage,
    )


def run_unit(
    unit: Unit, law: Law, subject: Subject | tuple[Subject, Subject], again: str
) -> Outcome:
    """Draw the unit's examples; `again` is the command that runs the unit, for its failure."""
    notes = _Notes()
    info = (subject[0] if isinstance(subject, tuple) else subject).engine.info

    def ended(verdict: str, why: str, failure: Failure | None = None) -> Outcome:
        cases = tuple(notes.cases)
        return Outcome(unit, verdict, why, cases, notes.discarded, failure, info, versions())

    try:
        _runner(law, notes)(unit, subject)
    except pytest.skip.Exception as skipped:
        return ended(SKIPPED, printable(str(skipped)))
    except Unsatisfiable:
        pass
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an engine may raise anything
        failure = _failure(law, notes.failed, error, subject, again)
        return ended(campaign_plan.FAILED, failure.text.partition("\n")[0], failure)
    outcome = ended(COMPLETE, "")
    if outcome.held == unit.examples:
        return outcome
    excused = len(outcome.cases) - outcome.held
    return ended(
        EXHAUSTED,
        f"{outcome.held} of {unit.examples} examples held, {excused} were excused, "
        f"{notes.discarded} discarded; no more",
    )


def _runner(law: Law, notes: _Notes) -> Callable[[Unit, Any], None]:
    """What draws the examples: Hypothesis by its decorator, or a state machine by itself."""
    function: Any = law.function
    watch_examples(law.name, function, notes.take)

    def given(unit: Unit, subject: Any) -> None:
        hypothesis.seed(unit.draws)(function)(**{law.subject: subject})

    def machine(unit: Unit, subject: Any) -> None:
        function.run_seeded(subject, seed=unit.draws, examples=unit.examples)

    return machine if hasattr(function, "run_seeded") else given


def printable(text: str) -> str:
    """The text as UTF-8 can hold it: an engine's may have half a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()


def _failure(
    law: Law, example: Example | None, error: BaseException, subject: Any, again: str
) -> Failure:
    told = printable("".join(traceback.format_exception_only(error)).rstrip())
    with tempfile.TemporaryDirectory(prefix="kdtr-") as scratch:
        lines = [told]
        if example is not None:
            lines.append(explain_failure(law.name, example, error, subject, directory=scratch))
        text = printable("\n".join([*lines, f"unit   {again}"])).replace(f"{scratch}/", FILES)
        files = {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}
    return Failure(text, files)
