"""What an engine shows at one point of a case: traces and answers, copied and checked for form."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import ml_dtypes
import numpy as np

from kdtr.conformance.engine_call import EngineCall
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

_CACHE = {"tokens": "t", "positions": "t", "c_kv": "ltc", "k_pe": "ltr"}  # and its axes


class AnswerError(EngineError):
    """An answer for other rows than were asked for, which says what rule that breaks."""

    rules: tuple[str, ...] = ()

    @classmethod
    def of_rows(cls, text: str, given: int, wanted: int) -> AnswerError:
        """PAD-1 where there are rows too many: nobody but the engine can have added them."""
        error = cls(text)
        error.rules = ("PAD-1",) if given > wanted else ()
        return error


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
            if (stage, layer) in self.arrays:
                at = "" if layer is None else f" of layer {layer}"
                raise EngineError(f"{stage}{at} was traced twice; expected once per forward")
            self.arrays[stage, layer] = host_copy(f"trace of {stage}", array)
        except EngineError as error:
            self.fault = self.fault or error

    def put(self, stage: str, value: Any) -> None:
        """Keep an answer as a stage; one that was traced too must be the same."""
        answer = np.asarray(value)
        traced = self.arrays.get((stage, None))
        if traced is not None and not _same_values(traced, answer):
            text = f"the traced {stage} and the returned one differ; expected one answer"
            self.fault = self.fault or EngineError(text)
        self.arrays[stage, None] = answer

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
            text = f"verify() returned {len(targets)} targets, the tree has {n} nodes; expected {n}"
            raise AnswerError.of_rows(text, len(targets), n)
        self.put("targets", targets)

    def put_logits(self, verb: str, logits: Array, n: int, vocab_size: int) -> None:
        array = host_copy(f"{verb} logits", logits)
        if array.shape != (n, vocab_size):
            text = f"{verb} returned logits {list(array.shape)}; expected [{n}, {vocab_size}]"
            raise AnswerError.of_rows(text, array.shape[0] if array.ndim else 0, n)
        self.put("logits", array)

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
            self.put(stage, np.int64(_index(token)))
        except (TypeError, OverflowError):
            text = f"{verb} returned {_kind(token)}; expected an integer of 64 bits"
            raise EngineError(text) from None

    def put_cache(self, cache: LogicalCache) -> None:
        for name in _CACHE:
            self.put(f"cache_{name}", getattr(cache, name))

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
    copies = {name: host_copy(f"snapshot() {name}", getattr(cache, name)) for name in _CACHE}
    for name, axes in _CACHE.items():
        if copies[name].ndim != len(axes):
            raise EngineError(
                f"snapshot() {name} is {list(copies[name].shape)}; expected [{', '.join(axes)}]"
            )
    return LogicalCache(**copies)


def unchanged_rows(before: LogicalCache, after: LogicalCache) -> np.ndarray:
    """Per row of `before` [t], whether `after` still has every bit of it (SLOT-2): [t] bool."""
    t = len(before.tokens)
    same = np.ones(t, dtype=bool)
    for name, axes in _CACHE.items():
        rows = (slice(None), slice(t)) if axes.startswith("lt") else slice(t)
        old, new = getattr(before, name), getattr(after, name)[rows]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise EngineError(
                f"snapshot() {name} was {old.dtype} {list(old.shape)} and is now {new.dtype} "
                f"{list(new.shape)}; expected the same rows, and others after them"
            )
        equal = _same_bits(old, new)
        same &= equal.all(axis=(0, 2)) if equal.ndim == 3 else equal
    return same


def copied_rows(
    seen: Observation, path: Sequence[int], cache: LogicalCache, committed_len: int, dtype: str
) -> np.ndarray | None:
    """Per row of `path` [a], whether the cache holds the bits that the forward showed (COMMIT-1).

    dtype  in which the engine stores latents: what it showed is rounded to it first
    None where the engine does not show c_kv and k_pe of every layer, or not this many rows.
    """
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    same = np.ones(len(path), dtype=bool)
    for name in ("c_kv", "k_pe"):
        for layer, rows in enumerate(getattr(cache, name)):
            shown = seen.arrays.get((name, layer))
            kept = rows[committed_len : committed_len + len(path)]
            if shown is None or shown.shape[1:] != kept.shape[1:] or max(path) >= len(shown):
                return None
            if len(kept) != len(path):
                return None
            with np.errstate(over="ignore"):  # inf where it does not fit: then both sides have it
                equal = _same_bits(shown[list(path)].astype(stored), kept.astype(stored))
            same &= equal.all(axis=1)
    return same


def _same_values(x: np.ndarray, y: np.ndarray) -> bool:
    if x.shape != y.shape:
        return False
    both_nan = (x != x) & (y != y)
    return bool(((x == y) | both_nan).all())


def _same_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Element by element; NaN equals itself, and 0 is not -0."""
    if not x.size:
        return np.ones(x.shape, dtype=bool)
    size = x.dtype.itemsize
    x, y = (np.ascontiguousarray(z).view(np.uint8).reshape(*z.shape, size) for z in (x, y))
    return np.asarray((x == y).all(axis=-1))


def host_copy(what: str, array: Array) -> np.ndarray:
    """A copy in host memory, of a kind that can be compared."""
    try:
        with EngineCall(what):  # its copy may wait for a device
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
