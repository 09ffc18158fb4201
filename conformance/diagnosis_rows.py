"""Patterns of any stage: which rows, which ratio, whose rows, which rounding.

They say where a difference lies or how it looks, and leave the cause open.
"""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from kdtr.conformance.diagnosis_scene import Guess, Hint, Ranked, Scene, weigh
from kdtr.conformance.tolerance import UNIT_ROUNDOFF
from kdtr.contract import Source

_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
_ROUNDINGS = 8.0  # of one value: what an engine that rounds everywhere may pile up before a stage


def hints(scene: Scene) -> Iterator[Ranked | None]:
    if not scene.same_form:
        return
    if scene.stage.axes.startswith("n"):
        yield from _whose_rows(scene)
        yield _which_rows(scene)
        yield _after_the_first_move(scene)
    yield _from_layer(scene)
    if scene.stage.axes[1:2] == "h":
        yield _which_heads(scene)
    if not scene.stage.exact:
        yield from _ratios(scene)
        yield _rounding(scene)


def _whose_rows(scene: Scene) -> Iterator[Ranked | None]:
    """Rows that are right, but another's."""
    expected, n = scene.expected, scene.n
    if n < 2 or scene.stage.name in ("positions", "mask", "slots", "parents"):
        return
    name = scene.stage.name
    rules = ("FWD-4",) if scene.stage.name != "tokens" else ("FWD-3",)
    parents = np.maximum(np.array(scene.parents), 0)
    for says, order in (
        ("row i is that of row n - 1 - i: the rows are in reverse order", np.arange(n)[::-1]),
        ("row i is that of row i + 1", np.roll(np.arange(n), -1)),
        ("row i is that of row i - 1", np.roll(np.arange(n), 1)),
        ("every node has the row of its parent", parents),
        ("every row is row 0", np.zeros(n, dtype=int)),
        ("every row is the last", np.full(n, n - 1)),
        (
            "rows are in the order of depth, not of the nodes",
            np.argsort(scene.depth, kind="stable"),
        ),
    ):
        yield weigh(scene, Guess(f"{name}: {says}", rules, expected[order], 1))
    order = np.arange(n)
    for row in np.flatnonzero(scene.differs.reshape(n, -1).any(axis=1)):
        for other in range(n):
            swapped = np.broadcast_to(expected[other], expected.shape)
            if other != row and scene.close(swapped)[row].all():
                order[row] = other
                break
        else:
            return
    told = ", ".join(f"row {i} has that of row {p}" for i, p in enumerate(order) if i != p)
    yield weigh(scene, Guess(f"{name}: {told}", rules, expected[order], 1))


def _which_rows(scene: Scene) -> Ranked | None:
    n = scene.n
    wrong = scene.differs.reshape(n, -1).any(axis=1)
    if not wrong.any():
        return None
    if wrong.all():
        return _all_rows(scene)
    parents, index = scene.parents, np.arange(n)
    siblings = np.array([parents.count(parent) > 1 for parent in parents])
    later = np.array([parent in parents[:i] for i, parent in enumerate(parents)])
    below = later.copy()
    for i, parent in enumerate(parents):
        below[i] |= parent >= 0 and below[parent]
    branched = np.array([scene.depth[i] != i for i in range(n)])
    if scene.is_chunk:
        siblings = later = below = branched = np.zeros(n, bool)
    for says, rows, rules in (
        ("only row 0, which sees the cache and itself", index == 0, ("COMMIT-3",)),
        ("every row but the first", index > 0, () if scene.is_chunk else ("MASK-2", "POS-1")),
        (
            "only rows of depth 2 and more: ancestors beyond the parent",
            scene.depth > 1,
            ("MASK-2",),
        ),
        ("only nodes that have siblings", siblings, ("MASK-2",)),
        ("only nodes that have an earlier sibling", later, ("MASK-2",)),
        ("only nodes with an earlier sibling, and those below them", below, ("MASK-2", "POS-1")),
        ("only nodes whose index is not their depth", branched, ("POS-1", "MASK-2")),
        ("only the last row", index == n - 1, ()),
    ):
        if np.array_equal(rows, wrong):
            return Ranked(Hint(f"{says} differ: {int(wrong.sum())} of {n}", rules, 0.5), 0)
    first = int(np.flatnonzero(wrong)[0])
    slot = scene.committed_len + first
    if np.array_equal(wrong, index >= first):
        says = f"rows from {first} (slot {slot}) on differ, and none before: an edge of a page?"
        return Ranked(Hint(says, ("SLOT-1",), 0.5), 0)
    rows = ", ".join(str(i) for i in np.flatnonzero(wrong)[:8])
    says = f"only row{'s' if wrong.sum() > 1 else ''} {rows} of {n} differ"
    return Ranked(Hint(says, (), 0.4), 0)


