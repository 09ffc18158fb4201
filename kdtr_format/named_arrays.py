"""A read-only mapping from names to arrays, each read when asked for.

An unknown name is answered with the closest known ones.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

import numpy as np

from kdtr.contract.errors import KdtrError


class UnknownNameError(KdtrError, KeyError):
    """A name that the mapping does not have.

    A KeyError as well: wrappers around a mapping, Mapping.get and `in` among them, rely on it.
    """

    __str__ = Exception.__str__  # KeyError's own would put the text in quotes


class NamedArrays(Mapping[str, np.ndarray]):
    """A Mapping whose refusal of an unknown name is of class `unknown`."""

    __slots__ = ("_names",)
    unknown: ClassVar[type[UnknownNameError]]

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)  # an ordered set

    @abstractmethod
    def _load(self, name: str) -> np.ndarray:
        """The array of a name known to exist."""

    def names(self) -> tuple[str, ...]:
        """All names, in the mapping's order."""
        return tuple(self._names)

    def __getitem__(self, name: str) -> np.ndarray:
        self._require(name)
        return self._load(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The array, or `default`; Mapping's own would first look for the closest names."""
        if name not in self:
            return default
        return self[name]

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the array
        return isinstance(name, str) and name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    # Mapping compares by items, and two arrays have no truth value: compare by identity
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _require(self, name: str) -> None:
        if name not in self:
            close = get_close_matches(str(name), self._names, n=3, cutoff=0.5)
            which, shown = ("closest", close) if close else ("first", self.names()[:3])
            hint = f"; the {which} are {', '.join(map(repr, shown))}" if shown else ""
            raise self.unknown(f"no tensor {name!r} among {len(self)}{hint}")
