"""Wrong walks, tokens, lengths and moves: guesses for the integers of accept and commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from kdtr.conformance.diagnosis_scene import BY_CHANCE, Guess, Ranked, Scene, weigh
from kdtr.contract import EmitLimit

_WEAK = 0.4  # the fit of a guess that any other token would have fitted too


def hints(scene: Scene) -> Iterator[Ranked | None]:
    """Recognisers of the stages from targets on."""
    name = scene.stage.name
    if name in _GUESSES:
        by_token = name in ("targets", "path", "bonus", "root", "emitted")
        unsure = by_token and not scene.logits_were_right  # the forward itself may be wrong
        for guess in _GUESSES[name](scene):
            most = 1.0
            if unsure:
                most = _WEAK if guess.specific < 2 else BY_CHANCE
                guess = replace(guess, says=f"if the logits were right, {guess.says}")
            yield weigh(scene, guess, most=most)


# Decisions


def _targets(scene: Scene) -> Iterator[Guess]:
    logits = scene.truth("logits")
    yield from _other_argmax(scene, ("ACC-1",), lambda top: top)
    targets = scene.expected
    if len(targets) > 1:
        yield Guess("row i has the target of row i + 1", ("ACC-1",), np.roll(targets, -1))
        yield Guess("row i has the target of row i - 1", ("ACC-1",), np.roll(targets, 1))
    parents = np.maximum(np.array(scene.parents), 0)
    yield Guess("a node has the target of its parent", ("ACC-1",), targets[parents])
    vocab = logits.shape[1]
    if scene.same_form and (scene.actual >= vocab).any():
        says = (
            f"a target lies beyond the vocabulary of {vocab}: columns that pad the logits are read"
        )
        yield Guess(says, ("ACC-1", "PAD-1"), scene.actual, 3)


def _other_argmax(
    scene: Scene, rules: tuple[str, ...], pick: Callable[[np.ndarray], np.ndarray]
) -> Iterator[Guess]:
    """Of every row, a token that is not its lowest top one."""
    logits = scene.truth("logits")
    last = logits.shape[1] - 1 - logits[:, ::-1].argmax(axis=1)
    yield Guess(
        "of equal top logits the highest id is taken, should be the lowest", rules, pick(last), 3
    )
    second = np.argsort(-logits, axis=1, kind="stable")[:, 1]
    yield Guess("the second best logit is taken", rules, pick(second), 1)
    yield Guess("the lowest logit is taken", rules, pick(logits.argmin(axis=1)))
    yield Guess(
        "the logit of the largest magnitude is taken", rules, pick(np.abs(logits).argmax(axis=1)), 1
    )


Follow = Callable[[int, list[int]], int | None]


def _walk(scene: Scene, follow: Follow) -> list[int]:
    """follow(node, its children): the child to go to, or None."""
    path = [0]
    while True:
        children = [i for i, parent in enumerate(scene.parents) if parent == path[-1]]
        child = follow(path[-1], children)
        if child is None:
            return path
        path.append(child)


def _right_child(scene: Scene, targets: np.ndarray, children: list[int], node: int) -> int | None:
    tokens = scene.truth("tokens")
    return next((i for i in children if tokens[i] == targets[node]), None)


def _paths(scene: Scene) -> Iterator[Guess]:
    targets, tokens = scene.truth("targets"), scene.truth("tokens")
    right = [int(i) for i in scene.expected]

    def guess(says: str, path: list[int], specific: int = 2, rule: str = "ACC-1") -> Guess:
        return Guess(says, (rule,), np.array(path), specific)

    def follow(node: int, children: list[int]) -> int | None:
        return _right_child(scene, targets, children, node)

    whole = walk(scene, targets)
    yield from _limits(scene, whole)

    def walked(says: str, follow: Follow, specific: int = 2) -> Guess:
        return guess(says, _cut(scene, targets, _walk(scene, follow)), specific)

    yield walked(
        "of each node's children only the first can be accepted",
        lambda node, children: follow(node, children[:1]),
        3,
    )
    yield walked(
        "of each node's children only the last can be accepted",
        lambda node, children: follow(node, children[-1:]),
        3,
    )
    yield walked(
        "the first child of the root is accepted, whatever its token",
        lambda node, children: children[0] if children and not node else follow(node, children),
        3,
    )
    yield walked(
        "the first child is accepted at every node, whatever its token",
        lambda node, children: children[0] if children else None,
    )
    yield guess("the walk stops one node short", right[:-1])
    yield guess("the accepted path lacks the root", right[1:], 3)
    yield guess("nothing but the root is accepted", [0], 1)
    beyond = [i for i, parent in enumerate(scene.parents) if parent == right[-1]]
    yield from (
        guess(
            f"the walk goes one node too far, to node {i}, whose token is not the target",
            [*right, i],
        )
        for i in beyond
    )

    def own_target(node: int, children: list[int]) -> int | None:
        return next((i for i in children if tokens[i] == targets[i]), None)

    def next_row(node: int, children: list[int]) -> int | None:
        return _right_child(scene, np.roll(targets, -1), children, node)

    yield walked("a node's token is held against its own target, not its parent's", own_target)
    yield walked(
        "a node's token is held against the target of the row after its parent", next_row, 1
    )
    yield guess("the path is 0..accept_len - 1, not the accepted nodes", [*range(len(right))])
    yield guess("every node of the tree is accepted", [*range(scene.n)])


def _cut(
    scene: Scene, targets: np.ndarray, path: list[int], limit: EmitLimit | None = None
) -> list[int]:
    """ACC-4: the path as the round's limit cuts it."""
    tokens, limit = scene.truth("tokens"), limit or scene.limit
    emitted = [*(int(tokens[i]) for i in path[1:]), int(targets[path[-1]])]
    for j, token in enumerate(emitted):
        if token in limit.stop_tokens or j + 1 == limit.max_emitted:
            return path[: j + 1]
    return path


