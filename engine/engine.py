"""The factories: options, what the engine says of itself, and loading."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from kdtr.contract import (
    TRACED,
    VERBS,
    EngineError,
    EngineInfo,
    ModelSource,
)
from kdtr.engine.checkpoint_weights import prepare_weights
from kdtr.engine.checks import integer
from kdtr.engine.cuda_kernels import CudaKernels
from kdtr.engine.cuda_modules import CUDA_DTYPES
from kdtr.engine.forward import Forward
from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import KernelSet
from kdtr.engine.model import TreeModel
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.rounding import STORAGE_DTYPES
from kdtr.engine.shuffled_kernels import ShuffledKernels
from kdtr.kdtr_format import open_model

_NOT_OFFERED = {"verify_batch", "commit_batch"}


def make_engine(
    *,
    dtype: str = "float32",
    summation: str = "blas",
    summation_seed: int = 0,
    page_size: int = 16,
    split_size: int = 64,
) -> TreeEngine:
    """An engine of this package that computes with NumPy.

    dtype           what it stores weights, activations, latents and logits in: "float32", or
                    "bfloat16" or "float16", emulated (`rounded_kernels.py`); it sums in float32
    summation       "blas", or "shuffled": the same sums in another order (`shuffled_kernels.py`)
    summation_seed  which order, when shuffled
    page_size       slots per page of the cache
    split_size      slots per split of the attention; the result depends on it by rounding only
    Raises EngineError for an impossible option.
    """
    _at_least(page_size=(page_size, 1), split_size=(split_size, 1))
    _at_least(summation_seed=(summation_seed, 0))
    _one_of("dtype", dtype, STORAGE_DTYPES)
    _one_of("summation", summation, ("blas", "shuffled"))
    float32 = HostKernels() if summation == "blas" else ShuffledKernels(summation_seed)
    return TreeEngine(
        float32 if dtype == "float32" else RoundedKernels(float32, dtype),
        variant=_variant(dtype, summation, summation_seed),
        page_size=page_size,
        split_size=split_size,
    )


def make_cuda_engine(
    *,
    dtype: str = "float32",
    graphs: bool = True,
    guarded: bool = False,
    page_size: int = 64,
    split_size: int = 64,
) -> TreeEngine:
    """An engine of this package that computes with CUDA kernels, on the current device.

    dtype       what it stores weights, activations, latents and logits in: "float32" or "bfloat16";
                it sums in float32
    graphs      whether verify, decode and round are captured as CUDA graphs
    guarded     whether buffers lie between guard bands, checked after each run: for gates and hunts
    page_size   slots per page of the cache; the fast attention wants a multiple of 32
    split_size  slots per split of the attention, where the fast one does not choose by itself
    Raises EngineError for an impossible option and for a kernel that does not compile;
    UnsupportedError without CuPy, without a device, and for a device that is too old.
    """
    _at_least(page_size=(page_size, 1), split_size=(split_size, 1))
    _one_of("dtype", dtype, CUDA_DTYPES)
    for name, value in (("graphs", graphs), ("guarded", guarded)):
        if not isinstance(value, bool):
            raise EngineError(f"{name} = {value!r}; expected True or False")
    kernels = CudaKernels(dtype, graphs=graphs, guarded=guarded)
    return TreeEngine(
        kernels,
        variant=", ".join(
            [dtype] * (dtype != "float32") + ["graphs off"] * (not graphs) + ["guarded"] * guarded
        ),
        page_size=page_size,
        split_size=split_size,
    )


class TreeEngine:
    """An `Engine` of the contract over one kernel set.

    variant  how its numbers differ from the plain engine's, in words; shown after the name
    """

    def __init__(
        self, kernels: KernelSet, *, variant: str = "", page_size: int, split_size: int
    ) -> None:
        self._kernels = kernels
        self._variant = variant
        self._page_size = page_size
        self._split_size = split_size

    @property
    def info(self) -> EngineInfo:
        """What the kernel set says of its numbers, and what the session offers."""
        return EngineInfo(
            name=f"kdtr.engine ({self._variant})" if self._variant else "kdtr.engine",
            version=_version(),
            device=self._kernels.device,
            profile=self._kernels.profile,
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
        self._kernels.check_model(opened.config)
        weights = prepare_weights(opened, self._kernels)
        forward = Forward(self._kernels, opened.config, weights, self._split_size)
        return TreeModel(forward, page_size=self._page_size)


def _variant(dtype: str, summation: str, summation_seed: int) -> str:
    """In words; empty for the defaults."""
    storage = [] if dtype == "float32" else [dtype]
    order = [] if summation == "blas" else [f"sums shuffled by seed {summation_seed}"]
    return ", ".join(storage + order)


def _at_least(**options: tuple[int, int]) -> None:
    """Each option is (value, least)."""
    for name, (value, least) in options.items():
        if integer(name, value, EngineError) < least:
            raise EngineError(f"{name} = {value}; expected at least {least}")


def _one_of(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        *others, last = (repr(name) for name in allowed)
        raise EngineError(f"{option} = {value!r}; expected {', '.join(others)} or {last}")


@cache  # it reads and parses a file, and `info` is asked for again and again
def _version() -> str:
    try:
        return metadata.version("kdtr")
    except metadata.PackageNotFoundError:
        return "unknown (kdtr is not installed)"
