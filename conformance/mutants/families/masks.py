"""What a row sees: columns lost, gained or shifted; of all heads and layers, or of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kdtr.conformance.mutants.families.family import Family, Maker, Occasion, depths_of
from kdtr.conformance.mutants.families.occasion import (
    AFTER_REJECTION,
    IN_FORWARD,
    IN_LATER_CHUNKS,
    IN_PREFILL,
    IN_TREES,
    LATER_ROUNDS,
    OF_A_ROOT,
    OF_BRANCHES,
    TREES,
    Watch,
    When,
    large_from,
    long_from,
)
from kdtr.conformance.mutants.planting import wrap

# mask [n, s], L, parents (of a prompt: those of a chain) -> mask
Change = Callable[[np.ndarray, int, list[int]], np.ndarray]


def _without(columns: Callable[[np.ndarray, int], np.ndarray]) -> Change:
    """Prefix columns that are not seen; columns(number, L) -> bool."""

    def change(mask: np.ndarray, length: int, parents: list[int]) -> np.ndarray:
        column = np.arange(mask.shape[1])
        return mask & ~(columns(column, length) & (column < length))

    return change


def _block(law: Callable[[np.ndarray, list[int]], np.ndarray]) -> Change:
    """The tree's own columns [n, n] by another law."""

    def change(mask: np.ndarray, length: int, parents: list[int]) -> np.ndarray:
        out = mask.copy()
        out[:, length:] = law(mask[:, length:], parents)
        return out

    return change


def _parent_matrix(block: np.ndarray, parents: list[int]) -> np.ndarray:
    out = np.zeros_like(block)
    for i, parent in enumerate(parents):
        if parent >= 0:
            out[i, parent] = True
    return out


def _siblings(block: np.ndarray, parents: list[int]) -> np.ndarray:
    of = np.array(parents)
    return np.asarray((of[:, None] == of[None, :]) & (of >= 0)[:, None])


def _same_depth(block: np.ndarray, parents: list[int]) -> np.ndarray:
    depth = np.array(depths_of(parents))
    return np.asarray(depth[:, None] == depth[None, :])


def _up_to(levels: int) -> Change:
    def law(block: np.ndarray, parents: list[int]) -> np.ndarray:
        depth = np.array(depths_of(parents))
        return block & (depth[:, None] - depth[None, :] <= levels)

    return _block(law)


def _grandparents(block: np.ndarray, parents: list[int]) -> np.ndarray:
    up = _parent_matrix(block, parents).astype(int)
    return np.asarray(up @ up > 0)


def _rows(block: np.ndarray, rows: slice, value: bool) -> np.ndarray:
    out = block.copy()
    out[rows] = value
    return out


def _diagonal(n: int, k: int) -> np.ndarray:
    return np.eye(n, k=k, dtype=bool)