def _limits(scene: Scene, whole: list[int]) -> Iterator[Guess]:
    """Of a round whose limit cuts the walk `whole`."""
    right, limit, targets = [int(i) for i in scene.expected], scene.limit, scene.truth("targets")
    if whole == right:
        return
    stops = f"stop tokens {', '.join(str(token) for token in sorted(limit.stop_tokens))}"
    most = f"max_emitted = {limit.max_emitted}"
    cuts = f"the walk is {_joined(whole)}, cut to {_joined(right)}"
    both = [
        what for what, is_set in ((stops, limit.stop_tokens), (most, limit.max_emitted)) if is_set
    ]
    says = f"the round's limit is ignored ({' and '.join(both)}): {cuts}"
    yield Guess(says, ("ACC-4",), np.array(whole), 3)
    if len(both) > 1:
        for ignored, left in (
            (most, EmitLimit(limit.stop_tokens)),
            (stops, EmitLimit(max_emitted=limit.max_emitted)),
        ):
            path = _cut(scene, targets, whole, left)
            yield Guess(f"of the limit {ignored} is ignored: {cuts}", ("ACC-4",), np.array(path), 3)
    says = "the token at which the limit cuts is accepted too: it should be the bonus alone"
    yield Guess(says, ("ACC-4",), np.array(whole[: len(right) + 1]), 2)


def walk(scene: Scene, targets: np.ndarray) -> list[int]:
    """ACC-1, over these targets [n]."""
    return _walk(scene, lambda node, children: _right_child(scene, targets, children, node))


def _joined(path: list[int]) -> str:
    return "-".join(str(i) for i in path)


def _tokens_of(scene: Scene) -> Iterator[tuple[str, int, int]]:
    """Tokens that are taken for the bonus, with how specific that is."""
    targets, tokens = _all_targets(scene), scene.truth("tokens")
    last = scene.path[-1]
    yield f"the last accepted token, that of node {last}", int(tokens[last]), 3
    yield f"the target of the last row, node {scene.n - 1}", int(targets[-1]), 3
    yield "the target of the root, row 0", int(targets[0]), 2
    if len(scene.path) > 1:
        yield (
            f"the target of node {scene.path[-2]}, one before the last accepted",
            int(targets[scene.path[-2]]),
            2,
        )
    k = len(scene.path) - 1
    if k != last:
        yield (
            f"the target of row {k} = accept_len - 1, not of node path[{k}] = {last}",
            int(targets[k]),
            2,
        )
    yield "the root of this round", int(tokens[0]), 2
    for i, target in enumerate(targets):
        yield f"the target of row {i}", int(target), 1
    for i, token in enumerate(tokens):
        yield f"the token of node {i}", int(token), 1


def _all_targets(scene: Scene) -> np.ndarray:
    targets = scene.expectation.get("targets")
    return scene.truth("logits").argmax(axis=1) if targets is None else targets


def _one_token(scene: Scene) -> Iterator[Guess]:
    is_bonus = scene.stage.name == "bonus"
    rules = ("ACC-2",) if is_bonus else ("FWD-1",) if scene.is_chunk else ("COMMIT-2",)
    who = "the bonus" if is_bonus else "the root" if scene.is_chunk else "the next root"
    row = scene.path[-1]
    right = (
        f"the target of the last row, {row}"
        if scene.is_chunk
        else "the bonus, the target of the last accepted node"
        if not is_bonus
        else f"the target of the last accepted node, {row}"
    )
    for says, token, specific in _tokens_of(scene):
        if token != int(scene.expected):
            yield Guess(f"{who} is {says}; should be {right}", rules, np.array(token), specific)
    yield from _other_argmax(scene, rules, lambda top: np.asarray(top[row]))
    if scene.limit.stop_tokens or scene.limit.max_emitted is not None:
        says = f"{who} is the target of the node where the limit cut, should be the token it cut at"
        yield Guess(says, ("ACC-4",), np.array(_all_targets(scene)[row]), 3)


