"""What travels between the verbs of a round: draft tree, acceptance, verification, round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

from kdtr.contract.errors import InputError, KdtrError, TreeError

if TYPE_CHECKING:
    import numpy as np


_TEXT_OR_MAP = (str, bytes, bytearray, memoryview, Mapping)
_UNORDERED = (*_TEXT_OR_MAP, Set)
_SHOWN = 200  # characters of a refused value: a million numbers are no message


_MOST_BITS = 1024  # no id or length has more


def check_bits(what: str, value: int, error: type[KdtrError] = InputError) -> int:
    """The value, unless it is too long to be told: Python prints 4300 digits at most.

    >>> check_bits("root", 10**5000)
    Traceback (most recent call last):
    kdtr.contract.errors.InputError: root = an integer of 16610 bits; expected at most 1024 bits
    """
    if value.bit_length() > _MOST_BITS:
        raise error(
            f"{what} = an integer of {value.bit_length()} bits; expected at most {_MOST_BITS} bits"
        )
    return value


def _integers(
    what: str,
    values: Iterable[int],
    error: type[TreeError | InputError] = TreeError,
    *,
    refused: tuple[type, ...] = _UNORDERED,
) -> tuple[int, ...]:
    """The values as ints; a bool is no integer, and what `refused` names is no sequence."""
    try:
        items = None if isinstance(values, refused) else list(values)
    except TypeError:
        items = None
    if items is None:
        raise error(f"{what} = {_shown(values)}; expected a sequence of integers")
    try:
        if not any(isinstance(value, bool) for value in items):
            return tuple(check_bits(what, index(value), error) for value in items)
    except TypeError:
        pass
    raise error(f"{what} = {_shown(values)}; expected integers")


def _shown(values: object) -> str:
    text = repr(values)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _parent_range(i: int) -> str:
    return "parents[1] = 0" if i == 1 else f"0 <= parents[{i}] <= {i - 1}"


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Tokens under verification: parents precede children, siblings differ (TREE-1, TREE-2).

    tokens   one id per node; tokens[0] is the root, decided but not cached
    parents  parents[i] < i; -1 for the root and only there

    Depth, path, position and visibility are not here: every engine computes its own.

    >>> DraftTree(tokens=(7, 3, 5), parents=(-1, 2, 0))
    Traceback (most recent call last):
    kdtr.contract.errors.TreeError: parents[1] = 2, but a parent precedes its child; \
expected parents[1] = 0
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        tokens = _integers("tokens", self.tokens)
        parents = _integers("parents", self.parents)
        if not tokens:
            raise TreeError("the tree has no node; expected at least the root, node 0")
        if len(tokens) != len(parents):
            raise TreeError(
                f"the tree has {len(tokens)} tokens and {len(parents)} parents; "
                "expected one parent per token"
            )
        if parents[0] != -1:
            raise TreeError(f"parents[0] = {parents[0]}, but node 0 is the root; expected -1")
        for i, parent in enumerate(parents[1:], start=1):
            if parent == -1:
                raise TreeError(
                    f"parents[{i}] = -1, but a tree has one root, node 0; "
                    f"expected {_parent_range(i)}"
                )
            if not 0 <= parent < i:
                raise TreeError(
                    f"parents[{i}] = {parent}, but a parent precedes its child; "
                    f"expected {_parent_range(i)}"
                )
        for i, token in enumerate(tokens):
            if token < 0:
                raise TreeError(f"tokens[{i}] = {token}; expected a token id >= 0")
        first_with: dict[tuple[int, int], int] = {}
        for i, child in enumerate(zip(parents, tokens, strict=True)):
            first = first_with.setdefault(child, i)
            if first != i:
                raise TreeError(
                    f"nodes {first} and {i} are both children of node {child[0]} with token "
                    f"{child[1]}; expected siblings with different tokens"
                )
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)

    def __len__(self) -> int:
        """Number of nodes, the root included: budget + 1 at most."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of a walk: the accepted path and the bonus (ACC-1, ACC-2).

    path   node ids, root first, strictly increasing; its length is accept_len
    bonus  the target of path[-1]: the next root, emitted but not cached

    >>> Acceptance(path=(0, 2, 2), bonus=9)
    Traceback (most recent call last):
    kdtr.contract.errors.InputError: path[2] = 2 after path[1] = 2; \
expected node ids that strictly increase
    """

    path: tuple[int, ...]
    bonus: int

    def __post_init__(self) -> None:
        path = _integers("path", self.path, InputError)
        (bonus,) = _integers("bonus", (self.bonus,), InputError)
        if not path or path[0] != 0:
            raise InputError(f"path = {path}; expected a path that starts at the root, node 0")
        for k in range(1, len(path)):
            if path[k] <= path[k - 1]:
                raise InputError(
                    f"path[{k}] = {path[k]} after path[{k - 1}] = {path[k - 1]}; "
                    "expected node ids that strictly increase"
                )
        if bonus < 0:
            raise InputError(f"bonus = {bonus}; expected a token id >= 0")
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "bonus", bonus)

    @property
    def accept_len(self) -> int:
        """Nodes kept, the root included."""
        return len(self.path)


@dataclass(frozen=True, slots=True)
class EmitLimit:
    """When a round stops emitting (ACC-4).

    stop_tokens  ids after which nothing is emitted
    max_emitted  the most tokens this round may emit; None for no limit
    """

    stop_tokens: frozenset[int] = frozenset()
    max_emitted: int | None = None

    def __post_init__(self) -> None:
        tokens = frozenset(
            _integers("stop_tokens", self.stop_tokens, InputError, refused=_TEXT_OR_MAP)
        )
        if any(token < 0 for token in tokens):
            raise InputError(f"stop_tokens = {sorted(tokens)}; expected token ids >= 0")
        if self.max_emitted is not None:
            (most,) = _integers("max_emitted", (self.max_emitted,), InputError)
            if most < 1:
                raise InputError(f"max_emitted = {most}; expected at least 1, or None")
            object.__setattr__(self, "max_emitted", most)
        object.__setattr__(self, "stop_tokens", tokens)


NO_LIMIT = EmitLimit()


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What a verify shows.

    logits   [n, w] or None when the engine does not show them
    targets  [n]    the engine's own argmax (lowest id on an exact tie), or its draw (ACC-5)
    """

    logits: np.ndarray | None
    targets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One fused round: the tree it verified, the walk, and the tokens it emitted (ACC-3)."""

    tree: DraftTree
    acceptance: Acceptance
    emitted: tuple[int, ...]