def _all_rows(scene: Scene) -> Ranked | None:
    """After right rounds: the root sees the cache and itself, and the model was right before."""
    rounds = sum(one.get("parents") is not None for one in scene.history)
    late = scene.stage.source in (Source.FORWARD, Source.LAYER) and scene.stage.name not in (
        *("tokens", "positions", "mask", "slots", "parents", "embedding"),
    )
    if scene.is_chunk or not rounds or not late or scene.layer:
        return None
    says = (
        f"all {scene.n} rows differ, the root too, which sees the cache and itself alone, and the "
        "round before was right: suspect what its commit left, or what was written over committed "
        "rows"
    )
    return Ranked(Hint(says, ("COMMIT-3", "SLOT-2"), 0.5, "cache_c_kv"), 0)


def _after_the_first_move(scene: Scene) -> Ranked | None:
    """The first point at which a wrong compaction can be seen."""
    paths = [one.get("path") for one in scene.history]
    moved = [path is not None and int(path[-1]) >= len(path) for path in paths]
    if scene.stage.source not in (Source.FORWARD, Source.LAYER) or scene.stage.exact:
        return None
    if not moved or not moved[-1] or any(moved[:-1]):
        return None
    last = paths[-1]
    path = "" if last is None else "-".join(str(int(node)) for node in last)
    says = (
        f"this is the first point after a commit that had rows to move (path {path}); before it "
        "every accepted row was where it belonged"
    )
    return Ranked(Hint(says, ("COMMIT-1",), 0.5, "cache_c_kv"), 0)


def _from_layer(scene: Scene) -> Ranked | None:
    """The same stage was right in the layers below."""
    layer = scene.layer
    if not layer or (scene.stage.name, layer - 1) not in scene.seen:
        return None
    below = f"layer {layer - 1}" if layer == 1 else f"layers up to {layer - 1}"
    says = f"{scene.stage.name} is right in {below}: it begins in layer {layer}"
    return Ranked(Hint(says, (), 0.4), 0)


def _which_heads(scene: Scene) -> Ranked | None:
    wrong = np.flatnonzero(scene.differs.any(axis=(0, *range(2, scene.expected.ndim))))
    h = scene.expected.shape[1]
    if len(wrong) == h or not len(wrong):
        return None
    heads = ", ".join(str(i) for i in wrong)
    says = f"only head{'s' if len(wrong) > 1 else ''} {heads} of {h} differ"
    return Ranked(Hint(says, ("MLA-3",), 0.5), 0)


def _ratios(scene: Scene) -> Iterator[Ranked | None]:
    """All numbers are the right ones times a constant: over all, or per row."""
    finite = np.isfinite(scene.expected) & np.isfinite(scene.numbers)
    right, actual = np.where(finite, scene.expected, 0.0), np.where(finite, scene.numbers, 0.0)
    square = float((right * right).sum())
    if square == 0:
        return
    ratio = float((right * actual).sum() / square)
    says = (
        "all signs are flipped" if abs(ratio + 1) < 1e-3 else f"all numbers are times {ratio:.5g}"
    )
    if abs(ratio) < 1e-6:
        says = "all numbers are zero"
        ratio = 0.0
    with np.errstate(invalid="ignore"):
        predicted = np.where(finite, ratio * right, scene.expected)
    yield weigh(scene, Guess(says, (), predicted, 1))
    within = tuple(range(scene.stage.row_axes, right.ndim))
    squares = (right * right).sum(axis=within, keepdims=True)
    dots = (right * actual).sum(axis=within, keepdims=True)
    per_row = np.divide(dots, squares, out=np.ones_like(dots), where=squares > 0)
    elements = right.size // max(1, per_row.size)
    low, high = float(per_row.min()), float(per_row.max())
    if elements < 4 or per_row.size < 2 or high - low < 1e-3 * abs(high):
        return
    says = f"each row is the right one times a constant of its own, {low:.4g} to {high:.4g}"
    with np.errstate(invalid="ignore"):
        predicted = np.where(finite, per_row * right, scene.expected)
    yield weigh(scene, Guess(says, (), predicted, 1))


def _rounding(scene: Scene) -> Ranked | None:
    """The error is of the size that another dtype's rounding makes."""
    finite = np.isfinite(scene.expected) & np.isfinite(scene.numbers)
    if not np.array_equal(finite, np.isfinite(scene.expected)):
        return None
    error = np.abs(np.where(finite, scene.numbers, 0) - np.where(finite, scene.expected, 0))
    within = tuple(range(scene.stage.row_axes, error.ndim))
    scale = np.where(finite, np.abs(scene.expected), 0).max(axis=within, keepdims=True, initial=0)
    numbers = scene.numbers[finite]
    for name, dtype in _DTYPES.items():
        unit = UNIT_ROUNDOFF[name]
        largest = float(np.divide(error, scale, out=np.zeros_like(error), where=scale > 0).max())
        if not unit / 8 < largest <= _ROUNDINGS * unit:
            continue
        with np.errstate(over="ignore"):
            stored = bool((numbers.astype(dtype).astype(np.float64) == numbers).all())
        off = f"they are off by up to {largest:.2g} of a row's largest, its unit is {unit:.2g}"
        says = f"the numbers are {name} numbers: {off}"
        if not stored:
            says = f"the numbers would fit a rounding to {name} on the way: {off}"
        return Ranked(Hint(says, ("NUM-1", "NUM-3"), 0.8 if stored else 0.3), 1 if stored else 0)
    return None
