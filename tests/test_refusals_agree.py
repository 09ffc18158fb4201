"""The reference and the host engine refuse the same calls, with the same class, changing nothing.

A pending verify survives every refusal: afterwards it is committed.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import (
    MAX_POSITION,
    Acceptance,
    CacheError,
    CheckpointError,
    DraftTree,
    EmitLimit,
    InputError,
    KdtrError,
    ModelConfig,
    SessionError,
    TreeError,
)

CONFIG = ModelConfig.tiny().replace(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    intermediate_size=32,
    moe_intermediate_size=16,
    max_position_embeddings=10**18,
)
WEIGHTS = seed_tensors(CONFIG, seed=3)
ENGINES = ("reference", "host")
PROMPT, ROOT, MAX_LEN = [1, 2, 3], 20, 16
L = len(PROMPT)
TREE = DraftTree(tokens=(ROOT, 1, 5), parents=(-1, 0, 0))
OTHER = DraftTree(tokens=(ROOT, 7), parents=(-1, 0))
FOREIGN = DraftTree(tokens=(ROOT, 2**70), parents=(-1, 0))
NOT_ROOTED = DraftTree(tokens=(4,), parents=(-1,))
WIDE = DraftTree(tokens=(ROOT, *range(14)), parents=(-1, *[0] * 14))
DRAFT = np.zeros((2, 48))
SEES = np.ones((1, L + 1), bool)
LIMIT: Any = 5  # no EmitLimit
BAD_TREE: Any = ((ROOT,), (-1,))


class Dlpack:
    """An array without __array__, whose export fails."""

    def __dlpack__(self, **_: object) -> object:
        raise BufferError("no export")


class NoArray:
    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise TypeError("no array")


Call = Callable[[Any], object]
CALLS: dict[str, tuple[type[KdtrError], Call]] = {
    # A bool is no integer, a float is none, and 0-d, 2-d and text are no tokens
    "set_root bool": (InputError, lambda s: s.set_root(True)),
    "set_root np.bool_": (InputError, lambda s: s.set_root(np.True_)),
    "set_root bool array": (InputError, lambda s: s.set_root(np.array(True))),
    "set_root float": (InputError, lambda s: s.set_root(3.0)),
    "set_root text": (InputError, lambda s: s.set_root("3")),
    "set_root None": (InputError, lambda s: s.set_root(None)),
    "set_root array [1]": (InputError, lambda s: s.set_root(np.array([3]))),
    "set_root negative": (InputError, lambda s: s.set_root(-1)),
    "set_root vocab_size": (InputError, lambda s: s.set_root(48)),
    "set_root 2**70": (InputError, lambda s: s.set_root(2**70)),
    "set_root 5000 digits": (InputError, lambda s: s.set_root(10**5000)),
    "prefill 5000 digits": (InputError, lambda s: s.prefill([1, -(10**5000)])),
    "build 5000 digits": (InputError, lambda s: s.build(DRAFT, 10**5000)),
    "accept target 5000 digits": (InputError, lambda s: s.accept(TREE, [1, 2, 10**5000])),
    "forward 5000 digits": (
        InputError,
        lambda s: s.forward_tokens([10**5000], np.array([L]), np.ones((1, L + 1), bool)),
    ),
    "prefill empty": (InputError, lambda s: s.prefill([])),
    "prefill empty array": (InputError, lambda s: s.prefill(np.zeros(0, int))),
    "prefill int": (InputError, lambda s: s.prefill(3)),
    "prefill None": (InputError, lambda s: s.prefill(None)),
    "prefill 0-d": (InputError, lambda s: s.prefill(np.array(3))),
    "prefill 2-d": (InputError, lambda s: s.prefill(np.array([[1, 2]]))),
    "prefill nested": (InputError, lambda s: s.prefill([[1], [2]])),
    "prefill str": (InputError, lambda s: s.prefill("12")),
    "prefill bytes": (InputError, lambda s: s.prefill(b"\1\2")),
    "prefill bytearray": (InputError, lambda s: s.prefill(bytearray(b"\1\2"))),
    "prefill memoryview": (InputError, lambda s: s.prefill(memoryview(b"\1\2"))),
    "prefill set": (InputError, lambda s: s.prefill({1, 2})),
    "prefill dict": (InputError, lambda s: s.prefill({1: 2})),
    "prefill dict keys": (InputError, lambda s: s.prefill({1: 2}.keys())),
    "prefill generator": (InputError, lambda s: s.prefill(t for t in (1, 2))),
    "prefill iterator": (InputError, lambda s: s.prefill(iter([1, 2]))),
    "prefill bool": (InputError, lambda s: s.prefill([1, True])),
    "prefill np.bool_": (InputError, lambda s: s.prefill([1, np.True_])),
    "prefill bools": (InputError, lambda s: s.prefill(np.array([True, False]))),
    "prefill floats": (InputError, lambda s: s.prefill(np.array([1.0, 2.0]))),
    "prefill mixed": (InputError, lambda s: s.prefill([1, 2.0])),
    "prefill objects": (InputError, lambda s: s.prefill(np.array([1, 2], object))),
    "prefill None inside": (InputError, lambda s: s.prefill([1, None])),
    "prefill 2**70": (InputError, lambda s: s.prefill([2**70])),
    "prefill negative": (InputError, lambda s: s.prefill([1, -1])),
    "prefill dlpack": (InputError, lambda s: s.prefill(Dlpack())),
    "prefill no array": (InputError, lambda s: s.prefill(NoArray())),
    "prefill too long": (CacheError, lambda s: s.prefill([1] * (MAX_LEN - L + 1))),
    "prefill range too long": (CacheError, lambda s: s.prefill(range(48))),
    "prefill huge": (CacheError, lambda s: s.prefill(np.zeros(10**6, int))),
    "prefill trace": (InputError, lambda s: s.prefill([1], trace=None)),
    "decode trace": (InputError, lambda s: s.decode(trace=5)),
    # forward_tokens: tokens, positions, mask, then room
    "forward tokens first": (InputError, lambda s: s.forward_tokens([], [-1], 5)),
    "forward float position": (InputError, lambda s: s.forward_tokens([1], [3.0], SEES)),
    "forward bool position": (
        InputError,
        lambda s: s.forward_tokens([1], np.array([True]), SEES),
    ),
    "forward positions 2": (InputError, lambda s: s.forward_tokens([1], [3, 4], SEES)),
    "forward position -1": (InputError, lambda s: s.forward_tokens([1], [-1], SEES)),
    "forward position max": (
        InputError,
        lambda s: s.forward_tokens([1], [MAX_POSITION + 1], SEES),
    ),
    "forward positions dlpack": (InputError, lambda s: s.forward_tokens([1], Dlpack(), SEES)),
    "forward positions ragged": (InputError, lambda s: s.forward_tokens([1], [[1], 2], SEES)),
    "forward integer mask": (
        InputError,
        lambda s: s.forward_tokens([1], [3], np.ones((1, L + 1), int)),
    ),
    "forward mask shape": (
        InputError,
        lambda s: s.forward_tokens([1], [3], np.ones((1, L), bool)),
    ),
    "forward blind": (InputError, lambda s: s.forward_tokens([1], [3], ~SEES)),
    "forward mask None": (InputError, lambda s: s.forward_tokens([1], [3], None)),
    "forward mask no array": (InputError, lambda s: s.forward_tokens([1], [3], NoArray())),
    "forward no room": (
        CacheError,
        lambda s: s.forward_tokens([1] * 14, range(14), np.ones((14, L + 14), bool)),
    ),
    # build: logits, budget, then room
    "build bool budget": (InputError, lambda s: s.build(DRAFT, True)),
    "build np.bool_ budget": (InputError, lambda s: s.build(DRAFT, np.True_)),
    "build float budget": (InputError, lambda s: s.build(DRAFT, 2.0)),
    "build negative": (InputError, lambda s: s.build(DRAFT, -1)),
    "build None": (InputError, lambda s: s.build(DRAFT, None)),
    "build integers": (InputError, lambda s: s.build(DRAFT.astype(int), 2)),
    "build bools": (InputError, lambda s: s.build(DRAFT.astype(bool), 2)),
    "build complex": (InputError, lambda s: s.build(DRAFT.astype(complex), 2)),
    "build objects": (InputError, lambda s: s.build(DRAFT.astype(object), 2)),
    "build ragged": (InputError, lambda s: s.build([[1.0], [1.0, 2.0]], 2)),
    "build nothing": (InputError, lambda s: s.build([], 2)),
    "build 1-d": (InputError, lambda s: s.build(np.zeros(48), 2)),
    "build width": (InputError, lambda s: s.build(np.zeros((2, 47)), 2)),
    "build NaN": (InputError, lambda s: s.build(np.full((1, 48), np.nan), 2)),
    "build inf": (InputError, lambda s: s.build(np.full((1, 48), np.inf), 2)),
    "build longdouble": (
        InputError,
        lambda s: s.build(np.full((1, 48), np.longdouble("1e400")), 2),
    ),
    "build other float": (
        InputError,
        lambda s: s.build(DRAFT.astype(ml_dtypes.float8_e4m3b11fnuz), 2),
    ),
    "build dlpack": (InputError, lambda s: s.build(Dlpack(), 2)),
    "build logits before room": (InputError, lambda s: s.build(np.zeros(48), 10**6)),
    "build one too many": (CacheError, lambda s: s.build(DRAFT, MAX_LEN - L)),
    "build 10**6": (CacheError, lambda s: s.build(DRAFT, 10**6)),
    "build 2**70": (CacheError, lambda s: s.build(DRAFT, 2**70)),
    # verify and round: trace, tree, limit, then room
    "verify no tree": (TreeError, lambda s: s.verify(BAD_TREE)),
    "verify foreign": (TreeError, lambda s: s.verify(FOREIGN)),
    "verify not rooted": (TreeError, lambda s: s.verify(NOT_ROOTED)),
    "verify no room": (CacheError, lambda s: s.verify(WIDE)),
    "verify trace": (InputError, lambda s: s.verify(TREE, trace=None)),
    "round no tree": (TreeError, lambda s: s.round(None)),
    "round no limit": (InputError, lambda s: s.round(OTHER, limit=LIMIT)),
    "round limit None": (InputError, lambda s: s.round(OTHER, limit=None)),
    "round tree before limit": (TreeError, lambda s: s.round(NOT_ROOTED, limit=LIMIT)),
    "round limit before room": (InputError, lambda s: s.round(WIDE, limit=LIMIT)),
    "round no room": (CacheError, lambda s: s.round(WIDE)),
    "round trace": (InputError, lambda s: s.round(OTHER, trace="x")),
    "accept no tree": (TreeError, lambda s: s.accept(BAD_TREE)),
    "accept foreign": (TreeError, lambda s: s.accept(FOREIGN, [1, 2])),
    "accept another": (SessionError, lambda s: s.accept(OTHER)),
    "accept no limit": (InputError, lambda s: s.accept(TREE, limit=LIMIT)),
    "accept 2 targets": (InputError, lambda s: s.accept(TREE, [1, 2])),
    "accept bool target": (InputError, lambda s: s.accept(TREE, [1, 2, True])),
    "accept target 2**70": (InputError, lambda s: s.accept(TREE, [1, 2, 2**70])),
    "accept generator": (InputError, lambda s: s.accept(TREE, (t for t in (1, 2, 3)))),
    "accept set": (InputError, lambda s: s.accept(TREE, {1, 2, 3})),
    "commit nothing": (InputError, lambda s: s.commit(None)),
    "commit past the end": (InputError, lambda s: s.commit(Acceptance((0, 3), 1))),
    "commit no path": (InputError, lambda s: s.commit(Acceptance((0, 1, 2), 1))),
    "commit foreign bonus": (InputError, lambda s: s.commit(Acceptance((0, 1), 48))),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: load_engine(name).load((CONFIG, WEIGHTS)) for name in ENGINES}


def pending(model: Any) -> Any:
    """A session with a pending verify."""
    session = model.open(max_len=MAX_LEN)
    session.prefill(PROMPT)
    session.set_root(ROOT)
    session.verify(TREE)
    return session


def state(session: Any) -> tuple[object, ...]:
    rows = session.snapshot()
    arrays = (rows.tokens, rows.positions, rows.c_kv, rows.k_pe)
    return session.committed_len, session.root, *(array.tobytes() for array in arrays)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CALLS)
def test_a_hostile_call_is_refused_and_changes_nothing(
    models: dict[str, Any], engine: str, name: str
) -> None:
    error, call = CALLS[name]
    session = pending(models[engine])
    before = state(session)

    with pytest.raises(KdtrError) as refusal:
        call(session)

    assert error is type(refusal.value)
    assert before == state(session)
    session.commit(Acceptance((0, 2), 9))
    assert [*PROMPT, ROOT, 5] == session.snapshot().tokens.tolist()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "tokens",
    [(4, 5), deque([4, 5]), range(4, 6), np.array([4, 5], np.uint8), [np.int64(4), np.array(5)]],
    ids=["tuple", "deque", "range", "uint8", "scalars"],
)
def test_sequences_and_arrays_of_integers_are_tokens(
    models: dict[str, Any], engine: str, tokens: Any
) -> None:
    session = models[engine].open(max_len=MAX_LEN)

    session.prefill(tokens)

    assert [4, 5] == session.snapshot().tokens.tolist()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("max_len", "error"),
    [
        *[(value, InputError) for value in (True, np.True_, 8.0, "8", None, 0, -1, 10**30)],
        pytest.param(10**5000, InputError, id="5000 digits"),
        (np.array([8]), InputError),
        (10**9 * 10**4, CacheError),
        (10**18, CacheError),
    ],
)
def test_an_impossible_max_len_is_refused(
    models: dict[str, Any], engine: str, max_len: Any, error: type[KdtrError]
) -> None:
    with pytest.raises(error, match="max_len = "):
        models[engine].open(max_len=max_len)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_max_len_without_memory_says_what_it_needs(models: dict[str, Any], engine: str) -> None:
    n_bytes = {"host": 10**18 * 2 * 20 * 4, "reference": 10**18 * (2 * 20 + 2) * 8}[engine]

    with pytest.raises(CacheError) as refusal:
        models[engine].open(max_len=10**18)

    assert (
        f"max_len = {10**18} needs {n_bytes} bytes of cache, more than there are; "
        "open it with a smaller max_len"
    ) == str(refusal.value)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("max_len", [np.int64(8), np.array(8)])
def test_integers_of_numpy_are_integers(models: dict[str, Any], engine: str, max_len: Any) -> None:
    session = models[engine].open(max_len=max_len)
    session.prefill([1] * 8)

    with pytest.raises(CacheError, match="9 slots"):
        session.prefill([1])


VERBS: dict[str, Call] = {
    "set_root": lambda s: s.set_root(1),
    "forward_tokens": lambda s: s.forward_tokens([1], [0], SEES),
    "prefill": lambda s: s.prefill([1]),
    "decode": lambda s: s.decode(),
    "build": lambda s: s.build(DRAFT, 1),
    "verify": lambda s: s.verify(TREE),
    "accept": lambda s: s.accept(TREE),
    "commit": lambda s: s.commit(Acceptance((0,), 1)),
    "round": lambda s: s.round(TREE),
    "snapshot": lambda s: s.snapshot(),
    "reset": lambda s: s.reset(),
}


@pytest.mark.parametrize("engine", ENGINES)
def test_after_the_model_is_closed_nothing_is_open(engine: str) -> None:
    model = load_engine(engine).load((CONFIG, WEIGHTS))
    session = pending(model)

    model.close()

    with pytest.raises(SessionError):
        model.open(max_len=4)
    for verb in VERBS.values():
        with pytest.raises(SessionError):
            verb(session)
    session.close()
    model.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("verb", [*VERBS, "close"])
def test_a_verb_from_a_trace_is_refused(models: dict[str, Any], engine: str, verb: str) -> None:
    session = pending(models[engine])
    call = VERBS.get(verb, lambda s: s.close())

    def reenter(stage: str, layer: int | None, array: object) -> None:
        if stage == "hidden":
            call(session)

    with pytest.raises(SessionError, match=f"^{verb} called from a trace"):
        session.round(TREE, trace=reenter)

    assert (L, ROOT) == (session.committed_len, session.root)
    session.round(TREE)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "stage", ["parents", "tokens", "hidden", "logits", "targets", "path", "bonus", "moves"]
)
def test_a_round_whose_trace_raises_commits_nothing(
    models: dict[str, Any], engine: str, stage: str
) -> None:
    session = pending(models[engine])
    before = state(session)

    def fail(name: str, layer: int | None, array: object) -> None:
        if name == stage:
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        session.round(TREE, trace=fail)

    assert before == state(session)
    with pytest.raises(SessionError):
        session.commit(Acceptance((0,), 1))
    unhurt = pending(models[engine])
    assert unhurt.round(TREE) == session.round(TREE)
    assert state(unhurt) == state(session)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_trace_that_writes_changes_nothing(models: dict[str, Any], engine: str) -> None:
    refused = []

    def write(stage: str, layer: int | None, array: Any) -> None:
        try:
            np.asarray(array)[...] = 0
        except ValueError:
            refused.append(stage)

    traced, silent = pending(models[engine]), pending(models[engine])

    assert silent.round(TREE) == traced.round(TREE, trace=write)
    assert state(silent) == state(traced)
    assert {"tokens", "hidden", "logits", "moves"} <= set(refused)


NORM = "model.norm.weight"
TENSORS: dict[str, tuple[str, Any]] = {
    "NaN": (NORM, np.r_[np.ones(31), np.nan]),
    "inf": (NORM, np.r_[np.ones(31), np.inf].astype(np.float32)),
    "longdouble": (NORM, np.ones(32, np.longdouble)),
    "integers": (NORM, np.ones(32, int)),
    "bools": (NORM, np.ones(32, bool)),
    "complex": (NORM, np.ones(32, complex)),
    "objects": (NORM, np.ones(32, object)),
    "float8": (NORM, np.ones(32, ml_dtypes.float8_e4m3fn)),
    "ragged": (NORM, [[1.0], [1.0, 2.0]]),
    "none": (NORM, None),
    "no name": (5, np.ones(1)),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", TENSORS)
def test_a_hostile_tensor_is_refused_by_name(engine: str, name: str) -> None:
    key, tensor = TENSORS[name]

    with pytest.raises(CheckpointError, match=str(key)):
        load_engine(engine).load((CONFIG, {**WEIGHTS, key: tensor}))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_layer_count_that_no_source_holds_is_refused_at_once(engine: str) -> None:
    with pytest.raises(CheckpointError, match=r"asks for at least .* the source holds"):
        load_engine(engine).load((CONFIG.replace(num_hidden_layers=10**9), WEIGHTS))


def test_a_stop_token_outside_the_vocabulary_stops_nothing(models: dict[str, Any]) -> None:
    rounds = [
        pending(model).round(TREE, limit=EmitLimit(frozenset([2**70]))) for model in models.values()
    ]

    assert [TREE, TREE] == [done.tree for done in rounds]