def _emitted(scene: Scene) -> Iterator[Guess]:
    tokens, bonus = scene.truth("tokens"), scene.truth("bonus")
    path = list(scene.path)
    rules = ("ACC-3",)
    yield Guess("the root is emitted too", rules, np.array([*tokens[path], bonus]), 3)
    yield Guess("the bonus is not emitted", rules, tokens[path[1:]], 3)
    yield Guess(
        "the tokens of the path are emitted, root included, without the bonus",
        rules,
        tokens[path],
        3,
    )
    yield Guess("the bonus alone is emitted", rules, np.array([bonus]))
    yield Guess("all tokens of the tree are emitted", rules, tokens)
    targets = _all_targets(scene)
    yield Guess(
        "the targets of rows 0..accept_len - 1 are emitted, not of the path",
        rules,
        targets[: len(path)],
    )


# What commit left


def _lengths(scene: Scene) -> Iterator[Guess]:
    length, n, a = scene.committed_len, scene.n, len(scene.path)
    right = f"should grow by accept_len = {a}, to {length + a}"
    rules = ("FWD-1",) if scene.is_chunk else ("COMMIT-2",)
    for says, wrong, specific in (
        (f"L grew by the whole tree of {n}", length + n, 3),
        (
            f"L grew by the {a - 1} accepted drafts alone, the root was not counted",
            length + a - 1,
            3,
        ),
        ("L did not grow", length, 2),
        ("L was set to 0", 0, 2),
        (f"L was set to accept_len = {a}", a, 2),
        ("L grew by one, whatever was accepted", length + 1, 2),
        (f"L grew by accept_len + 1 = {a + 1}: the bonus was counted", length + a + 1, 3),
        (f"L grew by accept_len twice, {2 * a}", length + 2 * a, 1),
        (
            f"L grew by the depth of the tree + 1, {int(scene.depth.max()) + 1}",
            length + int(scene.depth.max()) + 1,
            1,
        ),
        (
            f"L grew by the last accepted node's index + 1, {scene.path[-1] + 1}",
            length + scene.path[-1] + 1,
            1,
        ),
    ):
        yield Guess(f"{says}; {right}", rules, np.array(wrong), specific)


def _cache_tokens(scene: Scene) -> Iterator[Guess]:
    tokens, right = scene.truth("tokens"), scene.expected
    a, path = len(scene.path), list(scene.path)
    before = right[: scene.committed_len]
    bonus = scene.expectation.get("bonus")

    def guess(says: str, kept: np.ndarray, specific: int = 3) -> Guess:
        return Guess(says, ("COMMIT-1", "COMMIT-3"), np.concatenate([before, kept]), specific)

    yield guess("the tokens of nodes 0..accept_len - 1 are kept, not of the path", tokens[:a])
    yield guess("the kept tokens are in reverse order", tokens[path[::-1]], 2)
    if bonus is not None:
        yield guess(
            "the emitted tokens are kept, the bonus among them; the root is missing",
            np.append(tokens[path[1:]], bonus),
        )


def _cache_positions(scene: Scene) -> Iterator[Guess]:
    length, path = scene.committed_len, np.array(scene.path)
    before = scene.expected[:length]

    def guess(says: str, kept: np.ndarray) -> Guess:
        return Guess(says, ("COMMIT-3", "POS-1"), np.concatenate([before, kept]), 3)

    yield guess("the kept positions are L + the index of the node, not its depth", length + path)
    yield guess("the kept positions are one too low", length + np.arange(len(path)) - 1)
    but_root = np.arange(len(path)) > 0
    high = length + np.arange(len(path)) + but_root
    yield guess("the kept positions but the root's are one too high", high)
    yield guess("the kept positions are one too high", length + np.arange(len(path)) + 1)
    yield guess(
        "the kept positions are those of nodes 0..accept_len - 1",
        scene.truth("positions")[: len(path)],
    )


def _moves(scene: Scene) -> Iterator[Guess]:
    length, right = scene.committed_len, scene.expected
    stay = np.repeat(right[:, 1:], 2, axis=1)
    for says, moves in (
        ("nothing is moved: each destination is its own source", stay),
        ("source and destination are exchanged", right[:, ::-1]),
        ("the moves are in descending order", right[::-1]),
        ("the last move is missing", right[:-1]),
        ("the root's row is missing", right[1:]),
        ("the moves are by node, L was not added", right - length),
    ):
        yield Guess(says, ("COMMIT-1",), moves, 3)
    moved = right[right[:, 0] != right[:, 1]]
    yield Guess("rows that stay are left out: the root's is one of them", ("COMMIT-1",), moved, 3)


_GUESSES: dict[str, Callable[[Scene], Iterator[Guess]]] = {
    "targets": _targets,
    "path": _paths,
    "bonus": _one_token,
    "root": _one_token,
    "emitted": _emitted,
    "committed_len": _lengths,
    "cache_tokens": _cache_tokens,
    "cache_positions": _cache_positions,
    "moves": _moves,
}
