"""Wrong positions, masks and slots: guesses as arrays, for these stages and all that follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.diagnosis_scene import Guess, Hint, Ranked, Scene, weigh

_MOST_SHIFT = 15  # columns: a bucket of 16 rows has no more of padding


def positions_guesses(scene: Scene) -> Iterator[Guess]:
    """Ways to get the positions of a tree wrong [n]."""
    length, depth, index = scene.committed_len, scene.depth, np.arange(scene.n)
    rules = ("POS-1",) if not scene.is_chunk else ("FWD-1", "POS-1")

    def guess(says: str, predicted: np.ndarray, specific: int = 2) -> Guess:
        return Guess(says, rules, predicted, specific)

    yield guess("positions are L + index, as if the tree were a chain", length + index, 3)
    yield guess(
        f"the root is at L - 1 = {length - 1}, should be at L = {length}, and so every node is one "
        "too low",
        length + depth - 1,
        3,
    )
    yield guess("every position is one too high", length + depth + 1)
    yield guess(
        "every node but the root is one too high: at L + depth + 1", length + depth + (depth > 0), 3
    )
    yield guess("every node but the root is one too low", length + depth - (depth > 0), 3)
    yield guess("positions start at 0, without L", depth)
    yield guess("positions are the index of the node, without L", index)
    yield guess("every node is at L, whatever its depth", np.full(scene.n, length))
    yield guess("every node but the root is at L + 1", length + np.minimum(depth, 1))
    yield guess("positions are L - 1 + index", length - 1 + index)
    yield guess("every node has the position of its parent", length + np.maximum(depth - 1, 0))
    yield guess("every node has the position of the node before it", length + np.roll(depth, 1))
    parents = np.array(scene.parents)
    yield guess("positions are L + the index of the parent + 1", length + parents + 1)
    if scene.history:
        before = scene.history[-1].get("positions")
        assert before is not None
        if len(before) == scene.n:
            yield guess("positions are those of the forward before: they were not set anew", before)
        old, n = int(before[0]), len(before)
        for wrong, what in (
            (old, "the L before the last commit"),
            (old + n, "as if the whole tree before had been committed"),
            (length - 1, "as if the last commit had counted accepted drafts alone"),
        ):
            if wrong != length and (wrong == old or scene.history[-1].get("path") is not None):
                yield guess(f"L is taken as {wrong}, should be {length}: {what}", wrong + depth)


def mask_guesses(scene: Scene) -> Iterator[Guess]:
    """Ways to get the mask wrong [n, L + n]."""
    n, length = scene.n, scene.committed_len
    right = scene.truth("mask")
    tree = right[:, length:]
    i, j = np.indices(tree.shape)
    parents = np.array(scene.parents)
    own: np.ndarray = np.asarray(i == j)
    earlier: np.ndarray = np.asarray(j <= i)
    siblings = (parents[i] == parents[j]) & ~own

    def block(says: str, block: np.ndarray, specific: int = 2) -> Guess:
        return Guess(
            says, ("MASK-2",), np.concatenate([right[:, :length], block], axis=1), specific
        )

    def whole(says: str, mask: np.ndarray, rule: str = "MASK-1") -> Guess:
        return Guess(says, (rule,), mask)

    yield block("a node sees its earlier siblings", tree | (siblings & (j < i)), 3)
    yield block("a node sees its siblings, earlier and later", tree | siblings, 3)
    yield block(
        "the tree's block is transposed: a node sees its descendants, not its ancestors", tree.T, 3
    )
    yield block(
        "causal by index: a node sees every earlier node, as if the tree were a chain", earlier, 3
    )
    yield block("every node sees every node of the tree", np.ones_like(tree))
    yield block(
        "a node sees its parent and itself, no ancestors beyond", own | (parents[i] == j), 3
    )
    yield block("a node sees itself alone of the tree, none of its ancestors", own, 3)
    yield block("a node does not see itself", tree & ~own, 3)
    yield block("no node sees the root", tree & ((j > 0) | own), 3)
    yield block("a node sees its children too", tree | (parents[j] == i))
    yield block("ancestors and descendants are visible", tree | tree.T)
    yield block(
        "all nodes of a lower depth are visible, of whatever branch",
        own | (scene.depth[j] < scene.depth[i]),
    )
    yield block(
        "the tree's block is empty: no node is visible, itself included", np.zeros_like(tree)
    )
    yield block("the tree's block is inverted", ~tree)
    if n > 1:
        yield block("row i of the tree's block is that of row i + 1", np.roll(tree, -1, axis=0))
        yield block("row i of the tree's block is that of row i - 1", np.roll(tree, 1, axis=0))
    for width in (8, 16, 32, 64, 128):
        if n > width:
            yield block(
                f"the tree's block is kept in words of {width} bits: nodes j and j + {width} are "
                "one bit",
                _folded(tree, width),
                3,
            )
            yield block(
                f"the tree's block is kept in {width} bits: no node from {width} on is visible",
                tree & (j < width),
                3,
            )
    if length:
        left = np.zeros_like(right)
        left[:, : length - 1] = True
        left[:, length - 1 : -1] = tree
        yield whole(
            "the tree's block is one column too far left: prefix columns end at L - 1",
            left,
            "MASK-2",
        )
        for by in range(2, min(length, _MOST_SHIFT) + 1):
            shifted = np.zeros_like(right)
            shifted[:, : length - by] = True
            shifted[:, length - by : -by] = tree
            yield Guess(
                f"the prefix is {by} columns short, and the tree's block as far too far left: as "
                "for rows of padding",
                ("MASK-1", "MASK-2", "PAD-1"),
                shifted,
                3,
            )
        yield whole(
            "the last column of the prefix is not visible",
            _without(right, slice(length - 1, length)),
        )
        yield whole("slot 0 is not visible", _without(right, slice(1)))
        yield whole(
            f"the prefix (columns 0..{length - 1}) is not visible", _without(right, slice(length))
        )
    late = np.zeros_like(right)
    late[:, : length + 1] = True
    late[:, length + 1 :] = tree[:, :-1]
    yield whole(
        "the tree's block is one column too far right: prefix columns end at L + 1", late, "MASK-2"
    )
    yield from _masks_of_the_past(scene, right, tree)


def _folded(tree: np.ndarray, width: int) -> np.ndarray:
    """Columns that are equal modulo `width` hold the same bit, set by any of them."""
    n = len(tree)
    bits = np.zeros((n, -(-n // width) * width), dtype=bool)
    bits[:, :n] = tree
    word: np.ndarray = np.asarray(bits.reshape(n, -1, width).any(axis=1))
    return word[:, np.arange(n) % width]


def _masks_of_the_past(scene: Scene, right: np.ndarray, tree: np.ndarray) -> Iterator[Guess]:
    n, length = scene.n, scene.committed_len
    chunks = sum(one.get("parents") is None for one in scene.history)
    for number, one in reversed([*enumerate(scene.history)]):
        slots, mask = one.get("slots"), one.get("mask")
        assert slots is not None
        assert mask is not None
        old = int(slots[0])
        name = f"chunk{number}" if number < chunks else f"round{number - chunks}"
        if len(mask) == n:
            yield Guess(
                f"the tree's block is that of {name}, which had {n} nodes too: it was not made "
                "anew",
                ("MASK-2",),
                np.concatenate([right[:, :length], mask[:, old:]], axis=1),
                3,
            )
        if number == len(scene.history) - 1 and old < length:
            yield Guess(
                "the prefix ends where it ended in the forward before: columns "
                f"{old}..{length - 1} are not visible",
                ("MASK-1",),
                _without(right, slice(old, length)),
            )


def _without(mask: np.ndarray, columns: slice) -> np.ndarray:
    mask = mask.copy()
    mask[:, columns] = False
    return mask


def slots_guesses(scene: Scene) -> Iterator[Guess]:
    """Ways to get the slots wrong [n]."""
    length, index, right = scene.committed_len, np.arange(scene.n), scene.expected
    rules = ("SLOT-1",)
    yield Guess("slots start at 0, without L: committed rows are overwritten", rules, index, 3)
    yield Guess("every node has the same slot L", rules, np.full(scene.n, length), 3)
    yield Guess(
        "slots are positions, L + depth: siblings share one", rules, length + scene.depth, 3
    )
    yield Guess("slots are in reverse order", rules, right[::-1])
    yield Guess(
        "every slot is one too low: the last committed row is overwritten", rules, right - 1, 3
    )
    yield Guess("every slot is one too high", rules, right + 1, 3)
    for page in range(2, length + scene.n + 1):
        first = length // page * page
        yield Guess(
            f"all slots stay in one page of {page}: they wrap at its edge",
            rules,
            first + (right - first) % page,
            1,
        )
        yield Guess(f"slots wrap at {page}: they are taken modulo {page}", rules, right % page, 1)


@dataclass(frozen=True, slots=True)
class _Shift:
    first: int
    by: int


def _shifted(scene: Scene) -> _Shift | None:
    """From the first row that differs on, all differ by one constant."""
    rows = np.flatnonzero(scene.differs)
    if scene.expected.ndim != 1 or not len(rows):
        return None
    by = scene.actual[rows].astype(int) - scene.expected[rows].astype(int)
    if (by != by[0]).any() or len(rows) != scene.n - rows[0]:
        return None
    return _Shift(int(rows[0]), int(by[0]))


def hints(scene: Scene) -> Iterator[Ranked | None]:
    """Recognisers of the stages positions, mask and slots."""
    if not scene.same_form:
        return
    if scene.stage.name == "positions":
        yield from (weigh(scene, guess) for guess in positions_guesses(scene))
        yield _positions_shifted(scene)
        yield _depth_of_another(scene)
    elif scene.stage.name == "mask":
        yield from (weigh(scene, guess) for guess in mask_guesses(scene))
        yield _extra_or_missing(scene)
    elif scene.stage.name == "slots":
        yield from (weigh(scene, guess) for guess in slots_guesses(scene))
        yield _slots_past_an_edge(scene)


def _positions_shifted(scene: Scene) -> Ranked | None:
    shift = _shifted(scene)
    if shift is None or shift.first:
        return None
    length = scene.committed_len
    says = f"every position is {shift.by:+d}: L is taken as {length + shift.by}, should be {length}"
    return Ranked(Hint(says, ("POS-1", "COMMIT-2")), 1)


def _depth_of_another(scene: Scene) -> Ranked | None:
    """One row's position is that of a node of another depth."""
    rows = np.flatnonzero(scene.differs)
    if len(rows) > 3:
        return None
    depth = scene.actual[rows].astype(int) - scene.committed_len
    if not np.isin(depth, scene.depth).all():
        return None
    told = ", ".join(
        f"node {i} has depth {d}, should be {scene.depth[i]}"
        for i, d in zip(rows, depth, strict=True)
    )
    return Ranked(Hint(f"the depth of another node: {told}", ("POS-1",)), 1)


