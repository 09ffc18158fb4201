"""Positions of a tree's nodes and of a prompt's tokens, shifted row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.families.family import (
    Family,
    Maker,
    Occasion,
    leaves_of,
    result_of,
)
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    IN_LATER_CHUNKS,
    IN_LONE_CHUNKS,
    IN_PREFILL,
    IN_TREES,
    LATER_ROUNDS,
    OF_A_ROOT,
    TREES,
    When,
    large_from,
    long_from,
)

Shift = Callable[[np.ndarray, np.ndarray, int], Any]  # depths, parents, L -> to be added

_ROWS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "every node": lambda depths, parents: depths >= 0,
    "the root": lambda depths, parents: depths == 0,
    "every draft": lambda depths, parents: depths > 0,
    "the last node": lambda depths, parents: np.arange(len(depths)) == len(depths) - 1,
    "the first draft": lambda depths, parents: np.arange(len(depths)) == 1,
    "the deepest nodes": lambda depths, parents: (depths > 0) & (depths == depths.max()),
    "leaves": lambda depths, parents: np.array(leaves_of(parents.tolist())),
    "odd nodes": lambda depths, parents: np.arange(len(depths)) % 2 == 1,
    "nodes from 4 on": lambda depths, parents: np.arange(len(depths)) >= 4,
    "nodes from depth 2 on": lambda depths, parents: depths >= 2,
    "nodes from depth 3 on": lambda depths, parents: depths >= 3,
}
_BY: dict[str, Callable[[int, int], int]] = {
    "+ 1": lambda n, length: 1,
    "- 1": lambda n, length: -1,
    "+ M": lambda n, length: n,
    "- M": lambda n, length: -n,
    "- L": lambda n, length: -length,
}
_LAWS: dict[str, Shift] = {
    "by index": lambda depths, parents, length: np.arange(len(depths)) - depths,
    "by index from the end": lambda depths, parents, length: np.arange(len(depths))[::-1] - depths,
    "without the depth": lambda depths, parents, length: -depths,
    "of drafts L + 1, however deep": lambda depths, parents, length: np.minimum(depths, 1) - depths,
    "no deeper than L + 2": lambda depths, parents, length: np.minimum(depths, 2) - depths,
    "twice the depth": lambda depths, parents, length: depths,
    "half the depth": lambda depths, parents, length: depths // 2 - depths,
    "of the parent": lambda depths, parents, length: -(depths > 0).astype(int),
    "plus the rank among siblings": lambda depths, parents, length: _ranks(parents),
    "of the node before": lambda depths, parents, length: np.roll(depths, 1) - depths,
    "of the last two swapped": lambda depths, parents, length: _swapped(depths) - depths,
    "by depth from the leaf up": lambda depths, parents, length: depths.max() - 2 * depths,
}


def positions() -> Family:
    """Every shift of every choice of rows, and other laws than L + depth."""
    make = Maker(
        "positions",
        "POS",
        "positions of some nodes shifted by 1, M or L, or by another law than L + depth",
    )
    for rows, choose in _ROWS.items():
        for by, amount in _BY.items():
            whens: tuple[When, ...] = TREES if by == "+ 1" else (IN_TREES,)
            make.add_each(
                f"{rows} {by}", ("POS-1",), result_of("tree_layout", _moved(choose, amount)), whens
            )
    for law, shift in _LAWS.items():
        whens = (IN_TREES, LATER_ROUNDS, AFTER_REJECTION, large_from(8), long_from(17))
        make.add_each(law, ("POS-1",), result_of("tree_layout", _by_law(shift)), whens)
    for label, change in _PREFILL.items():
        whens = (IN_PREFILL, IN_LATER_CHUNKS, IN_LONE_CHUNKS)
        make.add_each(
            f"of a prompt: {label}", ("FWD-1", "POS-1"), result_of("causal_layout", change), whens
        )
    for modulus in (8, 16, 32, 64, 128):
        make.add_each(
            f"modulo {modulus}",
            ("POS-1", "FWD-1"),
            result_of("tree_layout", _wrapped(modulus)),
            (IN_TREES, OF_A_ROOT),
        )
    return make.family()


def _moved(choose: Any, amount: Callable[[int, int], int]) -> Any:
    def change(result: Any, now: Occasion, parents: Any, length: int) -> Any:
        found, ancestors = result
        rows = choose(found - length, parents)
        return found + rows * amount(len(parents), length), ancestors

    return change


def _by_law(shift: Shift) -> Any:
    def change(result: Any, now: Occasion, parents: Any, length: int) -> Any:
        found, ancestors = result
        return found + shift(found - length, parents, length), ancestors

    return change


def _wrapped(modulus: int) -> Any:
    return lambda result, now, *rest: (result[0] % modulus, result[1])


def _prompt(shift: Callable[[int, int], Any]) -> Any:
    return lambda result, now, n, length: (result[0] + shift(n, length), result[1])


_PREFILL = {
    "+ 1": _prompt(lambda n, length: 1),
    "- 1": _prompt(lambda n, length: -1),
    "the last token + 1": _prompt(lambda n, length: np.arange(n) == n - 1),
    "the first token + 1": _prompt(lambda n, length: np.arange(n) == 0),
    "from 0 in every chunk": _prompt(lambda n, length: -length),
    "those from the middle on + 1": _prompt(lambda n, length: np.arange(n) >= n // 2),
}


def _ranks(parents: np.ndarray) -> np.ndarray:
    return np.array([parents[:i].tolist().count(p) for i, p in enumerate(parents.tolist())])


def _swapped(depths: np.ndarray) -> np.ndarray:
    order = np.arange(len(depths))
    if len(order) > 2:
        order[[-2, -1]] = order[[-1, -2]]
    return depths[order]
