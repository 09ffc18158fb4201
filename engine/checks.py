"""Every check of a verb's input: each returns the value in the engine's own form, or refuses.

Nothing here changes anything: a session runs all checks of a verb before its first write.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np

from kdtr.contract import (
    MAX_POSITION,
    Acceptance,
    Array,
    DraftTree,
    EmitLimit,
    InputError,
    KdtrError,
    Trace,
    TreeError,
    check_bits,
)

_TEXT = (str, bytes, bytearray, memoryview)  # sequences, but of characters
_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # beside NumPy's own


def trace_function(trace: Trace) -> Trace:
    if not callable(trace):
        raise InputError(f"trace is {type(trace).__name__}; expected a function, or SILENT")
    return trace


def integer(what: str, value: object, error: type[KdtrError] = InputError) -> int:
    """The value as a Python int; a bool is a mistake, not a number."""
    if not isinstance(value, bool | np.bool_):
        try:
            found = index(value)  # type: ignore[arg-type]  # the TypeError is the check
        except TypeError:
            pass
        else:
            return check_bits(what, found, error)
    raise error(f"{what} = {value!r}; expected an integer")


def token_id(what: str, value: object, vocab_size: int) -> int:
    """An id of the vocabulary."""
    token = integer(what, value)
    if not 0 <= token < vocab_size:
        raise InputError(f"{what} = {token}; expected a token id in 0..{vocab_size - 1}")
    return token


def token_ids(what: str, values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """At least one id of the vocabulary, from a sequence or from an array [n] of integers."""
    items: Sequence[object]
    if _is_array(values):
        host = _host_array(what, values)
        if host.ndim != 1:
            raise InputError(f"{what} = {values!r}; expected a sequence of token ids")
        if host.dtype.kind not in "iu":
            raise InputError(f"{what} have dtype {host.dtype}; expected integers")
        items = host.tolist()
    elif isinstance(values, Sequence) and not isinstance(values, _TEXT):
        items = values
    else:
        raise InputError(f"{what} = {values!r}; expected a sequence of token ids")
    ids = tuple(token_id(f"{what}[{i}]", value, vocab_size) for i, value in enumerate(items))
    if not ids:
        raise InputError(f"{what} is empty; expected at least one token")
    return ids


def fitting_tree(tree: DraftTree, vocab_size: int) -> DraftTree:
    """A tree whose tokens are in the vocabulary (the rest it checked at birth)."""
    if not isinstance(tree, DraftTree):
        raise TreeError(f"tree is {type(tree).__name__}; expected a DraftTree")
    for i, token in enumerate(tree.tokens):
        if token >= vocab_size:
            raise TreeError(f"tokens[{i}] = {token}; expected a token id in 0..{vocab_size - 1}")
    return tree


def rooted_tree(tree: DraftTree, root: int, vocab_size: int) -> DraftTree:
    """A tree under the session's root (FWD-3)."""
    fitting_tree(tree, vocab_size)
    if tree.tokens[0] != root:
        raise TreeError(
            f"tokens[0] = {tree.tokens[0]}, but the session's root is {root}; expected a tree "
            f"under {root}, or set_root({tree.tokens[0]}) first"
        )
    return tree


def emit_limit(limit: EmitLimit) -> EmitLimit:
    if not isinstance(limit, EmitLimit):
        raise InputError(f"limit is {type(limit).__name__}; expected an EmitLimit")
    return limit


def target_ids(targets: Sequence[int], n: int, vocab_size: int) -> tuple[int, ...]:
    """One target per node."""
    ids = token_ids("targets", targets, vocab_size)
    if len(ids) != n:
        raise InputError(f"{len(ids)} targets for a tree of {n} nodes; expected one per node")
    return ids


