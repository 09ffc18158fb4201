"""What a mutant is: the smallest change to a correct engine that makes one fault of a real one.

A mutant wraps an operation or a verb of an engine that was loaded by name; it imports none. The
numbers and classes are those of a list of 97 faults that real engines had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Plant = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault, and what a good judge says of it.

    number  in the list, "M001"
    kind    its class in the list, "POS-1": no rule, though some look like one
    rules   that it breaks, the most specific first; a judge names it with one of them
    stage   at which it must be seen first when all stages are shown; or a check of the script
    needs   what shows it, in the words of the list
    plant   makes a loaded engine faulty; its docstring says how
    """

    number: str
    kind: str
    rules: tuple[str, ...]
    stage: str
    needs: str
    plant: Plant

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def what(self) -> str:
        """The fault in a line."""
        return " ".join((self.plant.__doc__ or "").split())


@dataclass(frozen=True, slots=True)
class Waiting:
    """A fault of a part that the host engine does not have.

    part        what is waited for; or where the fault is planted instead
    in_cuda_as  its name among the faults of the CUDA engine, tests/engine/gpu/cuda_faults.py, where
                it is planted and seen; "": nowhere yet
    """

    number: str
    kind: str
    part: str
    what: str
    in_cuda_as: str = ""


class MutantClass:
    """The mutants of one class, in the order of the list, and what waits.

    title  the class in words
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.mutants: list[Mutant] = []
        self.waiting: list[Waiting] = []

    def mutant(
        self,
        number: str,
        kind: str,
        *,
        breaks: str,
        also: tuple[str, ...] = (),
        first_seen_at: str,
        needs: str,
    ) -> Callable[[Plant], Plant]:
        """Declare the function below as a mutant."""

        def declare(plant: Plant) -> Plant:
            rules = (breaks, *also)
            self.mutants.append(Mutant(number, kind, rules, first_seen_at, needs, plant))
            return plant

        return declare

    def waits(self, number: str, kind: str, part: str, what: str) -> None:
        """Declare a fault of a part that is not there."""
        self.waiting.append(Waiting(number, kind, part, what))

    def in_cuda(self, number: str, kind: str, fault: str, what: str) -> None:
        """Declare a fault that only the CUDA engine can have, and that is planted there."""
        part = f"nothing: planted in the CUDA engine, as {fault}"
        self.waiting.append(Waiting(number, kind, part, what, fault))
