"""A file of answers to the questions of a golden bundle (docs/offline.md), held to its form.

Names mirror the golden bundle's: `answer/<case>/<point>/<stage>` stands where the truth has
`expect/<case>/<point>/<stage>`. Values are the judge's business.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CaseInput
from kdtr.conformance.offline_questions import ID, questions_id
from kdtr.conformance.stdio_protocol import VERSION, info_of, read_reply
from kdtr.contract import STAGE, TRACED, BundleError, EngineError, EngineInfo, Source
from kdtr.kdtr_format import Bundle

ANSWERS = "answers"  # the kind in the metadata
ERROR = "error"  # what stopped the case at this point: UTF-8, u8 [n]
_NAME = re.compile(r"answer/([^/]+)/((?:chunk|round)\d+)/(?:layer(0|[1-9]\d{0,5})/)?([^/]+)")
_OF_CHUNK = frozenset({"root", "committed_len"})
_OF_ROUND = frozenset({"path", "bonus", "emitted", "root", "committed_len"})
_BY_VERB = {
    "build": frozenset({"build_parents", "build_tokens"}),
    "snapshot": frozenset({"cache_tokens", "cache_positions", "cache_c_kv", "cache_k_pe"}),
}
_AGAIN = (
    "expected what the engine wrote: copy the file again, whole, or let the engine answer the "
    "questions again"
)
_INSTEAD = {
    "questions": "these are the questions: let the engine answer them",
    "golden": "give it as --against, and here the file that the engine wrote",
}


@dataclass(frozen=True, slots=True)
class PointAnswers:
    """What the file holds of one chunk or round.

    values  answers by name: what the point must have, and what `build` and `snapshot` show
    stages  of the forward and of the walk, by (name, layer)
    error   the engine's own words for why it stopped here, or None
    """

    values: dict[str, np.ndarray] = field(default_factory=dict)
    stages: dict[tuple[str, int | None], np.ndarray] = field(default_factory=dict)
    error: str | None = None


class Answers:
    """`info`, and the answers by case and point.

    Raises BundleError for a file that is cut, damaged or no KDTR file, and EngineError for one of
    another form; both name the file.
    """

    def __init__(self, path: str | os.PathLike[str], golden: GoldenBundle) -> None:
        try:
            with Bundle.open(path) as bundle:
                bundle.verify()
                metadata = bundle.metadata
                found = {name: np.array(bundle[name]) for name in bundle.names()}
        except BundleError as error:  # with the path
            raise BundleError(f"{error}; {_AGAIN}") from None
        self.cases: dict[str, dict[str, PointAnswers]] = {}
        try:
            self.info = _info(metadata)
            _check_id(found.pop(ID, None), golden)
            inputs = {case.inputs.alias: case.inputs for case in golden.cases}
            for name, array in found.items():
                self._keep(name, array, inputs)
        except EngineError as error:
            raise EngineError(f"{os.fspath(path)}: {error}") from None

    def _keep(self, name: str, array: np.ndarray, inputs: Mapping[str, CaseInput]) -> None:
        split = _NAME.fullmatch(name)
        case = inputs.get(split[1]) if split else None
        if split is None or case is None or split[2] not in case.points():
            raise EngineError(
                f"{name!r} answers no question; expected {ID}, and answer/<case>/<point>/<stage> "
                "for the cases and points of the questions"
            )
        points = self.cases.setdefault(case.alias, {})
        at = points.setdefault(split[2], PointAnswers())
        stage, layer = split[4], None if split[3] is None else int(split[3])
        if stage == ERROR and layer is None:
            points[split[2]] = PointAnswers(at.values, at.stages, _text(name, array))
            return
        needed = _OF_CHUNK if split[2].startswith("chunk") else _OF_ROUND
        by_verb = {one for verb in _BY_VERB.keys() & self.info.verbs for one in _BY_VERB[verb]}
        is_value = layer is None and stage in needed | by_verb
        if not is_value and stage not in self.info.stages:
            _refuse_undeclared(name, stage)
        if is_value:
            at.values[stage] = array
        if stage in self.info.stages:
            at.stages[stage, layer] = array


def missing(point: str, answers: PointAnswers) -> str:
    """What a point lacks of what each must have, as text; "" where it lacks nothing."""
    needed = _OF_CHUNK if point.startswith("chunk") else _OF_ROUND
    return ", ".join(sorted(needed - answers.values.keys()))


def _info(metadata: Mapping[str, object]) -> EngineInfo:
    kind, engine = metadata.get("kind"), metadata.get("engine")
    if kind != ANSWERS:
        instead = _INSTEAD.get(str(kind), "the file that the engine wrote (docs/offline.md)")
        raise EngineError(f"kind = {kind!r} in the metadata; expected {ANSWERS!r}; {instead}")
    if not isinstance(engine, dict):
        raise EngineError(
            f"engine = {engine!r} in the metadata; expected what `hello` answers over stdio "
            "(docs/offline.md)"
        )
    try:
        reply = read_reply("hello", {"id": VERSION, "ok": engine})
        info = info_of(reply.fields)
    except EngineError as error:
        raise EngineError(f"engine in the metadata: {error}") from None
    unknown = sorted(info.stages - TRACED)
    if unknown:
        raise EngineError(
            f"engine in the metadata: {unknown[0]!r} in stages is no stage (contract/stages.py)"
        )
    return info


def _check_id(found: np.ndarray | None, golden: GoldenBundle) -> None:
    if found is None:
        raise EngineError(f"{ID} is missing; copy the tensor of that name from the questions")
    if not np.array_equal(found, questions_id(golden)):
        raise EngineError(
            f"{ID} is not that of {golden.path}: these are answers to other questions; judge them "
            "against the bundle that they were asked from, or ask again with `kdtr questions`"
        )


def _refuse_undeclared(name: str, stage: str) -> None:
    verb = next((verb for verb, stages in _BY_VERB.items() if stage in stages), None)
    if verb is not None:
        raise EngineError(f"{name} is there, but {verb!r} is not in the engine's verbs; add it")
    if stage not in STAGE:
        raise EngineError(f"{name}: {stage!r} is no stage (contract/stages.py)")
    if STAGE[stage].source is Source.JUDGE:
        raise EngineError(f"{name} is found by the judge, from snapshots; leave it out")
    raise EngineError(f"{name} is there, but {stage!r} is not in the engine's stages; add it")


def _text(name: str, array: np.ndarray) -> str:
    if array.dtype != np.uint8 or array.ndim != 1:
        raise EngineError(f"{name} is {array.dtype} {list(array.shape)}; expected UTF-8, u8 [n]")
    return array.tobytes().decode(errors="replace")