def _slots_past_an_edge(scene: Scene) -> Ranked | None:
    shift = _shifted(scene)
    if shift is None or not shift.first:
        return None
    slot = int(scene.expected[shift.first])
    says = f"slots are right up to {slot - 1} and {shift.by:+d} from {slot} on: an edge of a page?"
    return Ranked(Hint(says, ("SLOT-1",), 0.9), 1)


def _extra_or_missing(scene: Scene) -> Ranked | None:
    """What kind of column is visible too many, or too few."""
    extra, missing = scene.actual & ~scene.expected, scene.expected & ~scene.actual
    length, parents = scene.committed_len, scene.parents
    if missing.any() and extra.any():
        return None
    row, column = (int(x) for x in np.argwhere(extra if extra.any() else missing)[0])
    node = column - length
    if node < 0:
        kind = f"slot {column} of the prefix"
    elif node == row:
        kind = "itself"
    elif parents[node] == parents[row]:
        kind = f"its sibling {node}"
    elif extra.any():
        kind = f"node {node} of another branch" if node < row else f"the later node {node}"
    else:
        kind = f"its ancestor {node}"
    n = int((extra | missing).sum())
    verb = "sees" if extra.any() else "does not see"
    rule = "MASK-1" if node < 0 or node == row else "MASK-2"
    return Ranked(Hint(f"{n} wrong in all: row {row} {verb} {kind}", (rule,), 0.5), 0)
