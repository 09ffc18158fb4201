"""The factory: options, what the engine says of itself, and loading."""

from __future__ import annotations

from importlib import metadata

from kdtr.contract import (
    TRACED,
    VERBS,
    EngineError,
    EngineInfo,
    ModelSource,
    NumericProfile,
    UnsupportedError,
)
from kdtr.engine.checkpoint_weights import prepare_weights
from kdtr.engine.checks import integer
from kdtr.engine.forward import Forward
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import KernelSet
from kdtr.engine.model import TreeModel
from kdtr.kdtr_format import open_model

_NOT_OFFERED = {"verify_batch", "commit_batch"}


def make_engine(*, kernels: str = "host", page_size: int = 16, split_size: int = 64) -> TreeEngine:
    """An engine of this package.

    kernels     "host": NumPy, float32
    page_size   slots per page of the cache
    split_size  slots per split of the attention; the result depends on it by rounding only
    Raises EngineError for an impossible option, UnsupportedError for "cuda".
    """
    for name, value in (("page_size", page_size), ("split_size", split_size)):
        if integer(name, value, EngineError) < 1:
            raise EngineError(f"{name} = {value}; expected at least 1")
    return TreeEngine(_kernel_set(kernels), page_size=page_size, split_size=split_size)


class TreeEngine:
    """An `Engine` of the contract over one kernel set."""

    def __init__(self, kernels: KernelSet, *, page_size: int, split_size: int) -> None:
        self._kernels = kernels
        self._page_size = page_size
        self._split_size = split_size

    @property
    def info(self) -> EngineInfo:
        """Not batch invariant: BLAS chooses its summation order by the number of rows."""
        return EngineInfo(
            name="kdtr.engine",
            version=_version(),
            device=self._kernels.device,
            profile=NumericProfile(deterministic=True, batch_invariant=False),
            verbs=frozenset(VERBS) - _NOT_OFFERED,
            stages=TRACED,
        )

    @property
    def kernels(self) -> KernelSet:
        """What computes. Whoever wants to observe or break one operation wraps it here."""
        return self._kernels

    def load(self, source: ModelSource) -> TreeModel:
        """Read, check and prepare the weights, once."""
        opened = open_model(source)
        weights = prepare_weights(opened, self._kernels.upload)
        forward = Forward(self._kernels, opened.config, weights, self._split_size)
        return TreeModel(forward, page_size=self._page_size)


def _kernel_set(kernels: str) -> KernelSet:
    if kernels == "host":
        return HostKernels()
    if kernels == "cuda":
        raise UnsupportedError(
            "kernels = 'cuda': CUDA kernels are not in this version; use kernels = 'host'"
        )
    raise EngineError(f"kernels = {kernels!r}; expected 'host'")


def _version() -> str:
    try:
        return metadata.version("kdtr")
    except metadata.PackageNotFoundError:
        return "unknown (kdtr is not installed)"
