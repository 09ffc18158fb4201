"""A family: neighbours of one class of faults, each a variant that is planted alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kdtr.conformance.mutants.families.occasion import Occasion, Watch, When
from kdtr.conformance.mutants.mutant import Plant
from kdtr.conformance.mutants.planting import wrap

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Variant:
    """One fault of a family.

    label  what is wrong, and when: "drafts + 1, from the second round on"
    rules  a judge names the variant with any of them
    when   the occasions on which the fault is at work
    plant  makes a loaded engine faulty
    """

    family: str
    label: str
    rules: tuple[str, ...]
    when: When
    plant: Plant

    @property
    def name(self) -> str:
        return f"{self.family}: {self.label}"


@dataclass(frozen=True, slots=True)
class Family:
    """Variants of one class.

    title  in words
    kind   the class in the list of faults, "POS"
    what   what is varied, in a sentence
    """

    title: str
    kind: str
    what: str
    variants: tuple[Variant, ...]


class Maker:
    """Collects the variants of a family; a name may be there once."""

    def __init__(self, title: str, kind: str, what: str) -> None:
        self._title, self._kind, self._what = title, kind, what
        self._variants: dict[str, Variant] = {}
        self._turns = 0

    def add(
        self, label: str, rules: Iterable[str], plant: Callable[[Any, Watch], None], when: When
    ) -> None:
        """`plant` is given the engine and who watches it; it asks `when` itself."""

        def planted(engine: Any) -> None:
            plant(engine, Watch(engine))

        full = f"{label}, {when}"
        assert full not in self._variants, f"{self._title}: {full} is declared twice"
        self._variants[full] = Variant(self._title, full, tuple(rules), when, planted)

    def add_each(
        self,
        label: str,
        rules: Iterable[str],
        plant: Callable[[Any, Watch, When], None],
        whens: Iterable[When],
    ) -> None:
        """The plainest occasion, the first, and of the others one by turns; `plant` is told which.

        Each fault on every occasion would be thousands, which are killed by the same few cases.
        """
        first, *others = dict.fromkeys(whens)
        turn = self._turns
        self._turns += 1
        for when in (first, by_turns(others, turn)) if others else (first,):
            self.add(label, tuple(rules), _told(plant, when), when)

    def family(self) -> Family:
        return Family(self._title, self._kind, self._what, tuple(self._variants.values()))


def by_turns(options: Sequence[T], number: int) -> T:
    """One of several places for the fault of this number: every pair would be too many."""
    return options[number % len(options)]


def _told(plant: Callable[[Any, Watch, When], None], when: When) -> Callable[[Any, Watch], None]:
    return lambda engine, watch: plant(engine, watch, when)


Change = Callable[..., Any]  # change(what the operation returned, the occasion, its arguments)


def result_of(operation: str, change: Change) -> Callable[[Any, Watch, When], None]:
    """A plant: on the occasion the operation returns change(result, now, *args)."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def faulty(original: Any, *args: Any) -> Any:
            result = original(*args)
            return change(result, watch.now, *args) if when.holds(watch.now) else result

        wrap(engine, **{operation: faulty})

    return plant


def call_of(operation: str, change: Change) -> Callable[[Any, Watch, When], None]:
    """A plant: on the occasion the call becomes change(original, now, *args)."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def faulty(original: Any, *args: Any) -> Any:
            if when.holds(watch.now):
                return change(original, watch.now, *args)
            return original(*args)

        wrap(engine, **{operation: faulty})

    return plant


def depths_of(parents: Iterable[int]) -> list[int]:
    """Edges from the root, node by node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def leaves_of(parents: Iterable[int]) -> list[bool]:
    """Which nodes have no child."""
    inner = set(parents)
    return [i not in inner for i, _ in enumerate(parents)]


__all__ = [
    "Change",
    "Family",
    "Maker",
    "Occasion",
    "Variant",
    "by_turns",
    "call_of",
    "depths_of",
    "leaves_of",
    "result_of",
]
