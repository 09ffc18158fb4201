"""Recording golden bundles with the reference: the truth of every stage, round by round."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kdtr.conformance.bundle import (
    CORPUS_VERSION,
    GENERATOR_VERSION,
    weights_sha256,
)
from kdtr.conformance.bundle_check import EXPERT_GAP, is_recorded, stage_name
from kdtr.conformance.case import CaseInput, CasePlan, Drafted, Planted, RoundInput, RoundPlan
from kdtr.conformance.golden_margins import PRECISIONS, ForwardRecorder, Shadow, clear_rows
from kdtr.conformance.golden_plant import draft_logits, planted_tree
from kdtr.contract import (
    STAGE,
    Acceptance,
    Array,
    CaseError,
    DraftTree,
    EmitLimit,
    ModelConfig,
    rules_version,
)
from kdtr.kdtr_format import config_tensors, write_bundle
from kdtr.reference import make_engine
from kdtr.reference.engine import ReferenceModel

Progress = Callable[[str], None]

_SALTS = 16  # other tokens to try for a tree in which a row is thin in float32


def record_bundle(
    path: str | os.PathLike[str],
    model: Mapping[str, Any],
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    plans: Sequence[CasePlan],
    progress: Progress = lambda _: None,
    *,
    alignment: int = 256,
) -> str:
    """Record the cases on a model and write the bundle; returns the file's SHA-256.

    model    what the metadata says of it: at least a name
    weights  under their checkpoint names; stored as they are, in their own dtype
    Raises CaseError for a case that cannot be recorded, before anything is written.
    """
    aliases = [plan.alias for plan in plans]
    if not plans or len(set(aliases)) != len(aliases):
        raise CaseError(f"cases {', '.join(aliases) or 'none'}; expected some, each with a name")
    models = Models(config, weights)
    identity = weights_sha256(weights)
    tensors = {
        **config_tensors(config),
        **{f"weights/{name}": weights[name] for name in weights},
    }
    entries = []
    for plan in plans:
        progress(plan.alias)
        inputs, expected, thin = record_case(models, plan)
        tensors.update({f"input/{plan.alias}/{n}": a for n, a in inputs.tensors().items()})
        tensors.update({f"expect/{plan.alias}/{n}": a for n, a in expected.items()})
        entries.append(
            {
                "alias": plan.alias,
                "id": inputs.content_id(identity),
                "level": plan.level,
                "rules": list(plan.rules),
                "thin": thin,
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
    return write_bundle(path, tensors, metadata, alignment=alignment)


class Models:
    """The truth, and the honest engines of lower precision that say how firm a decision is."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, np.ndarray]) -> None:
        source = (config, weights)
        self.config = config
        self.truth = make_engine().load(source)
        self.emulated = {name: make_engine(arithmetic=name).load(source) for name in PRECISIONS}


def record_case(
    models: Models, plan: CasePlan
) -> tuple[CaseInput, dict[str, np.ndarray], dict[str, int]]:
    """Run a case.

    Returns its inputs; the expectations by `<point>/<stage>`; and by precision how many
    decisions are thin: of all rows in float32, of the accepted ones in lower precisions.
    """
    run = _Run(models, plan, _slots(models.config, plan))
    for i, chunk in enumerate(plan.chunks):
        run.prefill(f"chunk{i}", chunk)
    if plan.root is not None:
        run.session.set_root(plan.root)
    rounds = [run.round(f"round{i}", round_plan) for i, round_plan in enumerate(plan.rounds)]
    inputs = CaseInput(
        alias=plan.alias,
        why=plan.why,
        rules=plan.rules,
        chunks=plan.chunks,
        root=plan.root,
        rounds=tuple(rounds),
        max_len=run.needed,
        level=plan.level,
    )
    return inputs, run.kept(inputs), run.thin


