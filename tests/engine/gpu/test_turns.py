"""Sessions, models, engines and threads that share a device do not meet in what they compute.

They share the counters of a stream and the set of shapes that have run; each is compared with
itself alone, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cuda_models import WIDE
from test_replays import opened, tree

from kdtr.contract import ModelConfig
from kdtr.engine import make_cuda_engine
from kdtr.engine.session import TreeSession

Weights = Callable[[ModelConfig], dict[str, np.ndarray]]
SIZES = (33, 9, 33, 1, 40, 9, 33, 9)  # what counts arrivals: n > 24 in projections, every router


def history(sessions: Sequence[TreeSession]) -> list[list[Any]]:
    """Rounds by turns; of each session all rounds, and its cache in the end."""
    seen: list[list[Any]] = [[] for _ in sessions]
    for step, n in enumerate(SIZES):
        for session, rounds in zip(sessions, seen, strict=True):
            rounds.append(session.round(tree(n, step, session.root)))
    for session, rounds in zip(sessions, seen, strict=True):
        rounds.append(session.snapshot().c_kv.tobytes())
    return seen


def test_sessions_of_a_model(weights_of: Weights) -> None:
    model = make_cuda_engine(dtype="bfloat16").load((WIDE, weights_of(WIDE)))
    (alone_9,), (alone_4,) = (history([opened(model, root)]) for root in (9, 4))

    assert [alone_9, alone_4] == history([opened(model, root) for root in (9, 4)])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_models_of_an_engine(weights_of: Weights, small: ModelConfig, dtype: str) -> None:
    """Shapes that the first has run are new to the second, whose kernels are others."""
    sources = [(config, weights_of(config)) for config in (WIDE, small)]
    alone = [history([opened(make_cuda_engine(dtype=dtype).load(source))])[0] for source in sources]
    engine = make_cuda_engine(dtype=dtype)

    assert alone == history([opened(engine.load(source)) for source in sources])


def test_engines(weights_of: Weights) -> None:
    """A stream each."""
    source = (WIDE, weights_of(WIDE))
    models = [make_cuda_engine(dtype="bfloat16").load(source) for _ in range(2)]
    (alone,) = history([opened(models[0])])

    assert [alone, alone] == history([opened(model) for model in models])


def test_an_engine_after_others_are_gone(weights_of: Weights) -> None:
    """A stream's address comes again, and with it the counters that are kept by it."""
    source = (WIDE, weights_of(WIDE))
    histories = [
        history([opened(make_cuda_engine(dtype="bfloat16").load(source))]) for _ in range(6)
    ]

    assert all(histories[0] == other for other in histories)


@pytest.mark.parametrize("graphs", [True, False])
def test_threads(weights_of: Weights, graphs: bool) -> None:
    """Of an engine: one captures while the others would launch."""
    model = make_cuda_engine(dtype="bfloat16", graphs=graphs).load((WIDE, weights_of(WIDE)))
    (alone,) = history([opened(model)])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: history([opened(model)])[0], range(8)))

    assert [alone] * 8 == found


@pytest.mark.parametrize("verb", ["prefill", "round"])
def test_a_session_that_another_thread_opened(weights_of: Weights, verb: str) -> None:
    """What the new thread does first is a launch, to which no device is bound yet."""
    model = make_cuda_engine(dtype="bfloat16", page_size=32).load((WIDE, weights_of(WIDE)))

    def answer(session: TreeSession) -> Any:
        if verb == "prefill":
            return session.prefill(list(range(30)))
        return session.round(tree(33, 0, session.root))

    def session() -> TreeSession:
        made = model.open(max_len=200)
        made.prefill(list(range(31)))  # one page: the next verb maps another
        return made

    here, elsewhere = answer(session()), session()
    with ThreadPoolExecutor(1) as pool:
        assert here == pool.submit(answer, elsewhere).result()


def test_a_stream_that_the_caller_has_made_current(weights_of: Weights) -> None:
    cupy = pytest.importorskip("cupy")
    model = make_cuda_engine(dtype="bfloat16").load((WIDE, weights_of(WIDE)))
    (alone,) = history([opened(model)])
    own = cupy.cuda.Stream(non_blocking=True)
    with own:
        assert [alone] == history([opened(model)])
        assert own.ptr == cupy.cuda.get_current_stream().ptr
