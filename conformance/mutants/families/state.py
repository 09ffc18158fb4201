"""What is left over from another call, and what is not the same twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.families.family import Family, Maker, by_turns
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    ALWAYS,
    IN_PREFILL,
    IN_ROUND,
    IN_TREES,
    LATER_ROUNDS,
    Watch,
    When,
    large_from,
    long_from,
)
from kdtr.conformance.mutants.planting import wrap

# Operation, which part of its result (None: all of it), rules that a stale one breaks.
_KEPT: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "positions": ("tree_layout", 0, ("POS-1",)),
    "the mask": ("tree_layout", 1, ("MASK-2",)),
    "cosines": ("rotary_angles", 0, ("MLA-7", "MLA-5", "POS-1", "MLA-6")),
    "sines": ("rotary_angles", 1, ("MLA-7", "MLA-5", "POS-1", "MLA-6")),
    "embeddings": ("embed", None, ("FWD-4", "FWD-3")),
    "attention's sums": ("verify_attn", None, ("MLA-3", "MASK-3")),
    "router scores": ("router_scores", None, ("MOE-1",)),
    "chosen experts": ("choose_experts", 0, ("MOE-2",)),
    "experts' weights": ("choose_experts", 1, ("MOE-3",)),
    "experts' sums": ("experts", None, ("MOE-4", "MOE-3")),
    "targets": ("argmax", None, ("ACC-1", "FWD-1", "COMMIT-2")),
    "absorbed queries": ("absorb_query", None, ("MLA-3", "MLA-1")),
    "queries' and keys' rotation": ("rotate", None, ("MLA-7", "MLA-2")),
}


def captured() -> Family:
    make = Maker(
        "captured state",
        "GRAPH",
        "a result of the call before, or of the first of the same shape, in place of this one's",
    )
    whole, *some = _CUTS
    for number, (what, (operation, part, rules)) in enumerate(_KEPT.items()):
        for label, kept in (("of the call before", _latest), ("of the first call", _first)):
            for rows in (whole, by_turns(some, number)):
                if (part, what, rows) == (1, "the mask", ", in the first row"):
                    continue  # a root sees itself, in every tree
                whens = (IN_TREES, LATER_ROUNDS, AFTER_REJECTION) if rows == "" else (IN_TREES,)
                plant = _stale(operation, part, kept, _CUTS[rows])
                make.add_each(f"{what} {label}{rows}", (*rules, "FWD-4"), plant, whens)
    return make.family()


_CUTS: dict[str, Callable[[Any, Any], Any]] = {
    "": lambda new, old: old,
    ", in the last row": lambda new, old: np.concatenate([new[:-1], old[-1:]]),
    ", in the first row": lambda new, old: np.concatenate([old[:1], new[1:]]),
    ", in rows from 4 on": lambda new, old: np.concatenate([new[:4], old[4:]]),
}


def _latest(store: dict[Any, Any], key: Any, value: Any) -> Any:
    old = store.get(key, value)
    store[key] = value
    return old


def _first(store: dict[Any, Any], key: Any, value: Any) -> Any:
    return store.setdefault(key, value)


def _stale(
    operation: str,
    part: int | None,
    kept: Callable[[dict[Any, Any], Any, Any], Any],
    cut: Callable[[Any, Any], Any],
) -> Callable[[Any, Watch, When], None]:
    """By the place of the call in its forward and by shape, as a captured buffer would be."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        store: dict[Any, Any] = {}
        calls = [0]

        def tree_layout(original: Any, *rest: Any) -> Any:
            calls[0] = 0
            return original(*rest)

        def faulty(original: Any, *args: Any) -> Any:
            result = original(*args)
            if not watch.now.is_tree:
                return result
            value = result if part is None else result[part]
            calls[0] += 1
            old = kept(store, (calls[0], value.shape), value.copy())
            if not when.holds(watch.now):
                return result
            made = cut(value, old)
            if part is None:
                return made
            return tuple(made if i == part else one for i, one in enumerate(result))

        wrap(engine, tree_layout=tree_layout)
        wrap(engine, **{operation: faulty})

    return plant


_NOISY: dict[str, tuple[str, ...]] = {
    "embed": ("FWD-4",),
    "linear": ("MLA-1", "MLA-2", "MLA-3", "FWD-4", "NORM-1", "MOE-4"),
    "rms_norm": ("NORM-1", "MLA-1", "FWD-4", "MLA-2"),
    "verify_attn": ("MLA-3",),
    "router_scores": ("MOE-1",),
    "experts": ("MOE-4", "MOE-3"),
}


def determinism() -> Family:
    make = Maker(
        "determinism", "NUM", "numbers that differ from call to call, by much or by the last bit"
    )
    for number, (operation, rules) in enumerate(_NOISY.items()):
        for label, sigma in (("1e-2", 1e-2), ("1e-4", 1e-4), ("the last bit", 2.0**-23)):
            one = by_turns(((" every second call", 2), (" every seventh call", 7)), number)
            for how, seldom in (("", 1), one):
                make.add_each(
                    f"{operation} has noise of {label}{how}",
                    (*rules, "NUM-4", "LOSSLESS"),
                    _noisy(operation, sigma, seldom),
                    (ALWAYS, IN_ROUND) if seldom == 1 else (ALWAYS,),
                )
    for what in ("argmax", "router_scores"):
        for when in (ALWAYS, IN_PREFILL, IN_TREES, large_from(8), long_from(17)):
            make.add_each(
                f"{what} of ties goes by lot",
                ("ACC-1", "FWD-1", "MOE-2", "NUM-4", "MOE-1"),
                _by_lot(what),
                (when,),
            )
    return make.family()


def _noisy(operation: str, sigma: float, seldom: int) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        draw, calls = np.random.default_rng(7), [0]

        def faulty(original: Any, *args: Any) -> Any:
            out = original(*args)
            if not when.holds(watch.now):
                return out
            calls[0] += 1
            if calls[0] % seldom:
                return out
            return (out * (1 + sigma * draw.standard_normal(out.shape))).astype(out.dtype)

        wrap(engine, **{operation: faulty})

    return plant


def _by_lot(operation: str) -> Callable[[Any, Watch, When], None]:
    """Numbers are changed by less than any difference that is none: only exact ties show it."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        draw = np.random.default_rng(11)

        def argmax(original: Any, logits: Any) -> Any:
            if not when.holds(watch.now):
                return original(logits)
            exact = logits.astype(np.float64)
            return original(exact + 1e-12 * draw.standard_normal(exact.shape))

        def choose_experts(original: Any, scores: Any, *rest: Any) -> Any:
            if not when.holds(watch.now):
                return original(scores, *rest)
            exact = scores.astype(np.float64)
            ids, weights = original(exact + 1e-12 * draw.standard_normal(exact.shape), *rest)
            return ids, weights.astype(np.float32)

        if operation == "argmax":
            wrap(engine, argmax=argmax)
        else:
            wrap(engine, choose_experts=choose_experts)

    return plant
