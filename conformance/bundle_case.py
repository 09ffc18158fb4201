"""Reading one case of a golden bundle: its inputs, and a refusal of what is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kdtr.conformance.case import DECISIONS, STAGES, CaseInput, RoundInput
from kdtr.conformance.host_array import Numbers
from kdtr.contract import BundleError, DraftTree, EmitLimit, KdtrError, ModelConfig, rules


def read_case(
    config: ModelConfig, entry: object, tensors: Mapping[str, np.ndarray], weights_sha256: str
) -> CaseInput:
    """The case that metadata's `entry` describes; `tensors` are all of `input/`.

    Raises BundleError naming the tensor or key. The id is recomputed: it holds the weights and
    the questions together.
    """
    about = _about(entry)
    case = _Reader(f"input/{about['alias']}/", tensors).case(about)
    extra = sorted(
        {name for name in tensors if name.startswith(f"input/{case.alias}/")}
        - {f"input/{case.alias}/{name}" for name in case.tensors()}
    )
    if extra:
        raise BundleError(f"{extra[0]} belongs to no question of the case; remove it")
    _check_inputs(config, case)
    if case.case_id != case.content_id(weights_sha256):
        raise BundleError(
            f"case {case.alias} has id {case.case_id}, its weights and questions give "
            f"{case.content_id(weights_sha256)}; record the bundle again"
        )
    return case


def _about(entry: object) -> dict[str, Any]:
    kinds = {"alias": str, "id": str, "level": str, "rules": list, "thin": dict, "why": str}
    if not isinstance(entry, dict):
        raise BundleError(f"a case in the metadata is {entry!r}; expected an object")
    for key, kind in kinds.items():
        if not isinstance(entry.get(key), kind):
            raise BundleError(
                f"a case in the metadata has {key} = {entry.get(key)!r}; expected a {kind.__name__}"
            )
    unknown = [rule for rule in entry["rules"] if rule not in rules()]
    if unknown:
        raise BundleError(f"case {entry['alias']} cites {unknown[0]!r}, which is no rule")
    if entry["level"] not in (STAGES, DECISIONS):
        raise BundleError(
            f"case {entry['alias']} has level {entry['level']!r}; expected {STAGES} or {DECISIONS}"
        )
    return entry


class _Reader:
    def __init__(self, prefix: str, tensors: Mapping[str, np.ndarray]) -> None:
        self._prefix = prefix
        self._tensors = tensors

    def case(self, about: dict[str, Any]) -> CaseInput:
        max_len = self._number("max_len")
        if max_len is None:
            raise BundleError(f"{self._prefix}max_len is missing; expected a number of slots")
        return CaseInput(
            alias=about["alias"],
            why=about["why"],
            rules=tuple(about["rules"]),
            chunks=tuple(self._integers(f"chunk{i}/tokens") for i in range(self._count("chunk"))),
            root=self._number("root"),
            rounds=tuple(self._round(f"round{i}/") for i in range(self._count("round"))),
            max_len=max_len,
            level=about["level"],
            case_id=about["id"],
        )

    def _round(self, at: str) -> RoundInput:
        try:
            tree = DraftTree(self._integers(at + "tokens"), self._integers(at + "parents"))
            stops = self._integers(at + "stop_tokens") if self._has(at + "stop_tokens") else ()
            limit = EmitLimit(frozenset(stops), self._number(at + "max_emitted"))
        except BundleError:
            raise
        except KdtrError as error:
            raise BundleError(f"{self._prefix}{at}: {error}") from error
        logits = self._tensors.get(self._prefix + at + "draft_logits")
        return RoundInput(tree, logits, self._number(at + "budget"), limit)

    def _has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def _count(self, point: str) -> int:
        i = 0
        while self._has(f"{point}{i}/tokens"):
            i += 1
        return i

    def _integers(self, name: str) -> tuple[int, ...]:
        return tuple(self._int64(name, 1).tolist())

    def _number(self, name: str) -> int | None:
        return int(self._int64(name, 0)) if self._has(name) else None

    def _int64(self, name: str, ndim: int) -> np.ndarray:
        if not self._has(name):
            raise BundleError(f"{self._prefix}{name} is missing; record the bundle again")
        array = self._tensors[self._prefix + name]
        if array.dtype != np.int64 or array.ndim != ndim:
            raise BundleError(
                f"{self._prefix}{name} is {array.dtype} {list(array.shape)}; expected int64 "
                f"{'[n]' if ndim else '[]'}"
            )
        return array


def _check_inputs(config: ModelConfig, case: CaseInput) -> None:
    """Whatever an engine would have to refuse is refused here: it is no fault of the engine's."""
    where = f"input/{case.alias}/"
    if bool(case.chunks) == (case.root is not None) or not case.rounds:
        raise BundleError(
            f"{where}: {len(case.chunks)} chunks, root {case.root} and {len(case.rounds)} rounds; "
            "expected a prompt or a root, and rounds"
        )
    tokens = [*(token for chunk in case.chunks for token in chunk)]
    tokens += [token for entry in case.rounds for token in entry.tree.tokens]
    tokens += [] if case.root is None else [case.root]
    bad = [token for token in tokens if not 0 <= token < config.vocab_size]
    if bad:
        raise BundleError(f"{where}: token {bad[0]}; expected ids 0..{config.vocab_size - 1}")
    if not all(case.chunks):
        raise BundleError(f"{where}: a chunk is empty; expected token ids")
    if not 1 <= case.max_len <= config.max_position_embeddings:
        raise BundleError(
            f"{where}max_len = {case.max_len}; expected 1..max_position_embeddings = "
            f"{config.max_position_embeddings}"
        )
    for i, entry in enumerate(case.rounds):
        if (entry.draft_logits is None) != (entry.budget is None):
            raise BundleError(f"{where}round{i}: draft_logits and budget come together, or not")
        logits = entry.draft_logits
        if logits is not None and (logits.ndim != 2 or logits.shape[1] != config.vocab_size):
            raise BundleError(
                f"{where}round{i}/draft_logits is {list(logits.shape)}; expected "
                f"[depth, {config.vocab_size}]"
            )
        if logits is not None:
            _check_drafts(f"{where}round{i}", logits, entry.budget)


def _check_drafts(where: str, logits: np.ndarray, budget: int | None) -> None:
    """What a build refuses (TREE-3)."""
    if budget is None or budget < 0:
        raise BundleError(f"{where}/budget = {budget}; expected at least 0")
    if not Numbers.FLOATING.allow(logits.dtype):
        raise BundleError(
            f"{where}/draft_logits is {logits.dtype}; expected {Numbers.FLOATING.value}"
        )
    wide = logits.astype(np.float64)
    bad = np.argwhere(np.isnan(wide) | (wide == np.inf))
    if len(bad):
        depth, token = bad[0].tolist()
        raise BundleError(
            f"{where}/draft_logits[{depth}, {token}] = {wide[depth, token]}; expected a finite "
            "number or -inf"
        )
