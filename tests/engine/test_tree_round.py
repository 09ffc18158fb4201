from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.contract import NO_LIMIT, SILENT, DraftTree, EmitLimit, ModelConfig
from kdtr.engine.checkpoint_weights import prepare_weights
from kdtr.engine.forward import Forward
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.paging import PagedCache
from kdtr.engine.tree_round import fused_round, walk_limits
from kdtr.kdtr_format import open_model

TREE = DraftTree(tokens=(7, 1, 2, 3), parents=(-1, 0, 0, 2))


class CountingKernels(HostKernels):
    """Writes down which operation ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in ("calls", "device", "__class__"):
            self.calls.append(name)
        return super().__getattribute__(name)


def test_nothing_comes_to_the_host_before_the_commit(
    small: ModelConfig, small_weights: dict[str, np.ndarray]
) -> None:
    """What a captured graph needs: after the first upload, kernels alone, up to commit_rows."""
    kernels = CountingKernels()
    forward = Forward(
        kernels,
        small,
        prepare_weights(open_model((small, small_weights)), kernels.upload),
        split_size=8,
    )
    cache = PagedCache(kernels, small, capacity=9, page_size=2)
    kernels.calls.clear()

    fused_round(forward, cache, 0, TREE, NO_LIMIT, SILENT)

    before = kernels.calls[: kernels.calls.index("commit_rows")]
    assert "accept_walk" in before
    assert "verify_attn" in before
    assert "to_host" not in before
    assert "read_rows" not in before


def test_the_outcome_has_no_padding(load: Callable[..., Any], trace: Any) -> None:
    """moves and path count accept_len entries, whatever the tree's size (PAD-1)."""
    session = load().open(max_len=20)
    session.set_root(7)

    done = session.round(TREE, trace=trace)

    assert done.acceptance.accept_len == len(trace["moves", None]) == len(trace["path", None])
    assert (trace["moves", None] >= 0).all()
    assert 4 == len(trace["targets", None])


def test_walk_limits_fit_the_device(
    small: ModelConfig, small_weights: dict[str, np.ndarray]
) -> None:
    """A stop token that no 64-bit word holds, and a limit beyond the tree's nodes."""
    kernels = HostKernels()
    weights = prepare_weights(open_model((small, small_weights)), kernels.upload)
    forward = Forward(kernels, small, weights, split_size=8)

    stops, most = walk_limits(forward, TREE, EmitLimit(frozenset({9, 3, 2**70}), 2))
    none, all_nodes = walk_limits(forward, TREE, NO_LIMIT)
    _, capped = walk_limits(forward, TREE, EmitLimit(max_emitted=2**70))

    assert ([3, 9], 2) == (stops.tolist(), most)
    assert ([], 4, 4) == (none.tolist(), all_nodes, capped)
