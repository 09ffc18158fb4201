"""The cases of some bundles, one by one: in the gate's order, or the smallest first.

The gate's order tells a fault best, as it begins with plain decoding. Where many engines are to be
killed soon, small cases come first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.bundle_paths import by_name
from kdtr.conformance.file_script import FILES, first_small
from kdtr.conformance.judge_bundle import questions
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor
from kdtr.conformance.smoke import is_chain, smoke_first
from kdtr.conformance.state_script import CASE, suits
from kdtr.contract import NumericProfile


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A case of a bundle, or one of its scripts: "base/trees", "base/state", "base/files"."""

    bundle: str
    case: str

    def __str__(self) -> str:
        return f"{self.bundle}/{self.case}"

    @property
    def is_script(self) -> bool:
        return self.case in (CASE, FILES)


class Docket:
    """Bundles, opened once, by the stems of their names.

    What rounding may do to a case is the same for every engine of a numeric profile, and is found
    out once. Raises CaseError where two files have one name.
    """

    def __init__(self, bundles: Sequence[str | os.PathLike[str]]) -> None:
        paths = by_name(bundles).values()
        self.bundles = {path.stem: GoldenBundle.open(path) for path in paths}
        self._floors: dict[tuple[str, NumericProfile], NoiseFloor] = {}
        self._noise: dict[tuple[Entry, NumericProfile], CaseNoise] = {}
        self._cases = {
            Entry(name, case.inputs.alias): case
            for name, bundle in self.bundles.items()
            for case in bundle.cases
        }
        in_files = first_small(list(self.bundles.values()))
        self.in_gate_order = tuple(
            dict.fromkeys(
                Entry(name, question.case)
                for name, bundle in self.bundles.items()
                for question in questions(bundle.cases, in_files=bundle is in_files)
            )
        )

    def __enter__(self) -> Docket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for bundle in self.bundles.values():
            bundle.close()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every case and script, the smallest first."""
        return tuple(sorted(self.in_gate_order, key=lambda one: (self._cost(one), one)))

    def is_smoke(self, entry: Entry) -> bool:
        """Whether no tree of the case has a branch."""
        return entry in self._cases and is_chain(self._cases[entry].inputs)

    def case(self, entry: Entry) -> GoldenCase:
        """The case; of a script the one that it runs over."""
        cases = self.bundles[entry.bundle].cases
        if entry.case == CASE:
            return next(one for one in cases if suits(one.inputs))
        return smoke_first(cases)[0] if entry.case == FILES else self._cases[entry]

    def noise(self, entry: Entry, profile: NumericProfile) -> CaseNoise:
        """What rounding may do to a case of an engine with this profile."""
        of_bundle, of_case = (entry.bundle, profile), (entry, profile)
        if of_case not in self._noise:
            if of_bundle not in self._floors:
                bundle = self.bundles[entry.bundle]
                self._floors[of_bundle] = NoiseFloor.of_bundle(bundle, profile)
            self._noise[of_case] = self._floors[of_bundle].case(self._cases[entry])
        return self._noise[of_case]

    def _cost(self, entry: Entry) -> int:
        """Rows times weights."""
        size = sum(array.size for array in self.bundles[entry.bundle].weights.values())
        inputs = self.case(entry).inputs
        rows = sum(map(len, inputs.chunks)) + sum(len(one.tree) for one in inputs.rounds)
        return size * (10 * sum(map(len, inputs.chunks)) if entry.is_script else rows)
