"""Holding a golden bundle against its own shape: every expectation is there, and fits.

A bundle that lacks a stage would pass an engine that gets it wrong, so a gap is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kdtr.conformance.bundle_values import PointFacts, check_gap, check_values
from kdtr.conformance.case import STAGES, CaseInput
from kdtr.contract import BundleError, DraftTree, ModelConfig, Source, Stage, stage_order

EXPERT_GAP = "expert_gap"  # beside expert_ids: how firm the choice is (reference/moe.py)
MARGINS = ("margin_float32", "margin_bfloat16")  # of each row, in golden_margins.py's units
_DECIDING = ("logits", "router_scores")  # what a case of level DECISIONS keeps of the numbers
_ROUTED = ("router_scores", "expert_ids", "expert_weights")


def stage_name(stage: str, layer: int | None) -> str:
    """The end of a stage's tensor name."""
    return stage if layer is None else f"layer{layer}/{stage}"


def check_expectations(
    config: ModelConfig, cases: tuple[CaseInput, ...], tensors: Mapping[str, np.ndarray]
) -> None:
    """`tensors` are all of `expect/`. Raises BundleError for one missing, extra or misshapen."""
    wanted: set[str] = set()
    for case in cases:
        length = 0
        for point in case.points():
            prefix = f"expect/{case.alias}/{point}/"
            n = len(_tree_or_chunk(case, point))
            path = tensors.get(prefix + "path")
            grown = n if path is None else len(path) if path.ndim == 1 else 0
            sizes = _sizes(config, n, length, grown)
            facts = PointFacts(_tree_or_chunk(case, point), _tree(case, point), length)
            for name, shape, kind, stage in _stages(config, case, point, sizes):
                array = _checked(prefix + name, tensors, shape, kind)
                if stage is None:
                    check_gap(prefix + name, array)
                else:
                    check_values(prefix + name, stage, array, config, facts)
                wanted.add(prefix + name)
            length += grown
    extra = sorted(set(tensors) - wanted)
    if extra:
        raise BundleError(f"{extra[0]} belongs to no point of any case; record the bundle again")


def _tree_or_chunk(case: CaseInput, point: str) -> tuple[int, ...]:
    i = int(point.removeprefix("chunk").removeprefix("round"))
    return case.chunks[i] if point.startswith("chunk") else case.rounds[i].tree.tokens


def _tree(case: CaseInput, point: str) -> DraftTree | None:
    return case.rounds[int(point[len("round") :])].tree if point.startswith("round") else None


def _sizes(config: ModelConfig, n: int, length: int, grown: int) -> dict[str, int]:
    """The size of each axis letter of contract/stages.py at one point."""
    return {
        "n": n,
        "s": length + n,
        "a": grown,
        "t": length + grown,
        "h": config.num_attention_heads,
        "d": config.qk_nope_head_dim,
        "r": config.qk_rope_head_dim,
        "c": config.kv_lora_rank,
        "m": config.hidden_size,
        "e": config.n_routed_experts,
        "k": config.num_experts_per_tok,
        "w": config.vocab_size,
        "l": config.num_hidden_layers,
        "2": 2,
    }


def _stages(
    config: ModelConfig, case: CaseInput, point: str, sizes: dict[str, int]
) -> Iterator[tuple[str, tuple[int, ...], str, Stage | None]]:
    """Name, shape, dtype kinds and stage of every expectation of a point; no stage: a margin."""
    is_round, is_last = point.startswith("round"), point == case.points()[-1]
    drafted = is_round and case.rounds[int(point[len("round") :])].draft_logits is not None
    for margin in MARGINS:
        yield margin, (sizes["n"],), "f", None
    for stage, layer in stage_order(config.num_hidden_layers):
        if not _happens(stage, is_round=is_round, drafted=drafted):
            continue
        if not is_recorded(stage, case.level, is_last=is_last):
            continue
        if layer is not None and stage.name in _ROUTED and config.is_dense(layer):
            continue
        shape = tuple(sizes[letter] for letter in stage.axes)
        yield stage_name(stage.name, layer), shape, "bi" if stage.exact else "f", stage
        if stage.name == "expert_ids":
            yield stage_name(EXPERT_GAP, layer), shape[:1], "f", None


def is_recorded(stage: Stage, level: str, *, is_last: bool) -> bool:
    """Whether a case of this level keeps the stage; the cache's numbers at its last point alone."""
    if level == STAGES or stage.exact or stage.name in _DECIDING:
        return True
    return stage.source is Source.COMMIT and is_last


def _happens(stage: Stage, *, is_round: bool, drafted: bool) -> bool:
    if stage.source is Source.JUDGE:  # nothing to record: the engine is its own measure
        return False
    if stage.source is Source.BUILD:
        return drafted
    return is_round or (stage.source is not Source.WALK and stage.name != "parents")


def _checked(
    name: str, tensors: Mapping[str, np.ndarray], shape: tuple[int, ...], kinds: str
) -> np.ndarray:
    if name not in tensors:
        raise BundleError(f"{name} is missing; record the bundle again with `kdtr golden`")
    array = tensors[name]
    fits = array.dtype == np.float64 if kinds == "f" else array.dtype.kind in kinds
    if array.shape != shape or not fits:
        raise BundleError(
            f"{name} is {array.dtype} {list(array.shape)}; expected "
            f"{'float64' if kinds == 'f' else 'int64 or bool'} {list(shape)}"
        )
    return array
