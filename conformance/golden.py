"""Recording golden bundles with the reference: the truth of every stage, round by round."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kdtr.conformance.bundle import (
    CORPUS_VERSION,
    GENERATOR_VERSION,
)
from kdtr.conformance.bundle_check import EXPERT_GAP, stage_name
from kdtr.conformance.case import CaseInput, CasePlan, Drafted, Planted, RoundInput, RoundPlan
from kdtr.conformance.golden_plant import draft_logits, planted_tree
from kdtr.contract import Array, CaseError, DraftTree, ModelConfig, rules_version
from kdtr.kdtr_format import config_tensors, write_bundle
from kdtr.reference import make_engine
from kdtr.reference.engine import ReferenceModel
from kdtr.reference.moe import choice_gap
from kdtr.reference.session import ReferenceSession
from kdtr.reference.weights import MoeWeights

Progress = Callable[[str], None]


def record_bundle(
    path: str | os.PathLike[str],
    model: Mapping[str, Any],
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    plans: Sequence[CasePlan],
    progress: Progress = lambda _: None,
) -> str:
    """Record the cases on a model and write the bundle; returns the file's SHA-256.

    model    what the metadata says of it: at least a name
    weights  under their checkpoint names; stored as they are, in their own dtype
    Raises CaseError for a case that cannot be recorded, before anything is written.
    """
    aliases = [plan.alias for plan in plans]
    if not plans or len(set(aliases)) != len(aliases):
        raise CaseError(f"cases {', '.join(aliases) or 'none'}; expected some, each with a name")
    reference = make_engine().load((config, weights))
    identity = weights_sha256(weights)
    tensors = {
        **config_tensors(config),
        **{f"weights/{name}": weights[name] for name in weights},
    }
    entries = []
    for plan in plans:
        progress(plan.alias)
        inputs, expected = record_case(reference, plan)
        tensors.update({f"input/{plan.alias}/{n}": a for n, a in inputs.tensors().items()})
        tensors.update({f"expect/{plan.alias}/{n}": a for n, a in expected.items()})
        entries.append(
            {
                "alias": plan.alias,
                "id": inputs.content_id(identity),
                "rules": list(plan.rules),
                "why": plan.why,
            }
        )
    metadata = {
        "cases": entries,
        "kind": "golden",
        "model": {**model, "weights_sha256": identity},
        "versions": {
            "corpus": CORPUS_VERSION,
            "generator": GENERATOR_VERSION,
            "rules": rules_version(),
        },
    }
    return write_bundle(path, tensors, metadata)


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """Identity of a set of tensors: names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def record_case(model: ReferenceModel, plan: CasePlan) -> tuple[CaseInput, dict[str, np.ndarray]]:
    """Run a case; returns its inputs, and the expectations by `<point>/<stage>`."""
    _check_fits(model.config, plan)
    ahead = _continuation(model, plan)
    session = model.open(max_len=model.config.max_position_embeddings)
    expected: dict[str, np.ndarray] = {}
    needed = 0
    for i, chunk in enumerate(plan.chunks):
        recorder = _Recorder(model)
        session.prefill(chunk, trace=recorder)
        needed = session.committed_len
        _keep(expected, f"chunk{i}", recorder, session)
    if plan.root is not None:
        session.set_root(plan.root)
    rounds = []
    for i, round_plan in enumerate(plan.rounds):
        done = session.committed_len - _prompt_len(plan)
        entry = _round_input(model, plan, i, round_plan, session, ahead[done:])
        recorder = _Recorder(model)
        if entry.draft_logits is not None:
            recorder("build_parents", None, np.array(entry.tree.parents))
            recorder("build_tokens", None, np.array(entry.tree.tokens))
        needed = max(needed, session.committed_len + len(entry.tree))
        session.round(entry.tree, trace=recorder)
        _keep(expected, f"round{i}", recorder, session)
        rounds.append(entry)
    inputs = CaseInput(
        plan.alias, plan.why, plan.rules, plan.chunks, plan.root, tuple(rounds), needed
    )
    return inputs, expected


class _Recorder:
    """A trace that copies every stage, and measures how firm the choice of experts is."""

    def __init__(self, model: ReferenceModel) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self._model = model

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        self.arrays[stage_name(stage, layer)] = np.array(array)
        if stage == "router_scores":
            assert layer is not None
            moe = self._model.weights.layers[layer].mlp
            assert isinstance(moe, MoeWeights)
            gap = choice_gap(self._model.config, array, moe.bias)
            self.arrays[stage_name(EXPERT_GAP, layer)] = gap


def _keep(
    expected: dict[str, np.ndarray], point: str, recorder: _Recorder, session: ReferenceSession
) -> None:
    cache = session.snapshot()
    arrays = {
        **recorder.arrays,
        "committed_len": np.array(session.committed_len),
        "root": np.array(session.root),
        "cache_tokens": cache.tokens,
        "cache_positions": cache.positions,
        "cache_c_kv": cache.c_kv,
        "cache_k_pe": cache.k_pe,
    }
    expected.update({f"{point}/{name}": array for name, array in arrays.items()})


def _prompt_len(plan: CasePlan) -> int:
    return sum(len(chunk) for chunk in plan.chunks)


def _continuation(model: ReferenceModel, plan: CasePlan) -> tuple[int, ...]:
    """The root and the tokens that follow it by plain decoding: enough to plant every path."""
    session = model.open(max_len=model.config.max_position_embeddings)
    if plan.root is None:
        for chunk in plan.chunks:
            session.prefill(chunk)
    else:
        session.set_root(plan.root)
    assert session.root is not None
    tokens = [session.root]
    for _ in range(sum(_accept_len(round_plan) for round_plan in plan.rounds)):
        tokens.append(session.decode())
    return tuple(tokens)


def _accept_len(plan: RoundPlan) -> int:
    """Tokens that the round can emit at most."""
    if isinstance(plan, Planted):
        return len(plan.path)
    return len(plan.ranks) + 1 if isinstance(plan, Drafted) else len(plan)


def _round_input(
    model: ReferenceModel,
    plan: CasePlan,
    i: int,
    round_plan: RoundPlan,
    session: ReferenceSession,
    ahead: Sequence[int],
) -> RoundInput:
    where = f"case {plan.alias}, round {i}"
    if isinstance(round_plan, DraftTree):
        if round_plan.tokens[0] != session.root:
            raise CaseError(
                f"{where}: the tree's root is token {round_plan.tokens[0]}, the model's is "
                f"{session.root}; give that one, or plant the tree by parents and path"
            )
        return RoundInput(round_plan)
    if isinstance(round_plan, Planted):
        return RoundInput(planted_tree(where, round_plan, ahead, model.config.vocab_size))
    logits = draft_logits(where, round_plan, ahead, model.config.vocab_size)
    return RoundInput(session.build(logits, round_plan.budget), logits, round_plan.budget)


def _check_fits(config: ModelConfig, plan: CasePlan) -> None:
    """A round needs its tree's slots, whatever it accepts."""
    rows = sum(
        round_plan.budget + 1 if isinstance(round_plan, Drafted) else len(round_plan.parents)
        for round_plan in plan.rounds
    )
    if _prompt_len(plan) + rows > config.max_position_embeddings:
        raise CaseError(
            f"case {plan.alias} may need {_prompt_len(plan) + rows} slots; expected at most "
            f"max_position_embeddings = {config.max_position_embeddings}"
        )
