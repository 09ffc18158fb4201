"""What a campaign asks of those who do its units, whatever they run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kdtr.contract import EngineInfo
from kdtr.property_tests.campaign_plan import CRASHED, TIMEOUT, Setup, Unit
from kdtr.property_tests.campaign_unit import Failure, Outcome

# A unit that took its worker with it is tried again: the machine may have been at fault.
TRIES = 2


class Crew(Protocol):
    """Workers that are replaced when they die."""

    def describe(self) -> EngineInfo:
        """What the engine says of itself; starts a worker. Raises what loading it raises."""
        ...

    def outcomes(self, units: Iterable[Unit]) -> Iterator[Outcome]:
        """Every unit's outcome once, in any order; a unit that kills its worker has one too."""
        ...

    def close(self) -> None:
        """End the workers, also in the middle of a unit."""
        ...


# Starts a crew for workers of this setup.
Hire = Callable[[Setup], Crew]


@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that died while it ran a unit.

    how  in words, such as "signal 11 (SIGSEGV)"
    """

    how: str
    timed_out: bool = False

    def outcome(self, unit: Unit, setup: Setup, limit_s: float | None) -> Outcome:
        if self.timed_out:
            verdict = TIMEOUT
            why = f"no end after {limit_s:g} s, {TRIES} times; the limit is --unit-timeout"
        else:
            verdict, why = CRASHED, f"its process ended by {self.how}, {TRIES} times"
        failure = Failure(f"{why}\nunit   {setup.again(unit)}")
        return Outcome(unit, verdict, why, failure=failure)
