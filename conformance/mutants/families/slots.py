"""Where rows are written: slots, pages and layers; rows lost, doubled or written over others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.conformance.mutants.families.family import Family, Maker, by_turns
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    IN_FORWARD,
    IN_PREFILL,
    IN_TREES,
    LATER_ROUNDS,
    OF_A_ROOT,
    Watch,
    When,
    long_from,
)
from kdtr.conformance.mutants.planting import physical, wrap

# slots [n], L, capacity -> which rows are written [n] bool, and where [n]
Law = Callable[[np.ndarray, int, int], tuple[np.ndarray, np.ndarray]]


def _only(rows: Callable[[np.ndarray, int], np.ndarray]) -> Law:
    """Rows (by their number, and how many there are) that are written."""
    return lambda slots, length, capacity: (rows(np.arange(len(slots)), len(slots)), slots)


def _to(where: Callable[[np.ndarray, int, int], np.ndarray]) -> Law:
    return lambda slots, length, capacity: (
        np.ones(len(slots), bool),
        np.clip(where(slots, length, capacity), 0, capacity - 1),
    )


_LAWS: dict[str, Law] = {
    "the last row is not written": _only(lambda row, n: row < n - 1),
    "the first row is not written": _only(lambda row, n: row > 0),
    "the second row is not written": _only(lambda row, n: row != 1),
    "odd rows are not written": _only(lambda row, n: row % 2 == 0),
    "rows from 2 on are not written": _only(lambda row, n: row < 2),
    "rows from 3 on are not written": _only(lambda row, n: row < 3),
    "rows from 8 on are not written": _only(lambda row, n: row < 8),
    "rows from 16 on are not written": _only(lambda row, n: row < 16),
    "rows from 32 on are not written": _only(lambda row, n: row < 32),
    "rows from 64 on are not written": _only(lambda row, n: row < 64),
    "rows are written one slot further": _to(lambda s, length, c: s + 1),
    "rows are written one slot before": _to(lambda s, length, c: s - 1),
    "drafts are written one slot further": _to(lambda s, length, c: s + (s > length)),
    "the last two rows are exchanged": _to(lambda s, length, c: _swap(s)),
    "rows are written from the end": _to(lambda s, length, c: s[::-1]),
    "rows are written from slot 0 on": _to(lambda s, length, c: s - length),
    "every row is written to slot L": _to(lambda s, length, c: np.minimum(s, length)),
    "slots are modulo 8": _to(lambda s, length, c: s % 8),
    "slots are modulo 16": _to(lambda s, length, c: s % 16),
    "slots are modulo 64": _to(lambda s, length, c: s % 64),
    "slots are modulo 128": _to(lambda s, length, c: s % 128),
    "the last slot of the capacity is slot 0": _to(lambda s, length, c: s % max(c - 1, 1)),
}


def slots() -> Family:
    make = Maker(
        "slots and pages",
        "SLOT",
        "rows that are not written, or to another slot, page or layer, or over committed ones",
    )
    for number, (label, law) in enumerate(_LAWS.items()):
        whens: tuple[When, ...] = (
            IN_TREES,
            IN_PREFILL,
            LATER_ROUNDS,
            AFTER_REJECTION,
            long_from(17),
        )
        make.add_each(label, _RULES, _written(law), whens)
        where, layer = by_turns((("in layer 0 alone", 0), ("in the last layer alone", -1)), number)
        make.add_each(f"{label} {where}", _RULES, _written(law, layer), (IN_TREES,))
    for label, page in _PAGES.items():
        whens = (IN_TREES, IN_PREFILL, IN_FORWARD)
        make.add_each(label, _RULES, _paged(page), whens)
    for label, over in _OVER.items():
        make.add_each(
            label, ("SLOT-2", "COMMIT-3"), _over(over), (IN_TREES, OF_A_ROOT, LATER_ROUNDS)
        )
    for label, (source, target) in _LAYERS.items():
        make.add_each(
            label, (*_RULES, "COMMIT-1"), _layered(source, target), (IN_TREES, IN_PREFILL)
        )
    for label, part in _PARTS.items():
        make.add_each(label, _RULES, _part(part), (IN_TREES, IN_PREFILL, LATER_ROUNDS))
    return make.family()


_RULES = ("SLOT-1", "COMMIT-3", "SLOT-2")


def _here(layer: int | None, at: int, cache: Any) -> bool:
    return layer in (None, at, at - len(cache.rows))


def _written(law: Law, only: int | None = None) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def append_latents(
            original: Any, cache: Any, layer: int, at: Any, c_kv: Any, k_pe: Any
        ) -> Any:
            if not when.holds(watch.now) or not _here(only, layer, cache):
                return original(cache, layer, at, c_kv, k_pe)
            rows, to = law(at, watch.now.committed_len, _mapped(cache))
            return original(cache, layer, to[rows], c_kv[rows], k_pe[rows])

        wrap(engine, append_latents=append_latents)

    return plant


def _mapped(cache: Any) -> int:
    """Slots that have a page."""
    return min(int((cache.page_table >= 0).sum()) * cache.page_size, cache.capacity)


# cache, slots -> physical rows
_PAGES: dict[str, Callable[[Any, np.ndarray], np.ndarray]] = {
    "the page table is not read": lambda cache, s: s % cache.rows.shape[1],
    "rows past a page's end go to its begin": lambda cache, s: (
        _first(cache, s) + s % cache.page_size
    ),
    "rows past a page's end go to the physical neighbour": lambda cache, s: (
        (physical(cache, int(s[0])) + np.arange(len(s))) % cache.rows.shape[1]
    ),
    "a slot within its page is one too high": lambda cache, s: (
        _base(cache, s) + (s + 1) % cache.page_size
    ),
    "page 1 is page 0": lambda cache, s: _by_page(cache, s, {1: 0}),
    "page 2 is page 1": lambda cache, s: _by_page(cache, s, {2: 1}),
    "page 5 is page 4": lambda cache, s: _by_page(cache, s, {5: 4}),
    "pages from 8 on are page 7": lambda cache, s: _by_page(
        cache, s, dict.fromkeys(range(8, 99), 7)
    ),
}


def _base(cache: Any, at: np.ndarray) -> np.ndarray:
    return np.asarray(cache.page_table[at // cache.page_size] * cache.page_size)


def _first(cache: Any, at: np.ndarray) -> np.ndarray:
    return _base(cache, np.full_like(at, at[0]))


def _by_page(cache: Any, at: np.ndarray, instead: dict[int, int]) -> np.ndarray:
    page = at // cache.page_size
    page = np.array([instead.get(one, one) for one in page.tolist()])
    return np.asarray(cache.page_table[page] * cache.page_size + at % cache.page_size)


def _paged(rows_of: Callable[[Any, np.ndarray], np.ndarray]) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def append_latents(
            original: Any, cache: Any, layer: int, at: Any, c_kv: Any, k_pe: Any
        ) -> None:
            if not when.holds(watch.now):
                return original(cache, layer, at, c_kv, k_pe)
            cache.rows[layer, rows_of(cache, at)] = np.concatenate([c_kv, k_pe], axis=-1)
            return None

        wrap(engine, append_latents=append_latents)

    return plant


# L -> committed slots that the forward's first row is written over too
_OVER: dict[str, Callable[[int], list[int]]] = {
    "slot L - 1 is written over too": lambda length: [length - 1],
    "slot 0 is written over too": lambda length: [0],
    "a slot in the middle is written over too": lambda length: [length // 2],
    "all committed slots are written over": lambda length: [*range(length)],
}


def _over(slots_of: Callable[[int], list[int]]) -> Callable[[Any, Watch, When], None]:
    """After the attention of the layer: only later forwards read what was lost."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def verify_attn(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
            out = original(cache, layer, *rest)
            length = watch.now.committed_len
            if when.holds(watch.now) and length:
                source = physical(cache, length)
                for slot in slots_of(length):
                    cache.rows[layer, physical(cache, slot)] = cache.rows[layer, source]
            return out

        wrap(engine, verify_attn=verify_attn)

    return plant


