"""What a session refuses, before anything is computed: each check returns the value, or raises."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import index

import numpy as np

from kdtr.contract import (
    MAX_POSITION,
    Acceptance,
    Array,
    CacheError,
    DraftTree,
    EmitLimit,
    InputError,
    ModelConfig,
    Trace,
    TreeError,
)

_TEXT = (str, bytes, bytearray, memoryview)  # sequences, but of characters


def trace_function(trace: Trace) -> Trace:
    if not callable(trace):
        raise InputError(f"trace is {type(trace).__name__}; expected a function, or SILENT")
    return trace


def token_id(what: str, value: object, vocab_size: int) -> int:
    """An id of the vocabulary; a bool is no integer."""
    try:
        token = None if isinstance(value, bool | np.bool_) else index(value)  # type: ignore[arg-type]
    except TypeError:
        token = None
    if token is None:
        raise InputError(f"{what} = {value!r}; expected an integer")
    if not 0 <= token < vocab_size:
        raise InputError(f"{what} = {token}; expected a token id 0..{vocab_size - 1}")
    return token


def token_ids(what: str, values: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """At least one id, from a sequence or an array [n] of integers."""
    items: Sequence[object]
    if hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
        host = _host_array(what, values)
        if host.ndim != 1 or host.dtype.kind not in "iu":
            raise InputError(f"{what} are {host.dtype} {list(host.shape)}; expected integers [n]")
        items = host.tolist()
    elif isinstance(values, Sequence) and not isinstance(values, _TEXT):
        items = values
    else:
        raise InputError(f"{what} are {type(values).__name__}; expected a sequence of integers")
    if not len(items):
        raise InputError(f"{what} are empty; expected at least one token")
    return tuple(token_id(f"{what}[{i}]", value, vocab_size) for i, value in enumerate(items))


def fitting_tree(tree: DraftTree, vocab_size: int) -> DraftTree:
    """A tree whose tokens are in the vocabulary (the rest it checked at birth)."""
    if not isinstance(tree, DraftTree):
        raise TreeError(f"tree is {type(tree).__name__}; expected a DraftTree")
    for i, token in enumerate(tree.tokens):
        if token >= vocab_size:
            raise TreeError(f"tokens[{i}] = {token}; expected a token id 0..{vocab_size - 1}")
    return tree


def rooted_tree(tree: DraftTree, root: int, vocab_size: int) -> DraftTree:
    """A tree under the session's root (FWD-3)."""
    fitting_tree(tree, vocab_size)
    if tree.tokens[0] != root:
        raise TreeError(
            f"tokens[0] = {tree.tokens[0]}, but the session's root is {root}; expected a tree "
            f"under {root}, or set_root({tree.tokens[0]}) first (FWD-3)"
        )
    return tree


def emit_limit(limit: EmitLimit) -> EmitLimit:
    if not isinstance(limit, EmitLimit):
        raise InputError(f"limit is {type(limit).__name__}; expected an EmitLimit")
    return limit


def targets(values: Sequence[int], n: int, vocab_size: int) -> tuple[int, ...]:
    """One target per node."""
    ids = token_ids("targets", values, vocab_size)
    if len(ids) != n:
        raise InputError(f"{len(ids)} targets for {n} nodes; expected one per node")
    return ids


def row_positions(positions: Array, n: int) -> np.ndarray:
    """positions [n] integers, as int64."""
    host = _host_array("positions", positions)
    if host.shape != (n,) or host.dtype.kind not in "iu":
        raise InputError(f"positions are {host.dtype} {list(host.shape)}; expected integers [{n}]")
    for i, position in enumerate(host.tolist()):
        if not 0 <= position <= MAX_POSITION:
            raise InputError(f"positions[{i}] = {position}; expected 0..{MAX_POSITION}")
    return host.astype(np.int64)


def row_mask(mask: Array, n: int, committed_len: int) -> np.ndarray:
    """mask [n, L + n] bool, true where visible, every row seeing itself (MASK-1), as a copy."""
    host = _host_array("mask", mask)
    shape = (n, committed_len + n)
    if host.shape != shape or host.dtype != np.bool_:
        raise InputError(
            f"mask is {host.dtype} {list(host.shape)}; expected bool {list(shape)}: rows, "
            "committed_len + rows"
        )
    blind = np.flatnonzero(~host[np.arange(n), committed_len + np.arange(n)])
    if len(blind):
        i = int(blind[0])
        raise InputError(
            f"mask[{i}, {committed_len + i}] is false; expected every row to see itself (MASK-1)"
        )
    return host.copy()


def room(committed_len: int, n: int, max_len: int) -> None:
    """SLOT-3: legal up to equality."""
    if committed_len + n > max_len:
        raise CacheError(
            f"a forward of {n} rows at committed_len {committed_len} needs {committed_len + n} "
            f"slots, the session has {max_len}; open it with max_len >= {committed_len + n}"
        )


def committable(
    acceptance: Acceptance, n: int, tree: DraftTree | None, vocab_size: int
) -> Acceptance:
    """An acceptance of n pending rows: a path of the tree; without a tree, any that rises."""
    if not isinstance(acceptance, Acceptance):
        raise InputError(f"acceptance is {type(acceptance).__name__}; expected an Acceptance")
    path = acceptance.path
    if path[-1] >= n:  # the largest: a path increases
        raise InputError(
            f"path ends at node {path[-1]}, the forward had {n} rows; expected nodes 0..{n - 1}"
        )
    for above, node in pairwise(path):
        if tree is not None and tree.parents[node] != above:
            raise InputError(
                f"path = {path}, but node {node} is a child of node {tree.parents[node]}, not of "
                f"{above}; expected a path of the verified tree"
            )
    token_id("bonus", acceptance.bonus, vocab_size)
    return acceptance


def slots(max_len: int, config: ModelConfig) -> int:
    """The size of a session."""
    limit = config.max_position_embeddings
    try:
        count = 0 if isinstance(max_len, bool | np.bool_) else index(max_len)
    except TypeError:
        count = 0
    if not 1 <= count <= limit:
        raise InputError(f"max_len = {max_len!r}; expected 1..max_position_embeddings = {limit}")
    return count


def _host_array(what: str, value: Array) -> np.ndarray:
    """The values on the host, from anything with __array__ or __dlpack__, or nested sequences."""
    try:
        if hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
            return np.from_dlpack(value)
        return np.asarray(value)
    except (TypeError, ValueError, BufferError, RuntimeError) as fault:
        raise InputError(
            f"{what} is {type(value).__name__}, which NumPy cannot read ({fault}); expected an "
            "array with __array__ or __dlpack__"
        ) from fault
