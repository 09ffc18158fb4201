"""How a mutant gets into an engine: the wrapping of operations, weights and sessions.

It knows the shape of this project's engine (`engine.kernels`, a model's `_forward`, a session's
books) and imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any


def wrap(engine: Any, **operations: Callable[..., Any]) -> None:
    """Each is called with the original operation first, wherever the set itself calls it too."""
    for name, operation in operations.items():
        setattr(engine.kernels, name, partial(operation, getattr(engine.kernels, name)))


def on_load(engine: Any, change: Callable[[Any], Any]) -> None:
    """`change` maps the loaded weights to faulty ones."""
    on_load_with(engine, lambda weights, _: change(weights))


def on_load_with(engine: Any, change: Callable[[Any, Any], Any]) -> None:
    """The same, given the weights and the model's configuration."""
    load = engine.load

    def faulty(source: Any) -> Any:
        model = load(source)
        weights = change(model._forward.weights, model.config)
        model._forward = replace(model._forward, weights=weights)
        return model

    engine.load = faulty


def on_open(engine: Any, change: Callable[[Any], None], *, more_slots: int = 0) -> None:
    """`change` is given every session; `more_slots` than were asked for."""
    load = engine.load

    def faulty_load(source: Any) -> Any:
        model = load(source)
        open_ = model.open

        def faulty_open(*, max_len: int) -> Any:
            session = open_(max_len=max_len + more_slots)
            change(session)
            return session

        model.open = faulty_open
        return model

    engine.load = faulty_load


def on_commit(engine: Any, kept: Callable[[Any, list[int], Any], Any]) -> None:
    """The session's books take the nodes `kept(parents, path, session)` for the path."""

    def change(session: Any) -> None:
        trees: list[Any] = []
        advance, staged = session._advance, session._staged

        def watched(tokens: Any, parents: Any = None, *limits: Any) -> Any:
            trees[:] = [] if parents is None else [(tuple(tokens), tuple(parents))]
            return staged(tokens, parents, *limits)

        def faulty(tokens: Any, positions: Any, root: int) -> None:
            if trees:
                ids, parents = trees.pop()
                nodes = [*kept(parents, _path(ids, parents, tokens), session)]
                first, depths = positions[0], _depths(parents)
                tokens, positions = [ids[i] for i in nodes], [first + depths[i] for i in nodes]
            advance(tokens, positions, root)

        session._advance, session._staged = faulty, watched

    on_open(engine, change)


def _path(ids: tuple[int, ...], parents: tuple[int, ...], tokens: list[int]) -> list[int]:
    """The nodes that were walked; siblings differ (TREE-2), so tokens tell."""
    path = [0]
    for token in tokens[1:]:
        below = (i for i, parent in enumerate(parents) if parent == path[-1] and ids[i] == token)
        path.append(next(below))
    return path


def _depths(parents: tuple[int, ...]) -> list[int]:
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def in_trees(engine: Any) -> Callable[[], bool]:
    """Whether the forward under way is that of a tree."""
    now = [False]

    def told(is_tree: bool) -> Callable[..., Any]:
        def layout(original: Any, *rest: Any) -> Any:
            now[0] = is_tree
            return original(*rest)

        return layout

    wrap(engine, tree_layout=told(True), causal_layout=told(False), mask_block=told(False))
    return lambda: now[0]


def every_attention(weights: Any, change: Callable[[Any], Any]) -> Any:
    """The weights with change(attention) in each layer."""
    layers = tuple(replace(one, attention=change(one.attention)) for one in weights.layers)
    return replace(weights, layers=layers)


def every_shared(weights: Any, change: Callable[[Any], Any]) -> Any:
    """The weights with change(shared experts) in each layer that has some."""

    def changed(layer: Any) -> Any:
        if getattr(layer.mlp, "shared", None) is None:
            return layer
        return replace(layer, mlp=replace(layer.mlp, shared=change(layer.mlp.shared)))

    return replace(weights, layers=tuple(changed(layer) for layer in weights.layers))


def kv_a(attention: Any) -> Any:
    """[c + r, m]: what follows the queries' rows."""
    q = 0 if attention.q_norm is None else len(attention.q_norm)
    return attention.qkv_a[q:]


def physical(cache: Any, slot: int) -> int:
    """The row of the cache that holds a logical slot."""
    return int(cache.page_table[slot // cache.page_size]) * cache.page_size + slot % cache.page_size


@contextmanager
def rows_restored(cache: Any, columns: slice) -> Iterator[None]:
    """These columns of the cache are afterwards what they were before."""
    before = cache.rows[..., columns].copy()
    yield
    cache.rows[..., columns] = before
