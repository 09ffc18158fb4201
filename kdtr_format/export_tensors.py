"""A model's tensors as an export wants them: per expert or stacked, one at a time, in one dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import numpy as np

from kdtr.contract import CheckpointError, check_tensors, has_stacked_experts, tensor_shapes
from kdtr.kdtr_format.checkpoint import WEIGHT_DTYPES
from kdtr.kdtr_format.model_source import OpenModel

EXPORT_DTYPES = {dtype.name: dtype for dtype in WEIGHT_DTYPES.values()}
_EXPERTS = ".mlp.experts."


class ExportTensors(Mapping[str, np.ndarray]):
    """The tensors of `tensor_shapes`, whatever the source's layout of the experts; read when asked.

    shapes   name -> shape, in the order of the forward
    dropped  the source's names that no forward uses: rotary buffers, multi-token prediction

    Raises CheckpointError when the source's tensors do not fit its configuration.
    """

    def __init__(self, model: OpenModel, *, stacked: bool) -> None:
        check_tensors(model.config, model.shapes)
        self.shapes = tensor_shapes(model.config, stacked_experts=stacked)
        source_stacked = has_stacked_experts(model.shapes)
        used = tensor_shapes(model.config, stacked_experts=source_stacked)
        self.dropped = sorted(set(model.shapes) - set(used))
        self._n_experts = model.config.n_routed_experts
        self._source_stacked = source_stacked
        self._restacked = stacked != source_stacked
        # two: in the order of names an expert's parts alternate between two stacked tensors
        self._read = lru_cache(maxsize=2)(model.tensors.__getitem__)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.shapes:
            raise KeyError(name)
        prefix, experts, part = name.partition(_EXPERTS)
        if not experts or not self._restacked:
            return _checked(name, self._read(name))
        prefix += experts
        if self._source_stacked:
            return self._of_one(prefix, part)
        return self._of_all(prefix, part)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def _of_one(self, prefix: str, part: str) -> np.ndarray:
        """`3.up_proj.weight` out of the stacked tensors."""
        expert, projection, _ = part.split(".")
        stacked = prefix + ("down_proj" if projection == "down_proj" else "gate_up_proj")
        rows = _checked(stacked, self._read(stacked))[int(expert)]
        if projection == "down_proj":
            return rows
        gate, up = np.split(rows, 2)
        return gate if projection == "gate_proj" else up

    def _of_all(self, prefix: str, part: str) -> np.ndarray:
        """`gate_up_proj` or `down_proj` of all experts [e, out, in], gate before up."""
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        names = [
            [f"{prefix}{expert}.{projection}.weight" for projection in parts]
            for expert in range(self._n_experts)
        ]
        return np.stack(
            [np.concatenate([_checked(n, self._read(n)) for n in of_one]) for of_one in names]
        )


class ConvertedTensors(Mapping[str, np.ndarray]):
    """The same tensors in another dtype; each access converts and checks."""

    def __init__(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype, rounding: bool) -> None:
        self._tensors, self._dtype, self._rounding = tensors, dtype, rounding

    def __getitem__(self, name: str) -> np.ndarray:
        return converted(name, self._tensors[name], self._dtype, self._rounding)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def export_dtype(name: str | None) -> np.dtype | None:
    """The dtype of that name; None stays None: every tensor keeps its own."""
    if name is None:
        return None
    if name not in EXPORT_DTYPES:
        raise CheckpointError(f"dtype {name!r}; expected {', '.join(EXPORT_DTYPES)}, or none")
    return EXPORT_DTYPES[name]


def converted(name: str, array: np.ndarray, dtype: np.dtype, rounding: bool) -> np.ndarray:
    """The array in `dtype`; a CheckpointError unless that is exact, or `rounding` allows it.

    A finite value that would become infinite is refused in any case: that is no rounding.
    """
    if array.dtype == dtype:
        return array
    wide = array.astype(np.float32)  # exact: the three dtypes all fit
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = wide.astype(dtype)
        back = narrow.astype(np.float32)
    infinite = np.isinf(back) & np.isfinite(wide)
    if infinite.any():
        raise CheckpointError(
            f"tensor {name!r}: {_first(wide, back, infinite)} exceeds {dtype.name}; "
            f"expected another dtype"
        )
    inexact = (wide != back) & ~(np.isnan(wide) & np.isnan(back))
    if inexact.any() and not rounding:
        raise CheckpointError(
            f"tensor {name!r}: {np.count_nonzero(inexact)} of {wide.size} values are not exact in "
            f"{dtype.name}, {_first(wide, back, inexact)}; choose another dtype, or allow rounding "
            f"(--round)"
        )
    return narrow


def _first(wide: np.ndarray, back: np.ndarray, chosen: np.ndarray) -> str:
    index = tuple(int(i) for i in np.argwhere(chosen)[0])
    return f"at {list(index)} {float(wide[index])!r} -> {float(back[index])!r}"


def _checked(name: str, array: np.ndarray) -> np.ndarray:
    array = np.asarray(array)
    if array.dtype.newbyteorder("=") not in EXPORT_DTYPES.values():
        raise CheckpointError(
            f"tensor {name!r} has dtype {array.dtype}; expected {', '.join(EXPORT_DTYPES)}: "
            f"convert it first"
        )
    return array