PREFIX: dict[str, Change] = {
    "the prefix is not seen": _without(lambda column, length: column >= 0),
    "slot 0 is not seen": _without(lambda column, length: column == 0),
    "slot 1 is not seen": _without(lambda column, length: column == 1),
    "slot L - 1 is not seen": _without(lambda column, length: column == length - 1),
    "the latest M slots are not seen": _without(lambda column, length: column >= length - 4),
    "a slot in the middle is not seen": _without(lambda column, length: column == length // 2),
    "odd slots of the prefix are not seen": _without(lambda column, length: column % 2 == 1),
    "of the prefix the first half is seen": _without(lambda column, length: column >= length / 2),
    "slots from 8 on are not seen": _without(lambda column, length: column >= 8),
    "slots from 16 on are not seen": _without(lambda column, length: column >= 16),
    "slots from 64 on are not seen": _without(lambda column, length: column >= 64),
    "a window of 4 slots": _without(lambda column, length: column < length - 4),
    "a window of 16 slots": _without(lambda column, length: column < length - 16),
}
TREE: dict[str, Change] = {
    "the root is not seen by drafts": _block(
        lambda block, parents: block & ~(np.arange(len(block)) == 0) | _diagonal(len(block), 0)
    ),
    "parents are not seen": _block(lambda block, parents: block & ~_parent_matrix(block, parents)),
    "grandparents are not seen": _block(
        lambda block, parents: block & ~_grandparents(block, parents)
    ),
    "no ancestor is seen": _block(lambda block, parents: _diagonal(len(block), 0)),
    "one level of ancestors is seen": _up_to(1),
    "two levels of ancestors are seen": _up_to(2),
    "siblings are seen": _block(lambda block, parents: block | _siblings(block, parents)),
    "the sibling before is seen": _block(
        lambda block, parents: block | (_siblings(block, parents) & _diagonal(len(block), -1))
    ),
    "children are seen": _block(lambda block, parents: block | _parent_matrix(block, parents).T),
    "descendants are seen": _block(lambda block, parents: block | block.T),
    "uncles are seen": _block(
        lambda block, parents: (
            block | (_parent_matrix(block, parents).astype(int) @ _siblings(block, parents) > 0)
        )
    ),
    "nodes of the same depth are seen": _block(
        lambda block, parents: block | _same_depth(block, parents)
    ),
    "every earlier node is seen": _block(lambda block, parents: np.tri(len(block), dtype=bool)),
    "every node is seen": _block(lambda block, parents: np.ones_like(block)),
    "the node before is seen": _block(lambda block, parents: block | _diagonal(len(block), -1)),
    "the node after is seen": _block(lambda block, parents: block | _diagonal(len(block), 1)),
    "the last row sees every node": _block(
        lambda block, parents: _rows(block, slice(-1, None), True)
    ),
    "the first row sees every node": _block(lambda block, parents: _rows(block, slice(0, 1), True)),
    "node 1 is seen by all": _block(
        lambda block, parents: block | (np.arange(len(block)) == min(1, len(block) - 1))
    ),
    "the last node is seen by all": _block(
        lambda block, parents: block | (np.arange(len(block)) == len(block) - 1)
    ),
    "columns from 4 on are lost": _block(
        lambda block, parents: block & (np.arange(len(block)) < 4) | _diagonal(len(block), 0)
    ),
    "columns from 32 on are lost": _block(
        lambda block, parents: block & (np.arange(len(block)) < 32) | _diagonal(len(block), 0)
    ),
    "columns are modulo 32": _block(
        lambda block, parents: block | block[:, np.arange(len(block)) % 32]
    ),
    "columns are one further right": _block(
        lambda block, parents: np.roll(block, 1, axis=1) | _diagonal(len(block), 0)
    ),
    "columns are one further left": _block(
        lambda block, parents: np.roll(block, -1, axis=1) | _diagonal(len(block), 0)
    ),
    "rows are one further down": _block(
        lambda block, parents: np.roll(block, 1, axis=0) | _diagonal(len(block), 0)
    ),
    "the last two rows are swapped": _block(
        lambda block, parents: block[_swap_last(len(block))] | _diagonal(len(block), 0)
    ),
}
PROMPT: dict[str, Change] = {
    "a token sees the next one": _block(lambda block, parents: block | _diagonal(len(block), 1)),
    "every token of the chunk is seen": _block(lambda block, parents: np.ones_like(block)),
    "the token before is not seen": _block(
        lambda block, parents: block & ~_diagonal(len(block), -1)
    ),
    "only the token itself is seen": _block(lambda block, parents: _diagonal(len(block), 0)),
    "the first token is not seen by others": _block(
        lambda block, parents: block & ~(np.arange(len(block)) == 0) | _diagonal(len(block), 0)
    ),
    "the last row sees itself alone": _block(
        lambda block, parents: np.where(
            (np.arange(len(block)) == len(block) - 1)[:, None], _diagonal(len(block), 0), block
        )
    ),
    "the chunks before are not seen": PREFIX["the prefix is not seen"],
    "slot 0 is not seen by later chunks": PREFIX["slot 0 is not seen"],
    "the last slot of the chunk before is not seen": PREFIX["slot L - 1 is not seen"],
}


def masks() -> Family:
    make = Maker(
        "masks",
        "MASK",
        "slots of the prefix and nodes of the tree that are lost from sight or seen too, in every "
        "head and layer or in one",
    )
    for label, change in PREFIX.items():
        at_an_end = "slot 0" in label or "slot L" in label
        whens: tuple[When, ...] = (*TREES, IN_FORWARD) if at_an_end else ()
        make.add_each(
            label, ("MASK-1",), _seen(change), (IN_TREES, LATER_ROUNDS, OF_A_ROOT, *whens)
        )
    for label, change in TREE.items():
        whens = (IN_TREES, AFTER_REJECTION, OF_BRANCHES, large_from(8), long_from(17), IN_FORWARD)
        make.add_each(label, ("MASK-2", "MASK-3"), _seen(change), whens)
    for label, change in PROMPT.items():
        whens = (IN_PREFILL, IN_LATER_CHUNKS)
        make.add_each(f"of a prompt: {label}", ("FWD-1", "MASK-1", "MASK-2"), _seen(change), whens)
    for where, layer, head in _PLACES:
        for label in ("slot 0 is not seen", "slot L - 1 is not seen"):
            plant = _seen_at(PREFIX[label], layer, head)
            make.add_each(f"{label} {where}", ("MASK-1", "MLA-3"), plant, (IN_TREES, IN_PREFILL))
        for label in (
            "parents are not seen",
            "siblings are seen",
            "every earlier node is seen",
            "the root is not seen by drafts",
        ):
            plant = _seen_at(TREE[label], layer, head)
            make.add_each(f"{label} {where}", ("MASK-2", "MASK-3"), plant, (IN_TREES,))
    return make.family()


_PLACES = (
    ("in layer 0", 0, None),
    ("in the last layer", -1, None),
    ("in head 0", None, 0),
    ("in the last head", None, -1),
    ("in head 0 of layer 0", 0, 0),
)


def _changed(seen: Any, change: Change, now: Occasion) -> Any:
    n = len(seen.block)
    prefix = np.ones((n, seen.open_len), bool)
    mask = np.concatenate([prefix, seen.block], axis=1)
    parents = list(now.parents) if now.parents is not None else [*range(-1, n - 1)]
    return replace(seen, open_len=0, block=change(mask, now.committed_len, parents))


def _seen(change: Change) -> Callable[[Any, Watch, When], None]:
    """The mask that is shown is the one that is used."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def full_mask(original: Any, seen: Any) -> Any:
            return original(_changed(seen, change, watch.now) if when.holds(watch.now) else seen)

        def verify_attn(
            original: Any, cache: Any, layer: int, q: Any, q_pe: Any, seen: Any, *rest: Any
        ) -> Any:
            if when.holds(watch.now):
                seen = _changed(seen, change, watch.now)
            return original(cache, layer, q, q_pe, seen, *rest)

        wrap(engine, full_mask=full_mask, verify_attn=verify_attn)

    return plant


def _seen_at(
    change: Change, layer: int | None, head: int | None
) -> Callable[[Any, Watch, When], None]:
    """One layer or head uses another mask than the one that is shown."""

    def plant(engine: Any, watch: Watch, when: When) -> None:
        def verify_attn(
            original: Any, cache: Any, at: int, q: Any, q_pe: Any, seen: Any, *rest: Any
        ) -> Any:
            out = original(cache, at, q, q_pe, seen, *rest)
            if not when.holds(watch.now) or layer not in (None, at, at - len(cache.rows)):
                return out
            other = _changed(seen, change, watch.now)
            if head is None:
                return original(cache, at, q, q_pe, other, *rest)
            *plain, scores = rest
            of_head = None if scores is None else np.full_like(scores, -np.inf)
            wrong = original(cache, at, q, q_pe, other, *plain, of_head)
            out = out.copy()
            out[:, head] = wrong[:, head]
            if scores is not None and of_head is not None:
                scores[:, head] = of_head[:, head]
            return out

        wrap(engine, verify_attn=verify_attn)

    return plant


def _swap_last(n: int) -> np.ndarray:
    order = np.arange(n)
    if n > 1:
        order[[-2, -1]] = order[[-1, -2]]
    return order
