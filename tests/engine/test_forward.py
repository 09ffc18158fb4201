from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.contract import STAGE, DraftTree, ModelConfig, Source, stage_order
from kdtr.engine.model import TreeModel

Y_TREE = DraftTree(tokens=(4, 5, 6, 7), parents=(-1, 0, 0, 2))
ROUTER = {"router_scores", "expert_ids", "expert_weights"}  # not in layer 0, which is dense


def y_verify(load: Callable[..., TreeModel], trace: Any, **options: int) -> Any:
    session = load(**options).open(max_len=40)
    session.prefill([1, 2, 3, 30, 31])
    session.set_root(4)
    return session.verify(Y_TREE, trace=trace) if trace is not None else session.verify(Y_TREE)


def test_stages_come_in_the_contracts_order(load: Callable[..., TreeModel], trace: Any) -> None:
    """Every traced stage, per layer where it is per layer, and the router's only where one is."""
    y_verify(load, trace)

    expected = [
        (stage.name, layer)
        for stage, layer in stage_order(3)
        if stage.source in (Source.FORWARD, Source.LAYER)
        and not (layer == 0 and stage.name in ROUTER)
    ]
    assert expected == list(trace)


def test_traced_indices_of_a_tree(load: Callable[..., TreeModel], trace: Any) -> None:
    y_verify(load, trace)

    assert [-1, 0, 0, 2] == trace["parents", None].tolist()
    assert [4, 5, 6, 7] == trace["tokens", None].tolist()
    assert [5, 6, 6, 7] == trace["positions", None].tolist()
    assert [5, 6, 7, 8] == trace["slots", None].tolist()
    assert [
        [1, 1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 1, 1, 0, 1, 1],
    ] == trace["mask", None].astype(int).tolist()


def test_traced_axes(load: Callable[..., TreeModel], trace: Any) -> None:
    y_verify(load, trace)

    sizes = {"n": 4, "s": 9, "h": 3, "d": 7, "r": 6, "c": 10, "m": 20, "e": 8, "k": 3, "w": 37}
    for name, layer in trace:
        shape = tuple(sizes[axis] for axis in STAGE[name].axes)
        assert shape == trace[name, layer].shape, name


def test_scores_are_finite_exactly_where_the_mask_is(
    load: Callable[..., TreeModel], trace: Any
) -> None:
    y_verify(load, trace, split_size=2)

    for layer in range(3):
        scores = trace["scores", layer]  # [n, h, s]
        visible = np.broadcast_to(trace["mask", None][:, None], scores.shape)
        assert np.array_equal(visible, np.isfinite(scores))
        assert np.isneginf(scores[~visible]).all()


def test_watching_changes_no_bit(load: Callable[..., TreeModel], trace: Any) -> None:
    watched, unwatched = y_verify(load, trace), y_verify(load, None)

    assert np.array_equal(watched.logits, unwatched.logits)
    assert np.array_equal(watched.logits, trace["logits", None])


def test_prefill_traces_no_parents(load: Callable[..., TreeModel], trace: Any) -> None:
    load().open(max_len=9).prefill([3, 1, 2], trace=trace)

    assert ("parents", None) not in trace
    assert [[1, 0, 0], [1, 1, 0], [1, 1, 1]] == trace["mask", None].astype(int).tolist()


def test_eps_of_latent_and_block_norms_are_apart(
    load: Callable[..., TreeModel], small: ModelConfig
) -> None:
    """NORM-1: latent_norm_eps moves the latents of layer 0, rms_norm_eps its input too."""

    def stages(config: ModelConfig) -> dict[tuple[str, int | None], np.ndarray]:
        seen: dict[tuple[str, int | None], np.ndarray] = {}
        session = load(config).open(max_len=9)
        session.prefill([1, 2], trace=lambda s, i, a: seen.__setitem__((s, i), np.array(a)))
        return seen

    plain = stages(small.replace(scoring_func="softmax"))
    latent = stages(small.replace(scoring_func="softmax", latent_norm_eps=0.3))
    block = stages(small.replace(scoring_func="softmax", rms_norm_eps=0.3))

    assert np.array_equal(plain["k_pe", 0], latent["k_pe", 0])  # only the latent part is normed
    assert not np.array_equal(plain["c_kv", 0], latent["c_kv", 0])
    assert not np.array_equal(plain["q_pe", 0], latent["q_pe", 0])
    assert not np.array_equal(plain["k_pe", 0], block["k_pe", 0])