class _Run:
    """One case under way: the truth's session, and its shadows in lower precision."""

    def __init__(self, models: Models, plan: CasePlan, slots: int) -> None:
        self.session = models.truth.open(max_len=slots)
        self.needed = 0  # slots
        self.thin = dict.fromkeys(PRECISIONS, 0)
        self._models = models
        self._plan = plan
        self._ahead = _continuation(models.truth, plan, slots)
        self._shadows = {
            precision: Shadow(model, slots) for precision, model in models.emulated.items()
        }
        self._expected: dict[str, np.ndarray] = {}

    def prefill(self, point: str, chunk: tuple[int, ...]) -> None:
        recorder = _Recorder(self._models.truth)
        root = self.session.prefill(chunk, trace=recorder)
        self.needed = self.session.committed_len
        whole = Acceptance(tuple(range(len(chunk))), root)
        self._keep(point, chunk, recorder, whole, first_target=len(chunk) - 1)

    def round(self, point: str, plan: RoundPlan) -> RoundInput:
        entry = self._input(f"case {self._plan.alias}, {point}", plan)
        recorder = _Recorder(self._models.truth)
        if entry.draft_logits is not None:
            recorder("build_parents", None, np.array(entry.tree.parents))
            recorder("build_tokens", None, np.array(entry.tree.tokens))
        self.needed = max(self.needed, self.session.committed_len + _rows(entry))
        done = self.session.round(entry.tree, limit=entry.limit, trace=recorder)
        self._keep(point, entry.tree.tokens, recorder, done.acceptance)
        return entry

    def kept(self, inputs: CaseInput) -> dict[str, np.ndarray]:
        """What the case's level keeps."""
        last = inputs.points()[-1]
        return {
            name: array
            for name, array in self._expected.items()
            if (stage := STAGE.get(name.rpartition("/")[2])) is None
            or is_recorded(stage, inputs.level, is_last=name.startswith(last + "/"))
        }

    def _keep(
        self,
        point: str,
        tokens: tuple[int, ...],
        recorder: _Recorder,
        acceptance: Acceptance,
        *,
        first_target: int = 0,
    ) -> None:
        shown = recorder.forward.shown()
        margins = {}
        for precision, shadow in self._shadows.items():
            margin = shadow.margins(tokens, shown, first_target)
            shadow.follow(acceptance)
            rows = slice(None) if precision == "float32" else list(acceptance.path)
            self.thin[precision] += int((~clear_rows(margin[rows])).sum())
            margins[f"margin_{precision}"] = margin
        cache = self.session.snapshot()
        arrays = {
            **recorder.arrays,
            **margins,
            "committed_len": np.array(self.session.committed_len),
            "root": np.array(self.session.root),
            "cache_tokens": cache.tokens,
            "cache_positions": cache.positions,
            "cache_c_kv": cache.c_kv,
            "cache_k_pe": cache.k_pe,
        }
        self._expected.update({f"{point}/{name}": array for name, array in arrays.items()})

    def _input(self, where: str, plan: RoundPlan) -> RoundInput:
        """The round's tree; where tokens are ours to choose, so that every row is clear."""
        if isinstance(plan, DraftTree):
            plan = RoundInput(plan)
        if isinstance(plan, RoundInput):
            if plan.tree.tokens[0] != self.session.root:
                raise CaseError(
                    f"{where}: the tree's root is token {plan.tree.tokens[0]}, the model's is "
                    f"{self.session.root}; give that one, or plant the tree by parents and path"
                )
            return plan
        best: RoundInput | None = None
        most = -1
        for salt in range(_SALTS):
            entry = self._salted(where if salt == 0 else f"{where}, salt {salt}", plan)
            recorder = ForwardRecorder(self._models.truth)
            self.session.verify(entry.tree, trace=recorder)
            margins = self._shadows["float32"].margins(entry.tree.tokens, recorder.shown())
            clear = int(clear_rows(margins).sum())
            if clear > most:
                best, most = entry, clear
            if most == len(entry.tree):
                break
        assert best is not None
        return best

    def _salted(self, where: str, plan: Planted | Drafted) -> RoundInput:
        done = self.session.committed_len - _prompt_len(self._plan)
        vocab_size = self._models.config.vocab_size
        if isinstance(plan, Planted):
            ahead = self._ahead[done:]
            tree = planted_tree(where, plan, ahead, vocab_size)
            return RoundInput(tree, limit=_limit(plan, ahead))
        logits = draft_logits(where, plan, self._ahead[done:], vocab_size)
        return RoundInput(self.session.build(logits, plan.budget), logits, plan.budget)


class _Recorder:
    """A trace that copies every stage, and what decides."""

    def __init__(self, model: ReferenceModel) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.forward = ForwardRecorder(model)

    def __call__(self, stage: str, layer: int | None, array: Array, /) -> None:
        self.arrays[stage_name(stage, layer)] = np.array(array)
        self.forward(stage, layer, array)
        if stage == "router_scores":
            assert layer is not None
            self.arrays[stage_name(EXPERT_GAP, layer)] = self.forward.gaps[layer]


def _limit(plan: Planted, ahead: Sequence[int]) -> EmitLimit:
    """Emitted token j of a planted path is ahead[j + 1]."""
    stops = () if plan.stop_at is None else (ahead[plan.stop_at + 1],)
    return EmitLimit(frozenset(stops), plan.max_emitted)


def _prompt_len(plan: CasePlan) -> int:
    return sum(len(chunk) for chunk in plan.chunks)


def _continuation(model: ReferenceModel, plan: CasePlan, slots: int) -> tuple[int, ...]:
    """The root and the tokens that follow it by plain decoding: enough to plant every path."""
    session = model.open(max_len=slots)
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
    return len(plan.ranks) + 1 if isinstance(plan, Drafted) else _rows(plan)


def _rows(plan: RoundPlan) -> int:
    """Slots that the round asks for, at most: a build is refused by its budget (SLOT-3)."""
    if isinstance(plan, Drafted):
        return max(plan.budget, len(plan.ranks)) + 1  # the ranks are planted by decoding
    if isinstance(plan, RoundInput):
        return max(len(plan.tree), (plan.budget or 0) + 1)
    return len(plan.parents)


def _slots(config: ModelConfig, plan: CasePlan) -> int:
    """Slots that the case may need: a round's tree has room, whatever the rounds before accept."""
    rows = sum(_rows(round_plan) for round_plan in plan.rounds)
    if _prompt_len(plan) + rows > config.max_position_embeddings:
        raise CaseError(
            f"case {plan.alias} may need {_prompt_len(plan) + rows} slots; expected at most "
            f"max_position_embeddings = {config.max_position_embeddings}"
        )
    return _prompt_len(plan) + rows
