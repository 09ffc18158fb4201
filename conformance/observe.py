"""What an engine shows at one point of a case: traces and answers, copied and checked for form."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from kdtr.contract import (
    STAGE,
    TRACED,
    Acceptance,
    Array,
    DraftTree,
    EngineError,
    LogicalCache,
    Source,
    Verified,
)

Key = tuple[str, int | None]


class Observation:
    """Collects stages by (name, layer). It is itself the trace that a session is given.

    Form is checked here, values elsewhere. A fault of form in a trace is kept in `fault` and
    does not interrupt the engine; one in an answer is raised as EngineError.
    """

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers
        self.arrays: dict[Key, np.ndarray] = {}
        self.fault: EngineError | None = None

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        try:
            if stage not in TRACED:
                raise EngineError(
                    f"trace of {stage!r}; expected one of {', '.join(sorted(TRACED))}"
                )
            per_layer = STAGE[stage].source is Source.LAYER
            if layer not in (range(self._n_layers) if per_layer else (None,)):
                wanted = f"0..{self._n_layers - 1}" if per_layer else "None"
                raise EngineError(f"trace of {stage} at layer {layer!r}; expected {wanted}")
            self.arrays[stage, layer] = host_copy(f"trace of {stage}", array)
        except EngineError as error:
            self.fault = self.fault or error

    def put(self, stage: str, value: Any) -> None:
        """Keep an answer as a stage."""
        self.arrays[stage, None] = np.asarray(value)

    def put_build(self, tree: Any) -> None:
        if not isinstance(tree, DraftTree):
            raise EngineError(f"build() returned {_kind(tree)}; expected a DraftTree")
        self.put("build_parents", tree.parents)
        self.put("build_tokens", tree.tokens)

    def put_verified(self, verified: Any, n: int, vocab_size: int) -> None:
        if not isinstance(verified, Verified):
            raise EngineError(f"verify() returned {_kind(verified)}; expected a Verified")
        if verified.logits is not None:
            self.put_logits("verify()", verified.logits, n, vocab_size)
        targets = _integers("verify() targets", verified.targets)
        if len(targets) != n:
            raise EngineError(
                f"verify() returned {len(targets)} targets, the tree has {n} nodes; expected {n}"
            )
        self.put("targets", targets)

    def put_logits(self, verb: str, logits: Array, n: int, vocab_size: int) -> None:
        array = host_copy(f"{verb} logits", logits)
        if array.shape != (n, vocab_size):
            raise EngineError(
                f"{verb} returned logits {list(array.shape)}; expected [{n}, {vocab_size}]"
            )
        self.arrays["logits", None] = array

    def put_acceptance(self, verb: str, acceptance: Any) -> None:
        if not isinstance(acceptance, Acceptance):
            raise EngineError(f"{verb} returned {_kind(acceptance)}; expected an Acceptance")
        self.put("path", acceptance.path)
        self.put("bonus", acceptance.bonus)

    def put_emitted(self, emitted: Any) -> None:
        values = _integers("round() emitted", emitted)
        self.put("emitted", values if values else np.empty(0, np.int64))

    def put_token(self, stage: str, verb: str, token: Any) -> None:
        try:
            self.put(stage, _index(token))
        except TypeError:
            raise EngineError(f"{verb} returned {_kind(token)}; expected an integer") from None

    def put_cache(self, cache: Any) -> None:
        copy = host_cache(cache)
        for name in ("tokens", "positions", "c_kv", "k_pe"):
            self.put(f"cache_{name}", getattr(copy, name))

    def sort_experts(self) -> None:
        """An engine may choose experts in any order: both stages are put in ascending id."""
        for (name, layer), ids in list(self.arrays.items()):
            if name != "expert_ids" or ids.ndim != 2:
                continue
            order = np.argsort(ids, axis=1, kind="stable")
            self.arrays[name, layer] = np.take_along_axis(ids, order, axis=1)
            weights = self.arrays.get(("expert_weights", layer))
            if weights is not None and weights.shape == ids.shape:
                self.arrays["expert_weights", layer] = np.take_along_axis(weights, order, axis=1)


def host_cache(cache: Any) -> LogicalCache:
    """A copy of a snapshot: one that still points into the engine would change with it."""
    if not isinstance(cache, LogicalCache):
        raise EngineError(f"snapshot() returned {_kind(cache)}; expected a LogicalCache")
    names = ("tokens", "positions", "c_kv", "k_pe")
    return LogicalCache(*(host_copy(f"snapshot() {n}", getattr(cache, n)) for n in names))


def unchanged_rows(before: LogicalCache, after: LogicalCache) -> np.ndarray:
    """Per committed slot, whether every bit of its row is as it was (SLOT-2): [t] bool."""
    for name in ("tokens", "positions", "c_kv", "k_pe"):
        old, new = getattr(before, name), getattr(after, name)
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise EngineError(
                f"snapshot() {name} was {old.dtype} {list(old.shape)} before verify() and is "
                f"{new.dtype} {list(new.shape)} after it; expected the same rows"
            )
    if before.tokens.ndim != 1 or before.c_kv.ndim != 3 or before.k_pe.ndim != 3:
        raise EngineError("snapshot() has the wrong axes; expected [t], [t], [l, t, c], [l, t, r]")
    same = np.equal(before.tokens, after.tokens) & np.equal(before.positions, after.positions)
    for old, new in ((before.c_kv, after.c_kv), (before.k_pe, after.k_pe)):
        old, new = np.ascontiguousarray(old), np.ascontiguousarray(new)
        rows = np.equal(old.view(np.uint8), new.view(np.uint8))  # bits: NaN equals itself
        same &= rows.all(axis=(0, 2)) if rows.size else True
    return np.asarray(same)


def host_copy(what: str, array: Array) -> np.ndarray:
    """A copy in host memory, of a kind that can be compared."""
    try:
        copy = np.array(array if hasattr(array, "__array__") else np.from_dlpack(array))
    except Exception as error:
        raise EngineError(f"{what} is {_kind(array)}, which is no array: {error}") from error
    if copy.dtype.kind not in "biuf" and copy.dtype.name not in ("bfloat16", "float8_e4m3fn"):
        raise EngineError(f"{what} is {copy.dtype}; expected numbers")
    return copy


def _integers(what: str, values: Sequence[Any]) -> tuple[int, ...]:
    try:
        return tuple(_index(value) for value in values)
    except TypeError:
        raise EngineError(f"{what} are {values!r}; expected integers") from None


def _index(value: Any) -> int:
    """A token, a length, a target; Python would take a bool for one, the judge does not."""
    if isinstance(value, bool):
        raise TypeError
    return index(value)


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
