"""Whether an expectation could be true at all: a bundle's own faults are no engine's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kdtr.contract import BundleError, DraftTree, ModelConfig, Stage

_TOKENS = ("tokens", "targets", "bonus", "root", "emitted", "cache_tokens", "build_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class PointFacts:
    """What the inputs say of a point: its rows, its tree (None: a chunk), and L before it."""

    tokens: tuple[int, ...]
    tree: DraftTree | None
    committed_len: int


def check_values(
    name: str, stage: Stage, array: np.ndarray, config: ModelConfig, facts: PointFacts
) -> None:
    """`array` has the stage's shape. Raises BundleError naming it and what is impossible."""
    wrong = _wrong(stage, array, config, facts)
    if wrong:
        raise BundleError(f"{name} {wrong}; record the bundle again")


def check_gap(name: str, gap: np.ndarray) -> None:
    """A margin or a gap is a number of at least 0; inf where there is nothing to decide."""
    bad = np.flatnonzero(~(gap >= 0))
    if len(bad):
        raise BundleError(
            f"{name}[{bad[0]}] = {gap[bad[0]]:.6g}; expected at least 0, or inf where nothing is "
            "decided; record the bundle again"
        )


def _wrong(stage: Stage, array: np.ndarray, config: ModelConfig, facts: PointFacts) -> str:
    if not stage.exact:
        finite = np.isfinite(array)
        hidden = array == -np.inf if stage.name == "scores" else ~np.ones(array.shape, dtype=bool)
        return "" if (finite | hidden).all() else "holds NaN or infinity"
    wanted = np.dtype(bool if stage.name == "mask" else np.int64)
    if array.dtype != wanted:
        return f"is {array.dtype}; expected {wanted}"
    if stage.name in _TOKENS and not ((array >= 0) & (array < config.vocab_size)).all():
        return f"holds an id outside 0..{config.vocab_size - 1}"
    if stage.name == "tokens" and tuple(array.tolist()) != facts.tokens:
        return "differs from the question's tokens"
    if stage.name == "parents" and facts.tree and tuple(array.tolist()) != facts.tree.parents:
        return "differs from the question's tree"
    if stage.name == "path" and facts.tree and not _is_path(facts.tree, array.tolist()):
        return f"= {array.tolist()}, which is no path from the root of the question's tree"
    if stage.name == "expert_ids":
        ordered = (np.diff(array, axis=1) > 0).all()
        if not ordered or array.min() < 0 or array.max() >= config.n_routed_experts:
            return f"is not ascending ids of 0..{config.n_routed_experts - 1}"
    if stage.name == "slots" and int(array[0]) != facts.committed_len:
        return f"starts at {array[0]}; expected committed_len = {facts.committed_len}"
    return ""


def _is_path(tree: DraftTree, path: list[int]) -> bool:
    above = -1
    for node in path:
        if not 0 <= node < len(tree) or tree.parents[node] != above:
            return False
        above = node
    return bool(path)
