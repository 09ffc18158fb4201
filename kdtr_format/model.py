"""A model inside a bundle: `config/...` scalars and `weights/...` tensors.

Every field is a tensor, so a C program reads the model without a JSON parser. A field that is
null in the configuration is absent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

import numpy as np

from kdtr.contract import SIGMOID, SOFTMAX, BundleError, ModelConfig, Yarn

CONFIG, WEIGHTS = "config/", "weights/"
_YARN = CONFIG + "yarn/"
_SCORING = (SIGMOID, SOFTMAX)  # stored as an index
_OPTIONAL_YARN = tuple(f.name for f in fields(Yarn) if f.default is not MISSING)
_DTYPE = {"int": "int64", "float": "float64", "bool": "bool"}  # of a field, by its annotation


def config_tensors(config: ModelConfig) -> dict[str, np.ndarray]:
    """`config/<field>`: int64, float64 or bool, each of shape []; scoring_func as 0 or 1.

    0 is sigmoid, 1 softmax. YaRN's keys are `config/yarn/<key>`.
    """
    tensors = _scalars(CONFIG, config, skip=("scoring_func", "yarn"))
    tensors[CONFIG + "scoring_func"] = np.array(_SCORING.index(config.scoring_func))
    if config.yarn is not None:
        tensors.update(_scalars(_YARN, config.yarn, skip=()))
    return tensors


def read_model(
    tensors: Mapping[str, np.ndarray],
) -> tuple[ModelConfig, Mapping[str, np.ndarray]]:
    """The configuration and the weights, under their checkpoint names, of a bundle or a view.

    Raises BundleError when the bundle holds no model, and ConfigError for impossible values.
    """
    names = {name[len(CONFIG) :] for name in tensors if name.startswith(CONFIG)}
    if not names:
        raise BundleError("the bundle holds no config/... tensors; expected a model")
    values = _values(tensors, CONFIG, {name for name in names if "/" not in name}, ModelConfig)
    scoring = values.get("scoring_func")
    if isinstance(scoring, bool) or scoring not in (0, 1):
        raise BundleError(f"config/scoring_func = {scoring}; expected 0 (sigmoid) or 1 (softmax)")
    values["scoring_func"] = _SCORING[scoring]
    values.setdefault("q_lora_rank", None)
    inner = {name[len("yarn/") :] for name in names if name.startswith("yarn/")}
    if inner:
        yarn = _values(tensors, _YARN, inner, Yarn)
        _check_complete(_YARN, yarn, Yarn, may_lack=_OPTIONAL_YARN)
        values["yarn"] = Yarn(**yarn)
    _check_complete(CONFIG, values, ModelConfig, may_lack=("yarn",))
    return ModelConfig(**values), _Renamed(tensors, WEIGHTS)


def _scalars(prefix: str, holder: Any, *, skip: tuple[str, ...]) -> dict[str, np.ndarray]:
    tensors = {}
    for field in fields(holder):
        value = getattr(holder, field.name)
        if value is not None and field.name not in skip:
            tensors[prefix + field.name] = np.array(value)
    return tensors


def _values(
    tensors: Mapping[str, np.ndarray], prefix: str, names: set[str], holder: type
) -> dict[str, Any]:
    known = {field.name: str(field.type).partition(" | ")[0] for field in fields(holder)}
    values: dict[str, Any] = {}
    for name in sorted(names):
        array = tensors[prefix + name]
        if name not in known:
            raise BundleError(f"{prefix}{name} is no field of {holder.__name__}; remove it")
        dtype = "int64" if name == "scoring_func" else _DTYPE[known[name]]
        if array.shape != () or array.dtype.name != dtype:
            raise BundleError(
                f"{prefix}{name} is {array.dtype} {list(array.shape)}; expected one {dtype}, []"
            )
        values[name] = array.item()
        if dtype == "float64" and not math.isfinite(values[name]):
            raise BundleError(f"{prefix}{name} = {values[name]}; expected a finite number")
    return values


def _check_complete(
    prefix: str, values: Mapping[str, Any], holder: Any, *, may_lack: tuple[str, ...]
) -> None:
    missing = [
        prefix + field.name
        for field in fields(holder)
        if field.name not in values and field.name not in may_lack
    ]
    if missing:
        raise BundleError(f"the bundle lacks {', '.join(missing)}")


class _Renamed(Mapping[str, np.ndarray]):
    """The tensors under a prefix, without it."""

    def __init__(self, tensors: Mapping[str, np.ndarray], prefix: str) -> None:
        self.__tensors = tensors
        self.__prefix = prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self.__tensors[self.__prefix + name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.__prefix + name in self.__tensors

    def __iter__(self) -> Iterator[str]:
        start = len(self.__prefix)
        return (name[start:] for name in self.__tensors if name.startswith(self.__prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)
