"""Memory that runs out on a device: the text has its numbers, and the session goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from test_replays import opened, tree

from kdtr.contract import CacheError, EngineError, ModelConfig
from kdtr.engine import cuda_modules, make_cuda_engine
from kdtr.engine.cuda_launch import LaunchError
from kdtr.engine.cuda_modules import import_cupy
from kdtr.engine.model import TreeModel

Load = Callable[..., TreeModel]


@contextmanager
def limited(n_bytes: int) -> Iterator[None]:
    """Memory comes from a pool that may hold so much."""
    cupy = import_cupy()
    pool = cupy.cuda.MemoryPool()
    pool.set_limit(size=n_bytes)
    with cupy.cuda.using_allocator(pool.malloc):
        yield


def test_a_cache_larger_than_the_device(cuda_load: Load, small: ModelConfig) -> None:
    """Really asked for: 192 GB."""
    model = cuda_load(small.replace(max_position_embeddings=10**9))

    with pytest.raises(
        CacheError,
        match=r"max_len = 1000000000 needs 192000000000 bytes of cache, more than there are "
        r"\(cache rows of shape \[3, 1000000000, 16\]: 192000000000 bytes asked for, \d+ of the "
        r"\d+ bytes of .+ are free; close sessions .*\); open it with a smaller max_len",
    ):
        model.open(max_len=10**9)
    assert len(opened(model).verify(tree(5, 1, 9)).targets) == 5


def test_weights(small: ModelConfig, weights_of: Callable[[ModelConfig], Any]) -> None:
    engine, source = make_cuda_engine(), (small, weights_of(small))
    with (
        limited(1000),
        pytest.raises(
            MemoryError,
            match=r"weights of shape \[37, 20\]: \d+ bytes asked for, CuPy's pool may hold 1000 "
            r"bytes and \d+ of the \d+ bytes of .+ are free; load a smaller model",
        ),
    ):
        engine.load(source)
    assert len(opened(engine.load(source)).verify(tree(5, 1, 9)).targets) == 5


def test_a_prompt(cuda_load: Load) -> None:
    """Refused as a whole, it is taken in chunks."""
    model = cuda_load()
    whole, chunked = (model.open(max_len=300) for _ in range(2))
    prompt = [i * 7 % 37 for i in range(256)]
    whole.prefill(prompt)
    with (
        limited(16_384),
        pytest.raises(MemoryError, match=r"prefill of 256 rows .* in shorter chunks"),
    ):
        chunked.prefill(prompt)

    assert 0 == chunked.committed_len
    for start in range(0, 256, 64):
        chunked.prefill(prompt[start : start + 64])
    assert whole.root == chunked.root


def test_a_graph(cuda_load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round is refused, the session is as it was, and the stream no longer captures."""
    cupy = import_cupy()
    pool_of, model = cupy.cuda.MemoryPool, cuda_load()
    session, honest = opened(model), opened(cuda_load(graphs=False))
    for one in (session, honest):
        one.round(tree(9, 1, one.root))

    def limited_pool() -> Any:
        pool = pool_of()
        pool.set_limit(size=4096)
        return pool

    monkeypatch.setattr(cupy.cuda, "MemoryPool", limited_pool)
    with pytest.raises(
        MemoryError,
        match=r"graph of a round of 9 rows over up to 256 slots: \d+ bytes asked for, CuPy's pool "
        r"may hold 4096 bytes and .* or make the engine with graphs=False",
    ):
        session.round(tree(9, 2, session.root))
    assert honest.committed_len == session.committed_len
    monkeypatch.undo()

    for step in range(2, 5):
        assert honest.round(tree(9, step, honest.root)) == session.round(
            tree(9, step, session.root)
        )
    assert honest.snapshot().c_kv.tobytes() == session.snapshot().c_kv.tobytes()


def test_graphs_give_their_memory_back(cuda_load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of outgrown buckets, and of closed sessions."""
    cupy, pools = import_cupy(), []
    pool_of, model = cupy.cuda.MemoryPool, cuda_load()

    def recorded() -> Any:
        pools.append(pool_of())
        return pools[-1]

    monkeypatch.setattr(cupy.cuda, "MemoryPool", recorded)
    session = model.open(max_len=290)
    session.prefill([i % 37 for i in range(240)])
    for step in range(3):
        session.verify(tree(9, step, session.root))
    (small_bucket,) = pools
    assert small_bucket.used_bytes() > 0

    session.prefill([1] * 20)  # 260 slots
    for step in range(3):
        session.verify(tree(9, step, session.root))
    assert 0 == small_bucket.used_bytes()
    assert pools[-1].used_bytes() > 0
    session.close()
    assert 0 == pools[-1].used_bytes()


def test_a_launch_that_the_driver_refuses_is_named() -> None:
    from kdtr.engine.cuda_kernels import CudaKernels

    kernels = CudaKernels("float32", graphs=True, guarded=False)
    out = kernels.upload(np.zeros((1, 1), np.float32))
    with (
        pytest.raises(
            LaunchError,
            match=r"launch of embed with grid \(0, 1, 1\), .* error 1, CUDA_ERROR_INVALID_VALUE",
        ),
        kernels.turn,
    ):
        kernels._launch("rows", "embed", (0, 1, 1), 256, out, out, out, 1, None)


def test_a_kernel_that_does_not_compile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """File, line and architecture, from the compiler itself."""
    import shutil

    copied = shutil.copytree(cuda_modules.KERNELS, tmp_path / "kernels")
    path = copied / "tree.cu"
    text = path.read_text()
    path.write_text(text + "\nint slip() { retrun 0; }\n")
    monkeypatch.setattr(cuda_modules, "KERNELS", copied)

    with pytest.raises(EngineError) as refusal:
        make_cuda_engine()

    capability = import_cupy().cuda.Device().compute_capability
    line = len(text.splitlines()) + 2
    told = str(refusal.value)
    assert told.startswith(
        f"kernels/tree.cu does not compile for sm_{capability} with dtype = 'float32':\n"
    )
    assert re.search(rf"\({line}\): error", told), told
