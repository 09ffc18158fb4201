"""What a campaign tries: work units, each of which gives the same cases whenever it runs.

A *case* is one example of a law. A *work unit* is a law, a seed and a number of examples; with
`versions()` and the engine with its options it says everything that its cases follow from. So a
unit may run wherever these are the same, in any order, and twice.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any

from kdtr.conformance.golden_check import blas_kernel
from kdtr.contract import KdtrError
from kdtr.contract.rulebook import rules_version

# How a unit ended.
COMPLETE = "complete"  # all its examples
EXHAUSTED = "exhausted"  # Hypothesis found no more examples that the law speaks of
SKIPPED = "skipped"  # the engine lacks what the law needs
FAILED = "failed"  # an example broke the law; none was drawn after it
CRASHED = "crashed"  # its worker process died under it, twice
TIMEOUT = "timeout"  # it exceeded --unit-timeout, twice
UNIT_VERDICTS = (COMPLETE, EXHAUSTED, SKIPPED, FAILED, CRASHED, TIMEOUT)
BAD = (FAILED, CRASHED, TIMEOUT)


class CampaignError(KdtrError):
    """A campaign that cannot run as asked, or a directory that holds another one."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that one process does in one go.

    index     counts the units of its law
    examples  examples that shall hold
    """

    law: str
    index: int
    seed: int
    examples: int

    @property
    def id(self) -> str:
        return f"{self.law}-{self.index:05}"

    @property
    def draws(self) -> int:
        """The seed of Hypothesis: another one for every law, index and seed of the campaign."""
        text = f"{self.seed} {self.law} {self.index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


Options = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker process needs before its first unit.

    examples      of every unit: a process fixes it when it imports the laws
    twin_options  change the engine into one that nobody may tell apart; none: no laws of twins
    here          the directory that the campaign was started in: engines are found there too
    """

    engine: str
    options: Options
    twin_options: Options
    examples: int
    here: str

    def again(self, unit: Unit) -> str:
        """The command that runs one unit alone."""
        words = ["kdtr", "campaign", "--engine", self.engine]
        for flag, options in (
            ("--engine-option", self.options),
            ("--twin-option", self.twin_options),
        ):
            for key, value in options:
                words += [flag, f"{key}={value!r}"]
        words += ["--seed", str(unit.seed), "--unit", str(unit.examples), "--unit-id", unit.id]
        return shlex.join(words)


def unit_of(unit_id: str, seed: int, examples: int) -> Unit:
    """The unit with this id.

    >>> unit_of("verify_twice_is_verify_once-00007", 0, 200).index
    7
    """
    match = re.fullmatch(r"(\w+)-(\d{5,})", unit_id)
    if match is None:
        raise CampaignError(f"--unit-id {unit_id!r}; expected LAW-INDEX, with five digits or more")
    return Unit(match[1], int(match[2]), seed, examples)


def unit_size(n_laws: int, cases: int, most: int) -> int:
    """Examples of every unit: at most so many, and so few that every law gets one.

    >>> unit_size(25, 100_000, 200), unit_size(25, 60, 200)
    (200, 3)
    """
    return min(most, -(-cases // n_laws))


def first_units(laws: Sequence[str], cases: int, examples: int, seed: int) -> list[Unit]:
    """At least this many cases, if every unit is complete: dealt to the laws in turn.

    >>> [unit.id for unit in first_units(["a", "b"], 5, 2, 0)]
    ['a-00000', 'b-00000', 'a-00001']
    """
    n_units = max(len(laws), -(-cases // examples))
    return [Unit(laws[i % len(laws)], i // len(laws), seed, examples) for i in range(n_units)]


def more_units(
    ended: Mapping[Unit, str], laws: Sequence[str], lacking: int, examples: int, seed: int
) -> list[Unit]:
    """Further units for the cases that still lack, of the laws all of whose units are complete.

    ended  the verdict of every unit so far
    """
    if lacking <= 0:
        return []
    short = {unit.law for unit, verdict in ended.items() if verdict != COMPLETE}
    fertile = [law for law in laws if law not in short]
    if not fertile:
        return []
    following = dict.fromkeys(fertile, 0)
    for unit in ended:
        if unit.law in following:
            following[unit.law] = max(following[unit.law], unit.index + 1)
    dealt = (fertile[i % len(fertile)] for i in range(-(-lacking // examples)))
    return list(_numbered(dealt, following, examples, seed))


def _numbered(
    dealt: Iterator[str], following: dict[str, int], examples: int, seed: int
) -> Iterator[Unit]:
    for law in dealt:
        yield Unit(law, following[law], seed, examples)
        following[law] += 1


# Rooms whose text draws and judges, and the files of them that only show.
_ROOMS = ("contract", "reference", "conformance", "property_tests")
_SHOWS = ("campaign_cli.py", "campaign_progress.py")


@cache
def versions() -> dict[str, str]:
    """What the draws and the verdicts of a unit depend on besides its key and its engine.

    The truth and the noise floor are computed with NumPy, whose sums are those of a BLAS kernel:
    errors as fractions of their bounds, which Hypothesis climbs on, differ between kernels.
    """
    return {
        "kdtr": version("kdtr"),
        "rules": str(rules_version()),
        "sources": _digest(_sources()),
        "hypothesis": version("hypothesis"),
        "numpy": version("numpy"),
        "ml_dtypes": version("ml_dtypes"),
        "blas": blas_kernel() or "unknown",
    }


def _sources() -> Iterator[tuple[str, bytes]]:
    """The name and text of every file: a law that was edited is another law."""
    for room in _ROOMS:
        for file in sorted(resources.files(f"kdtr.{room}").iterdir(), key=lambda file: file.name):
            if file.name.endswith((".py", ".md")) and file.name not in _SHOWS:
                yield f"{room}/{file.name}", file.read_bytes()


def _digest(files: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, text in files:
        digest.update(f"{name} {len(text)}\0".encode() + text)
    return digest.hexdigest()[:16]
