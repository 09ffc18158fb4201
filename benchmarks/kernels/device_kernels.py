"""Kernels of the project, by name, for the benchmarks beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from table_head import cupy_or_exit

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_modules import HOPPER_FILES, KERNELS, options

_STORAGE = {"f32": "float32", "bf16": "bfloat16"}


class Kernels:
    """Compiled when they are first asked for.

    hopper  whether the device is a Hopper, and its own kernels are wanted
    """

    def __init__(self, *, hopper: bool = True) -> None:
        self.cp = cp = cupy_or_exit()
        self.hopper = hopper and cp.cuda.Device().compute_capability == "90"
        self._modules: dict[tuple[str, str], Any] = {}
        self._kernels: dict[tuple[str, str, str], Any] = {}

    def getter(self, file: str, dtype: str) -> Callable[[str], Any]:
        """The entry points of kernels/<file>.cu, by name; dtype: f32 or bf16, what is stored."""
        if (file, dtype) not in self._modules:
            path, flags = KERNELS / f"{file}.cu", options(_STORAGE[dtype])
            if file in HOPPER_FILES:
                module = cuda_hopper.compiled(self.cp, path.read_text(), path.name, flags)
            else:
                module = self.cp.RawModule(code=path.read_text(), options=flags)
            self._modules[file, dtype] = module

        def get(name: str) -> Any:
            key = file, dtype, name
            if key not in self._kernels:
                self._kernels[key] = self._modules[file, dtype].get_function(name)
            return self._kernels[key]

        return get
