"""A golden bundle: a model, cases, and what the reference found at every stage.

Names: `config/...`, `weights/...` (kdtr_format/model.py), `input/<alias>/...` (case.py),
`expect/<alias>/<point>/<stage>` or `expect/<alias>/<point>/layer<i>/<stage>`, where a point is
`chunk<i>` or `round<i>`. Only `config/`, `weights/` and `input/` ever reach an engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.conformance.bundle_check import EXPERT_GAP, check_expectations, stage_name
from kdtr.conformance.case import CaseInput, RoundInput
from kdtr.contract import BundleError, DraftTree, EmitLimit, KdtrError, rules_version
from kdtr.kdtr_format import Bundle, read_model

CORPUS_VERSION = 1  # which cases exist and what they ask
GENERATOR_VERSION = 1  # how the same cases are recorded


class Expectation:
    """What the reference found at one point of a case: the judge's side, never an engine's."""

    def __init__(
        self,
        tensors: Mapping[str, np.ndarray],
        prefix: str,
        weights: Mapping[str, np.ndarray],
    ) -> None:
        self._tensors = tensors
        self._prefix = prefix
        self._weights = weights

    def get(self, stage: str, layer: int | None = None) -> np.ndarray | None:
        """The stage's array, or None where the point has no such stage."""
        return self._tensors.get(self._prefix + stage_name(stage, layer))

    def router_bias(self, layer: int) -> np.ndarray:
        """The correction bias [e] of a layer, float64."""
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        return self._weights[name].astype(np.float64)

    def expert_gap(self, layer: int) -> np.ndarray:
        """How far each row [n] is from another choice of experts (NUM-2)."""
        return self._tensors[self._prefix + stage_name(EXPERT_GAP, layer)]


@dataclass(frozen=True, slots=True, eq=False)
class GoldenCase:
    """A case's two sides, kept apart."""

    inputs: CaseInput
    _expected: Mapping[str, np.ndarray]
    _weights: Mapping[str, np.ndarray]

    def expectation(self, point: str) -> Expectation:
        prefix = f"expect/{self.inputs.alias}/{point}/"
        return Expectation(self._expected, prefix, self._weights)


class GoldenBundle:
    """An open golden bundle. Raises BundleError when the file is not one."""

    def __init__(self, path: Path, bundle: Bundle) -> None:
        self.path = path
        self._bundle = bundle
        metadata = bundle.metadata
        if metadata.get("kind") != "golden":
            raise BundleError(
                f"{path}: kind = {metadata.get('kind')!r}; expected a golden bundle, as "
                "`kdtr golden` writes it"
            )
        versions, model = metadata.get("versions"), metadata.get("model")
        found = versions.get("rules") if isinstance(versions, dict) else None
        if found != rules_version():
            raise BundleError(
                f"{path}: recorded under rules version {found}, this kdtr has "
                f"{rules_version()}; record it again with `kdtr golden`"
            )
        self.model_name = str(model.get("name") if isinstance(model, dict) else "unnamed")
        try:
            self.config, self.weights = read_model(bundle.view("config/", "weights/"))
            self.cases = tuple(
                GoldenCase(
                    _read_case(path, bundle, entry),
                    bundle.view(f"expect/{entry['alias']}/"),
                    self.weights,
                )
                for entry in metadata["cases"]
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise BundleError(
                f"{path}: the list of cases is malformed ({error!r}); record it again with "
                "`kdtr golden`"
            ) from error
        inputs = tuple(case.inputs for case in self.cases)
        try:
            check_expectations(self.config, inputs, bundle.view("expect/"))
        except BundleError as error:
            raise BundleError(f"{path}: {error}") from error

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GoldenBundle:
        bundle = Bundle.open(path)
        try:
            bundle.verify()
            return cls(Path(path), bundle)
        except BaseException:
            bundle.close()
            raise

    def close(self) -> None:
        self._bundle.close()


def _read_case(path: Path, bundle: Bundle, entry: Mapping[str, object]) -> CaseInput:
    alias = str(entry["alias"])
    prefix = f"input/{alias}/"
    tensors = bundle.view(prefix)

    def integers(name: str) -> tuple[int, ...]:
        array = tensors[prefix + name]
        if array.dtype != np.int64 or array.ndim != 1:
            raise BundleError(
                f"{path}: {prefix}{name} is {array.dtype} {list(array.shape)}; expected int64 [n]"
            )
        return tuple(array.tolist())

    def number(name: str) -> int | None:
        if prefix + name not in tensors:
            return None
        array = tensors[prefix + name]
        if array.dtype != np.int64 or array.ndim != 0:
            raise BundleError(
                f"{path}: {prefix}{name} is {array.dtype} {list(array.shape)}; expected int64 []"
            )
        return int(array)

    def round_input(i: int) -> RoundInput:
        at = f"round{i}/"
        tokens, parents = integers(at + "tokens"), integers(at + "parents")
        try:
            tree = DraftTree(tokens, parents)
        except KdtrError as error:
            raise BundleError(f"{path}: {prefix}{at}: {error}") from error
        logits = tensors.get(prefix + at + "draft_logits")
        stops = integers(at + "stop_tokens") if prefix + at + "stop_tokens" in tensors else ()
        limit = EmitLimit(frozenset(stops), number(at + "max_emitted"))
        return RoundInput(tree, logits, number(at + "budget"), limit)

    def count(point: str) -> int:
        i = 0
        while f"{prefix}{point}{i}/tokens" in tensors:
            i += 1
        return i

    max_len = number("max_len")
    if max_len is None:
        raise BundleError(f"{path}: {prefix}max_len is missing; expected a number of slots")
    return CaseInput(
        alias=alias,
        why=str(entry["why"]),
        rules=tuple(str(rule) for rule in entry["rules"]),  # type: ignore[attr-defined]
        chunks=tuple(integers(f"chunk{i}/tokens") for i in range(count("chunk"))),
        root=number("root"),
        rounds=tuple(round_input(i) for i in range(count("round"))),
        max_len=max_len,
        level=str(entry["level"]),
        case_id=str(entry["id"]),
    )