def row_positions(positions: Array, n: int) -> np.ndarray:
    """positions [n] integers, as an int64 copy."""
    host = _host_array("positions", positions)
    if host.dtype.kind not in "iu":
        raise InputError(f"positions have dtype {host.dtype}; expected integers")
    if host.shape != (n,):
        raise InputError(f"positions have shape {list(host.shape)}; expected [{n}], one per token")
    for i, position in enumerate(host.tolist()):
        if not 0 <= position < MAX_POSITION + 1:
            raise InputError(
                f"positions[{i}] = {position}; expected 0 <= position < {MAX_POSITION + 1}"
            )
    return host.astype(np.int64)


def row_mask(mask: Array, n: int, committed_len: int) -> np.ndarray:
    """mask [n, L + n] bool, true where visible, every row seeing itself (MASK-1), as a copy."""
    host = _host_array("mask", mask)
    if host.dtype != np.bool_:
        raise InputError(f"mask has dtype {host.dtype}; expected bool, true where visible")
    shape = (n, committed_len + n)
    if host.shape != shape:
        raise InputError(
            f"mask has shape {list(host.shape)}; expected {list(shape)}: {n} rows over "
            f"{committed_len} committed tokens and themselves"
        )
    blind = np.flatnonzero(~host[np.arange(n), committed_len + np.arange(n)])
    if len(blind):
        i = int(blind[0])
        raise InputError(
            f"mask[{i}, {committed_len + i}] is false, but every row sees itself (MASK-1); "
            "expected true"
        )
    return host.copy()


def draft_logits(logits: Array, vocab_size: int) -> np.ndarray:
    """draft_logits [depth, w], as float64 without NaN and +inf (TREE-3)."""
    host = _host_array("draft_logits", logits)
    if host.dtype.kind != "f" and host.dtype.name not in _FLOATS:
        raise InputError(f"draft_logits have dtype {host.dtype}; expected floating point")
    if host.ndim != 2 or host.shape[1] != vocab_size:
        raise InputError(
            f"draft_logits have shape {list(host.shape)}; expected [depth, {vocab_size}]"
        )
    with np.errstate(over="ignore"):  # a longdouble past float64 is refused as inf below
        logits64 = host.astype(np.float64)
    refused = np.argwhere(np.isnan(logits64) | np.isposinf(logits64))
    if len(refused):
        depth, token = refused[0].tolist()
        raise InputError(
            f"draft_logits[{depth}, {token}] = {logits64[depth, token]}; "
            "expected a finite number, or -inf for a token that is never taken"
        )
    return logits64


def node_budget(budget: int) -> int:
    value = integer("budget", budget)
    if value < 0:
        raise InputError(f"budget = {value}; expected at least 0")
    return value


def committable(
    acceptance: Acceptance, n: int, parents: Sequence[int] | None, vocab_size: int
) -> Acceptance:
    """An acceptance of n pending rows: a root-to-node path of a tree, any rising path without one.

    parents  of the verified tree; None after forward_tokens, whose rows have no parents
    """
    if not isinstance(acceptance, Acceptance):
        raise InputError(f"acceptance is {type(acceptance).__name__}; expected an Acceptance")
    path = acceptance.path
    if path[-1] >= n:  # the largest: a path increases
        raise InputError(
            f"path[{len(path) - 1}] = {path[-1]}, but {n} rows are pending; "
            f"expected node ids in 0..{n - 1}"
        )
    if parents is not None:
        for k in range(1, len(path)):
            if parents[path[k]] != path[k - 1]:
                raise InputError(
                    f"path[{k}] = {path[k]} is a child of node {parents[path[k]]}, not of "
                    f"path[{k - 1}] = {path[k - 1]}; expected a path of the verified tree"
                )
    token_id("bonus", acceptance.bonus, vocab_size)
    return acceptance


def _is_array(value: object) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__dlpack__")


def _host_array(what: str, value: Array) -> np.ndarray:
    """The values on the host, from anything with __array__ or __dlpack__, or nested sequences."""
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as fault:
        raise InputError(
            f"{what} is {type(value).__name__}, which NumPy cannot read ({fault}); "
            "expected an array with __array__ or __dlpack__"
        ) from fault