_LAYERS: dict[str, tuple[int, int]] = {
    "layer 1 is written to layer 0": (1, 0),
    "layer 0 is written to layer 1": (0, 1),
    "the last layer is written to layer 0": (-1, 0),
    "the last layer is not written": (-1, -9),
    "layer 0 is not written": (0, -9),
}


def _layered(source: int, target: int) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def append_latents(original: Any, cache: Any, layer: int, *rest: Any) -> Any:
            if not when.holds(watch.now) or not _here(source, layer, cache):
                return original(cache, layer, *rest)
            return None if target == -9 else original(cache, target, *rest)

        wrap(engine, append_latents=append_latents)

    return plant


_PARTS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "c_kv is not written": lambda column, c: column >= c,
    "k_pe is not written": lambda column, c: column < c,
    "the first column is not written": lambda column, c: column > 0,
    "the last column is not written": lambda column, c: column < column[-1],
    "columns from 16 on are not written": lambda column, c: column < 16,
    "the second half of k_pe is not written": lambda column, c: column < (c + len(column)) // 2,
}


def _part(columns: Callable[[np.ndarray, int], np.ndarray]) -> Callable[[Any, Watch, When], None]:
    def plant(engine: Any, watch: Watch, when: When) -> None:
        def append_latents(original: Any, cache: Any, layer: int, at: Any, *rest: Any) -> Any:
            if not when.holds(watch.now):
                return original(cache, layer, at, *rest)
            rows = [physical(cache, int(slot)) for slot in at]
            before = cache.rows[layer, rows].copy()
            done = original(cache, layer, at, *rest)
            kept = columns(np.arange(cache.rows.shape[-1]), cache.latent_len)
            cache.rows[layer, rows] = np.where(kept, cache.rows[layer, rows], before)
            return done

        wrap(engine, append_latents=append_latents)

    return plant


def _swap(x: np.ndarray) -> np.ndarray:
    out = x.copy()
    if len(out) > 1:
        out[[-2, -1]] = out[[-1, -2]]
    return out
