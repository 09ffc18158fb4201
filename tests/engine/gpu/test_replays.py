"""Captured rounds: the bits of launched ones, every time, whatever ran in the bucket before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kdtr.contract import DraftTree, EmitLimit, ModelConfig
from kdtr.engine.model import TreeModel
from kdtr.engine.session import TreeSession

Load = Callable[..., TreeModel]
PROMPT = [3, 0, 36, 8, 8, 1]


def opened(model: TreeModel, root: int = 9) -> TreeSession:
    session = model.open(max_len=200)
    session.prefill(PROMPT)
    session.set_root(root)
    return session


def tree(n: int, seed: int, root: int) -> DraftTree:
    """n nodes under the root, siblings unlike, with tokens of the small vocabulary."""
    rng = np.random.default_rng(seed)
    parents, tokens, taken = [-1], [root], set()
    while len(parents) < n:
        parent, token = int(rng.integers(len(parents))), int(rng.integers(37))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return DraftTree(tokens=tuple(tokens), parents=tuple(parents))


class Seen(dict[tuple[str, int | None], np.ndarray]):
    """A trace that keeps a copy of everything."""

    def __call__(self, stage: str, layer: int | None, array: Any) -> None:
        self[stage, layer] = np.array(array)


def same(one: Seen, other: Seen) -> None:
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.shape == other[key].shape, key
        assert array.tobytes() == other[key].tobytes(), key


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_hundred_replays_give_the_same_bits(cuda_load: Load, dtype: str) -> None:
    """NUM-4."""
    session = opened(cuda_load(dtype=dtype))
    nodes = tree(12, 1, 9)
    session.verify(nodes)
    first = session.verify(nodes)
    for _ in range(100):
        again = session.verify(nodes)
        assert first.targets == again.targets
        assert first.logits.tobytes() == again.logits.tobytes()


def test_graphs_and_launches_agree_at_every_stage(cuda_load: Load, dtype: str) -> None:
    """Rounds of one bucket and of several, L growing across pages and slot buckets."""
    captured = opened(cuda_load(dtype=dtype, page_size=7))
    launched = opened(cuda_load(dtype=dtype, page_size=7, graphs=False))
    for step, n in enumerate((5, 5, 3, 9, 2, 9, 17, 1, 1, 12, 5)):
        nodes = tree(n, step, captured.root)
        one, other = Seen(), Seen()
        assert captured.round(nodes, trace=one) == launched.round(nodes, trace=other)
        same(one, other)
    for mine, theirs in zip(
        vars_of(captured.snapshot()), vars_of(launched.snapshot()), strict=True
    ):
        assert mine.tobytes() == theirs.tobytes()


def vars_of(cache: Any) -> list[np.ndarray]:
    return [cache.tokens, cache.positions, cache.c_kv, cache.k_pe]


def test_a_trace_changes_nothing(cuda_load: Load, dtype: str) -> None:
    model = cuda_load(dtype=dtype)
    quiet, told = opened(model), opened(model)
    for step in range(4):
        nodes = tree(8, step, quiet.root)
        assert quiet.round(nodes) == told.round(nodes, trace=Seen())
    assert quiet.snapshot().c_kv.tobytes() == told.snapshot().c_kv.tobytes()


def test_what_a_larger_tree_left_in_the_bucket_is_not_seen(cuda_load: Load) -> None:
    """PAD-1: nodes of the tree before, in rows that are padding now."""
    model = cuda_load()
    used, fresh = opened(model), opened(model)
    for session in (used, fresh):
        session.verify(tree(9, 4, 9))  # both have captured the bucket of 9
        session.verify(tree(9, 4, 9))
    used.verify(tree(9, 5, 9))
    fresh.verify(tree(6, 6, 9))
    small_tree = tree(6, 6, 9)
    one, other = Seen(), Seen()

    used.verify(small_tree, trace=one)
    fresh.verify(small_tree, trace=other)

    same(one, other)
    assert 6 == len(one["logits", None]) == len(one["slots", None])


def test_limits_are_read_anew(cuda_load: Load) -> None:
    """ACC-4 in replays: other stop tokens and lengths than those of the capture."""
    model = cuda_load()
    for limit in (EmitLimit(), EmitLimit(max_emitted=1), EmitLimit(max_emitted=2)):
        one, other = opened(model), opened(cuda_load(graphs=False))
        for step in range(3):
            nodes = tree(9, step, one.root)
            assert one.round(nodes, limit=limit) == other.round(nodes, limit=limit)
    targets = opened(model).verify(tree(9, 0, 9)).targets
    for stops in ({targets[0]}, {36}, set(range(20)), set(range(0, 37, 3))):
        one, other = opened(model), opened(cuda_load(graphs=False))
        for step in range(3):
            nodes, limit = tree(9, step, one.root), EmitLimit(frozenset(stops))
            assert one.round(nodes, limit=limit) == other.round(nodes, limit=limit)


def test_sessions_do_not_share_what_they_captured(cuda_load: Load) -> None:
    model = cuda_load()
    alone = [opened(model, root) for root in (9, 4)]
    mixed = [opened(model, root) for root in (9, 4)]
    expected = [
        [session.round(tree(7, step, session.root)) for step in range(4)] for session in alone
    ]
    found: list[list[Any]] = [[], []]
    for step in range(4):
        for session, rounds in zip(mixed, found, strict=True):
            rounds.append(session.round(tree(7, step, session.root)))
    assert expected == found


def test_guards_see_a_write_outside_of_a_buffer(cuda_load: Load) -> None:
    from kdtr.contract import EngineError
    from kdtr.engine.cuda_guard import Guard
    from kdtr.engine.cuda_modules import import_cupy

    cupy = import_cupy()
    guard = Guard(cupy, cupy.get_default_memory_pool().malloc)
    with cupy.cuda.using_allocator(guard.malloc):
        array = cupy.empty(10, cupy.float32)
    assert np.isnan(cupy.asnumpy(array)).all()
    guard.check()
    outside = cupy.ndarray(12, cupy.float32, memptr=array.data)
    outside[11] = 3

    with pytest.raises(EngineError, match="byte 4 of the 256 behind buffer 0 of 40 bytes"):
        guard.check()


def test_a_sequence_grows_through_slot_buckets(
    cuda_load: Load, small: ModelConfig, dtype: str
) -> None:
    """One graph per bucket: 600 tokens, decoded and by trees, are the same tokens."""
    model = cuda_load(small.replace(max_position_embeddings=2000), dtype=dtype)
    plain, trees = (model.open(max_len=700) for _ in range(2))
    for session in (plain, trees):
        session.prefill(PROMPT)
    tokens = [plain.decode() for _ in range(600)]
    emitted: list[int] = []
    while len(emitted) < 600:
        nodes = tree(5, len(emitted), trees.root)
        emitted.extend(trees.round(nodes).emitted)
    if dtype == "float32":  # in bfloat16 a near tie may fall the other way
        assert tokens[:590] == emitted[:590]
    assert plain.committed_len == 606
