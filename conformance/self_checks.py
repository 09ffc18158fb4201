"""What an engine must hold against itself: rows of trees are its own plain decoding (FWD-4).

Checks stand in an order in which each takes for granted what those before it have shown. A check
that fails says what was wrong, and by experiments what it looks like: which nodes a row hangs on
(`self_influence.py`), and, where there is forward_tokens, which positions give the rows that were
shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdtr.conformance.seed_model import hash_below
from kdtr.conformance.self_influence import influence
from kdtr.conformance.self_model import SelfModel, ancestors, committed_row, lone, path_tokens
from kdtr.conformance.self_noise import SelfNoise, apart
from kdtr.conformance.tree_rules import greedy_walk, node_depths, tree_mask
from kdtr.contract import Acceptance, DraftTree

# Shapes in which the accepted sibling stands first, last and between, and the order is neither
# depth first nor breadth first.
SHAPES: dict[str, tuple[int, ...]] = {
    "y": (-1, 0, 0, 2),
    "star": (-1, 0, 0, 0, 0),
    "comb": (-1, 0, 0, 1, 3, 3, 4),
    "late": (-1, 0, 1, 0, 3, 1, 4, 4),
    "deep": (-1, 0, 1, 2, 3, 4, 4, 2),
}
PROMPTS = (1, 5, 16, 17, 33)  # tokens: around the edges of pages and splits of common sizes


@dataclass(frozen=True, slots=True)
class Wrong:
    """A difference: the rules it breaks, where, what, and what it looks like."""

    rules: tuple[str, ...]
    point: str
    summary: str
    where: str = ""
    looks_like: str = ""


@dataclass(slots=True)
class Bench:
    """A model under check, its noise, and what has been compared so far.

    rows      compared so far
    headroom  the largest distance seen, as a fraction of its bound
    tie       a decision that fell otherwise within the bounds, in words, or ""
    """

    model: SelfModel
    noise: SelfNoise
    seed: int = 0
    rows: int = 0
    headroom: float = 0.0
    tie: str = ""

    def tokens(self, what: str, n: int) -> tuple[int, ...]:
        return tuple(hash_below(self.seed, what, n, self.model.vocab_size).tolist())

    def tree(self, name: str) -> DraftTree:
        """A shape with tokens of which no two are equal."""
        parents = SHAPES[name]
        drawn = dict.fromkeys(self.tokens(name, 64))
        chosen = [*drawn, *(t for t in range(self.model.vocab_size) if t not in drawn)]
        return DraftTree(tuple(chosen[: len(parents)]), parents)

    def differs(self, expected: np.ndarray, actual: np.ndarray) -> float:
        """0 where the rows [w] agree; else how many bounds they lie apart."""
        self.rows += 1
        ratio = apart(expected, actual, self.noise.bound(expected))
        if ratio <= 1:
            self.headroom = max(self.headroom, ratio)
            return 0.0
        return ratio


Check = Callable[[Bench], Wrong | None]


def context(bench: Bench) -> Wrong | None:
    """MASK-1, FWD-4: a row hangs on the tokens before it and on their order.

    Where it does not, every comparison with plain decoding would pass: nothing can be told.
    """
    prompt = bench.tokens("context", 4)
    if len(set(prompt)) < len(prompt):
        prompt = tuple(dict.fromkeys(bench.tokens("context", 64)))[:4]
    row = bench.model.plain_row(prompt)
    other = next(t for t in bench.tokens("other", 64) if t not in prompt)
    changes = {
        "another first token": (other, *prompt[1:]),
        "another token before it": (*prompt[:2], other, prompt[3]),
        "the first two tokens exchanged": (prompt[1], prompt[0], *prompt[2:]),
    }
    for words, tokens in changes.items():
        moved = apart(row, bench.model.plain_row(tokens), bench.noise.bound(row))
        bench.rows += 1
        if not moved > 1:
            return Wrong(
                ("MASK-1", "FWD-4"),
                "prompt of 4",
                f"{words} does not move a row beyond its bound ({moved:.3g} of it): the engine "
                "does not read what is before a row, or its noise hides it, and no comparison "
                "with plain decoding tells anything",
            )
    return None


def root_alone(bench: Bench) -> Wrong | None:
    """FWD-1, FWD-2: a token decoded as the lone root leaves what prefilling it leaves."""
    model = bench.model
    for n in PROMPTS:
        prompt = bench.tokens(f"prompt {n}", n)
        first, second = bench.tokens(f"roots {n}", 2)
        whole = model.plain_row((*prompt, first, second))
        if model.offers("forward_tokens"):
            apart = bench.differs(model.causal_row((*prompt, first, second)), whole)
            if apart:
                return Wrong(
                    ("FWD-2", "POS-1"),
                    f"prompt of {n + 1}",
                    "the lone root's row is not that of one causal forward over the same tokens: "
                    f"it differs by {apart:.3g} bounds",
                    looks_like=_positions_of(bench, (*prompt, first), lone(second)),
                )
        stepped = committed_row(model, prompt, lone(first), (0,), second)
        apart = bench.differs(whole, stepped)
        if apart:
            return Wrong(
                ("FWD-2", "POS-1", "COMMIT-2", "COMMIT-3"),
                f"prompt of {n}",
                "a token that was verified as the root and committed is not what prefilling it "
                f"leaves: the row after it differs by {apart:.3g} bounds",
                looks_like=_positions_of(bench, prompt, lone(first)),
            )
    return None


def chains(bench: Bench) -> Wrong | None:
    """FWD-5: a chain is causal verification."""
    for n in PROMPTS:
        prompt = bench.tokens(f"prompt {n}", n)
        tokens = bench.tokens(f"chain {n}", 5)
        tree = DraftTree(tokens, tuple(range(-1, len(tokens) - 1)))
        wrong = _rows_are_plain(
            bench, prompt, tree, f"chain of 5 after a prompt of {n}", ("FWD-5",)
        )
        if wrong is not None:
            return wrong
    return None


def trees(bench: Bench) -> Wrong | None:
    """FWD-4: every row of a tree is a plain run over its path."""
    for n in PROMPTS:
        prompt = bench.tokens(f"prompt {n}", n)
        for name in SHAPES:
            point = f"tree {name} after a prompt of {n}"
            wrong = _rows_are_plain(bench, prompt, bench.tree(name), point, ("FWD-4",))
            if wrong is not None:
                return wrong
    return None


def untouched(bench: Bench) -> Wrong | None:
    """SLOT-2, MASK-3: a verify that is not committed changes no later row."""
    for n in PROMPTS:
        prompt = bench.tokens(f"prompt {n}", n)
        after, tree = bench.tree("deep"), bench.tree("y")
        rows = bench.model.tree_rows(prompt, tree)
        with bench.model.session(prompt) as session:
            bench.model.rows(session, after)
            again = bench.model.rows(session, tree)
        for i in range(len(tree)):
            apart = bench.differs(rows[i], again[i])
            if apart:
                return Wrong(
                    ("SLOT-2", "COMMIT-4", "MASK-3"),
                    f"tree y after tree deep, prompt of {n}",
                    f"a verify that was never committed changes a later one by {apart:.3g} bounds",
                    _row(tree, i),
                )
    return None


def commits(bench: Bench) -> Wrong | None:
    """COMMIT-1 to COMMIT-4: after a commit the cache is that of plain decoding of the path."""
    for n in PROMPTS:
        prompt = bench.tokens(f"prompt {n}", n)
        for name in SHAPES:
            tree = bench.tree(name)
            root = bench.tokens(f"next {name}", 1)[0]
            for leaf in _leaves(tree):
                path = ancestors(tree.parents, leaf)
                plain = bench.model.plain_row((*prompt, *path_tokens(tree, leaf), root))
                row = committed_row(bench.model, prompt, tree, path, root)
                apart = bench.differs(plain, row)
                if apart:
                    shown = "-".join(map(str, path))
                    return Wrong(
                        ("COMMIT-3", "COMMIT-1", "COMMIT-4"),
                        f"tree {name} after a prompt of {n}, path {shown} committed",
                        f"the next row differs from plain decoding by {apart:.3g} bounds",
                        "the lone root after the commit",
                        _held(bench, prompt, tree, path, root, plain),
                    )
    return None


def greedy(bench: Bench) -> Wrong | None:
    """LOSSLESS: rounds over trees emit what plain decoding emits; a thin choice ends the check."""
    model = bench.model
    held = list(bench.tokens("greedy", 9))
    with model.session(held[:-1]) as session:
        for name in ("y", "deep", "comb", "late"):
            tree, path = _planted(bench, held, SHAPES[name])
            rows = model.rows(session, tree)
            targets = [int(row.argmax()) for row in rows]
            walked = greedy_walk(tree, targets)
            if walked != path:
                shared = [a for a, b in zip(walked, path, strict=False) if a == b]
                row = rows[shared[-1]]
                gap, bound = _gap(row), float(bench.noise.bound(row)[row.argmax()])
                if gap <= 2 * bound:
                    bench.tie = (
                        f"tree {name}: two logits differ by {gap:.2g}, less than {2 * bound:.2g}"
                    )
                    return None
                return Wrong(
                    ("LOSSLESS", "ACC-1"),
                    f"greedy rounds, tree {name}",
                    f"plain decoding goes along nodes {_list(path)}, the targets of the tree along "
                    f"{_list(walked)}",
                    _row(tree, shared[-1]),
                )
            session.commit(Acceptance(path, targets[path[-1]]))
            held += [*(tree.tokens[i] for i in path[1:]), targets[path[-1]]]
            bench.rows += len(tree)
    return None


CHECKS: tuple[tuple[str, Check], ...] = (
    ("context", context),
    ("root-alone", root_alone),
    ("chains", chains),
    ("trees", trees),
    ("untouched", untouched),
    ("commits", commits),
    ("greedy", greedy),
)


def _rows_are_plain(
    bench: Bench, prompt: tuple[int, ...], tree: DraftTree, point: str, rules: tuple[str, ...]
) -> Wrong | None:
    rows = bench.model.tree_rows(prompt, tree)
    for i in range(len(tree)):
        plain = bench.model.plain_row((*prompt, *path_tokens(tree, i)))
        apart = bench.differs(plain, rows[i])
        if apart:
            named, looks_like = _named(bench, prompt, tree, rows)
            return Wrong(
                (*named, *rules),
                point,
                f"the row differs from plain decoding of its path by {apart:.3g} bounds",
                _row(tree, i),
                looks_like,
            )
    return None


def _named(
    bench: Bench, prompt: tuple[int, ...], tree: DraftTree, rows: np.ndarray
) -> tuple[tuple[str, ...], str]:
    """The rules that the experiments point at, and what they show in words."""
    bounds = np.stack([bench.noise.bound(row) for row in rows])
    seen = influence(
        tree,
        lambda other: bench.model.tree_rows(prompt, other),
        bench.model.vocab_size,
        bounds,
        range(1, len(tree)),
    )
    words = list(_wrongly_seen(tree, seen))
    if words:
        return ("MASK-2",), "; ".join(words)
    positions = _positions_of(bench, prompt, tree)
    if positions:
        return ("POS-1",), positions
    return (), "every row reads exactly its path: look at positions and at what the rows hold"


def _wrongly_seen(tree: DraftTree, seen: np.ndarray) -> Iterator[str]:
    for i in range(len(tree)):
        path = set(ancestors(tree.parents, i))
        extra = [j for j in range(1, len(tree)) if seen[i, j] and j not in path]
        missing = [j for j in path - {0} if not seen[i, j]]
        if extra:
            kin = ", ".join(f"{j} ({_kin(tree, i, j)})" for j in extra)
            yield f"{_row(tree, i)} also saw node {kin}"
        if missing:
            yield f"{_row(tree, i)} did not see node {_list(missing)}"


def _kin(tree: DraftTree, i: int, j: int) -> str:
    if tree.parents[i] == tree.parents[j]:
        return "its sibling"
    if i in ancestors(tree.parents, j):
        return "below it"
    return "of another branch"


def _positions_of(bench: Bench, prompt: Sequence[int], tree: DraftTree) -> str:
    """Which positions explain the rows of a verify, where forward_tokens can try them; or ""."""
    model, n, length = bench.model, len(tree), len(prompt)
    if not model.offers("forward_tokens"):
        return ""
    depth, mask = np.array(node_depths(tree.parents)), tree_mask(tree.parents, length)
    rows = model.tree_rows(prompt, tree)
    tried = {
        "L - 1 + depth: the root is one position too low": length - 1 + depth,
        "L + 1 + depth: the root is one position too high": length + 1 + depth,
        "L + index, the order of the nodes": length + np.arange(n),
        "L + 1 + depth for all but the root": length + depth + (depth > 0),
        "L for every node": np.full(n, length),
        "depth, without the tokens before": depth,
    }
    for words, positions in tried.items():
        if np.array_equal(positions, length + depth) or positions.min() < 0:
            continue
        shown = model.forward_rows(prompt, tree.tokens, positions, mask)
        if all(apart(b, a, bench.noise.bound(b)) <= 1 for a, b in zip(shown, rows, strict=True)):
            return f"positions are {words}"
    return ""


def _held(
    bench: Bench,
    prompt: tuple[int, ...],
    tree: DraftTree,
    path: tuple[int, ...],
    root: int,
    plain: np.ndarray,
) -> str:
    """Which nodes the row after the commit hangs on."""
    seen = influence(
        tree,
        lambda other: committed_row(bench.model, prompt, other, path, root)[None],
        bench.model.vocab_size,
        bench.noise.bound(plain)[None],
        range(1, len(tree)),
    )[0]
    # The root's own token is not exchanged: the verify would be another one.
    held = tuple(j for j in range(1, len(tree)) if seen[j])
    expected = path[1:]
    if held == expected:
        return (
            "the cache holds the accepted nodes and no other: look at their order, their "
            "positions and at the root's row"
        )
    lost = [j for j in expected if j not in held]
    stale = [j for j in held if j not in expected]
    words = [f"after the commit of {_list(path)} the next row hangs on nodes {_list(held)}"]
    first = tuple(range(1, len(path)))
    if held == first:
        words.append("the first rows of the tree: nothing was moved (COMMIT-1)")
    elif stale and not lost:
        words.append(f"rejected nodes stayed visible: {_list(stale)} (COMMIT-4)")
    elif lost:
        words.append(f"accepted nodes were lost: {_list(lost)} (COMMIT-1)")
    return "; ".join(words)


def _planted(
    bench: Bench, held: Sequence[int], parents: tuple[int, ...]
) -> tuple[DraftTree, tuple[int, ...]]:
    """A tree of this shape, and the path to its last leaf, which holds plain decoding's tokens.

    held  all tokens so far; the last is the root
    """
    shape = DraftTree(tuple(range(len(parents))), parents)
    path = ancestors(parents, _leaves(shape)[-1])
    ahead = [held[-1]]
    for _ in path[1:]:
        ahead.append(int(bench.model.plain_row([*held, *ahead[1:]]).argmax()))
    chosen = [ahead[path.index(i)] if i in path else -1 for i in range(len(parents))]
    for node, parent in enumerate(parents):
        taken = {chosen[i] for i in range(len(parents)) if parents[i] == parent}
        if node not in path:
            above = [chosen[i] for i in ancestors(parents, parent)]
            taken.add(int(bench.model.plain_row([*held[:-1], *above]).argmax()))
            free = (t for t in bench.tokens(f"miss {node}", 64) if t not in taken)
            chosen[node] = next(free)
    return DraftTree(tuple(chosen), parents), path


def _leaves(tree: DraftTree) -> list[int]:
    return [i for i in range(len(tree)) if i not in tree.parents]


def _gap(row: np.ndarray) -> float:
    best = np.partition(row, -2)[-2:]
    return float(best[1] - best[0])


def _row(tree: DraftTree, i: int) -> str:
    return f"row {i} (path {_dashed(tree, i)})"


def _dashed(tree: DraftTree, i: int) -> str:
    return "-".join(map(str, ancestors(tree.parents, i)))


def _list(nodes: Sequence[int]) -> str:
    return ", ".join(map(str, nodes)) or "none"
