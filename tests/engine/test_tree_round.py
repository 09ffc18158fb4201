from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kdtr.contract import NO_LIMIT, SILENT, DraftTree, EmitLimit, ModelConfig
from kdtr.engine.checkpoint_weights import prepare_weights
from kdtr.engine.forward import Forward
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.paging import PagedCache
from kdtr.engine.tree_round import tree_round, walk_limits
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
    """What a captured graph needs: once the rows are staged, kernels alone."""
    kernels = CountingKernels()
    forward = Forward(
        kernels,
        small,
        prepare_weights(open_model((small, small_weights)), kernels),
        split_size=8,
    )
    cache = PagedCache(kernels, small, capacity=9, page_size=2)
    cache.map_slots(4)
    launcher = kernels.launcher(cache, small)
    rows = launcher.stage(0, TREE.tokens, TREE.parents, max_emitted=4)
    kernels.calls.clear()

    launcher.run("round", rows, partial(tree_round, forward, cache, rows), SILENT)

    assert {"accept_walk", "verify_attn", "commit_rows"} <= set(kernels.calls)
    up, down = {"upload", "upload_weight", "overwrite", "device_int"}, {"to_host", "all_to_host"}
    assert not (up | down | {"read_rows"}) & set(kernels.calls)


def test_the_outcome_has_no_padding(load: Callable[..., Any], trace: Any) -> None:
    """moves and path count accept_len entries, whatever the tree's size (PAD-1)."""
    session = load().open(max_len=20)
    session.set_root(7)

    done = session.round(TREE, trace=trace)

    assert done.acceptance.accept_len == len(trace["moves", None]) == len(trace["path", None])
    assert (trace["moves", None] >= 0).all()
    assert 4 == len(trace["targets", None])


def test_walk_limits_fit_the_device() -> None:
    """A stop token that no 64-bit word holds, and a limit beyond the tree's nodes."""
    limits = [
        walk_limits(TREE, limit, 60)
        for limit in (
            EmitLimit(frozenset({9, 3, 2**70}), 2),
            NO_LIMIT,
            EmitLimit(max_emitted=2**70),
        )
    ]

    assert [([3, 9], 2), ([], 4), ([], 4)] == limits
