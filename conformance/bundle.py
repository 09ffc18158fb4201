"""A golden bundle: a model, cases, and what the reference found at every stage.

Names: `config/...`, `weights/...` (kdtr_format/model.py), `input/<alias>/...` (case.py),
`expect/<alias>/<point>/<stage>` or `expect/<alias>/<point>/layer<i>/<stage>`, where a point is
`chunk<i>` or `round<i>`. Only `config/`, `weights/` and `input/` ever reach an engine.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.conformance.bundle_agreement import check_agreement
from kdtr.conformance.bundle_case import read_case
from kdtr.conformance.bundle_check import EXPERT_GAP, check_expectations, stage_name
from kdtr.conformance.case import CaseInput
from kdtr.contract import BundleError, KdtrError, check_tensors, rules_version
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

    def weight(self, name: str) -> np.ndarray:
        """A tensor of the model, float64. Raises KeyError where the model has none of the name."""
        return self._weights[name].astype(np.float64)

    def expert_gap(self, layer: int) -> np.ndarray:
        """How far each row [n] is from another choice of experts (NUM-2)."""
        return self._tensors[self._prefix + stage_name(EXPERT_GAP, layer)]

    def replaced(self, tensors: Mapping[str, np.ndarray]) -> Expectation:
        """The same point of the same model with other arrays, `layer<i>/<stage>`, and no more."""
        return Expectation(tensors, "", self._weights)


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
            self._check_model(model)
            self.cases = tuple(self._cases(metadata.get("cases"), bundle))
            inputs = tuple(case.inputs for case in self.cases)
            expected = bundle.view("expect/")
            check_expectations(self.config, inputs, expected)
            _check_names(bundle, {case.alias for case in inputs})
            for case, entry in zip(inputs, metadata["cases"], strict=True):
                check_agreement(self.config, case, entry["thin"], expected, self.weights)
        except KdtrError as error:
            raise BundleError(f"{path}: {error}") from error

    def _check_model(self, model: object) -> None:
        """The weights fit the configuration, are finite, and are those that were recorded."""
        check_tensors(self.config, {name: array.shape for name, array in self.weights.items()})
        for name, array in self.weights.items():
            if not np.isfinite(array.astype(np.float32)).all():
                raise BundleError(f"weights/{name} holds NaN or infinity; expected finite numbers")
        recorded = model.get("weights_sha256") if isinstance(model, dict) else None
        self.weights_sha256 = weights_sha256(self.weights)
        if recorded != self.weights_sha256:
            raise BundleError(
                f"model.weights_sha256 = {recorded!r}, the weights give {self.weights_sha256}; "
                "record the bundle again"
            )

    def _cases(self, entries: object, bundle: Bundle) -> Iterator[GoldenCase]:
        if not isinstance(entries, list) or not entries:
            raise BundleError(f"cases = {entries!r}; expected a list of cases")
        inputs = bundle.view("input/")
        seen: set[str] = set()
        for entry in entries:
            case = read_case(self.config, entry, inputs, self.weights_sha256)
            if case.alias in seen:
                raise BundleError(f"case {case.alias} is listed twice")
            seen.add(case.alias)
            yield GoldenCase(case, bundle.view(f"expect/{case.alias}/"), self.weights)

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


def weights_sha256(weights: Mapping[str, np.ndarray]) -> str:
    """Identity of a set of tensors: names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        array = np.ascontiguousarray(weights[name])
        digest.update(f"{name} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")
    return digest.hexdigest()


def _check_names(bundle: Bundle, aliases: set[str]) -> None:
    for name in bundle.names():
        part, _, rest = name.partition("/")
        known = part in ("config", "weights")
        if not known and not (part in ("input", "expect") and rest.partition("/")[0] in aliases):
            raise BundleError(f"{name} belongs to no model and no case; remove it")
