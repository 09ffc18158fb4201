"""`kdtr golden-check`: the corpus is the same bytes whatever computes it.

Each environment is a child process that first proves itself what it claims to be: NumPy ignores
the name of a CPU feature that it does not know, and OpenBLAS that of a kernel.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kdtr.conformance.golden_corpus import check_corpus, read_sums
from kdtr.contract import KdtrError

_CPU = np._core._multiarray_umath  # type: ignore[attr-defined]
AVX512 = ("X86_V4", "AVX512_ICL", "AVX512_SPR")
# Names that OpenBLAS reports as it is asked for them.
_KERNELS = ("Haswell", "Nehalem", "Sandybridge", "SkylakeX")


class EnvironmentFault(KdtrError):
    """A child that does not run in the environment that was asked for."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Threads and kernel of OpenBLAS (None: as it comes), and CPU features switched off."""

    name: str
    threads: int | None = None
    kernel: str | None = None
    off: tuple[str, ...] = ()

    def variables(self) -> dict[str, str]:
        values = {
            "OPENBLAS_NUM_THREADS": "" if self.threads is None else str(self.threads),
            "OPENBLAS_CORETYPE": self.kernel or "",
            "NPY_DISABLE_CPU_FEATURES": ",".join(self.off),
        }
        return {name: value for name, value in values.items() if value}


def environments() -> tuple[Environment, ...]:
    """What this machine can be asked to be."""
    present = tuple(name for name in _CPU.__cpu_dispatch__ if _CPU.__cpu_features__.get(name))
    wide = tuple(name for name in AVX512 if name in present)
    mine = blas_kernel()
    others = [kernel for kernel in _KERNELS if kernel != mine][:2]
    return (
        Environment("1 thread", threads=1),
        Environment("2 threads", threads=2),
        *(Environment(f"OpenBLAS {kernel}", kernel=kernel) for kernel in others),
        Environment(f"without {' '.join(present) or 'dispatch'}", off=present),
        Environment(f"without {' '.join(wide) or 'AVX-512, which is absent'}", off=wide),
    )


def check_everywhere(directory: Path, show: Callable[[str], None] = print) -> bool:
    """Compare the corpus in every environment, one after another; whether all agree.

    A feature that this machine lacks is said: it cannot be switched off, and is not.
    """
    read_sums(directory)  # a wrong directory is refused before minutes of work
    lacking = [name for name in AVX512 if not _CPU.__cpu_features__.get(name)]
    if lacking:
        show(f"not on this machine: {', '.join(lacking)}")
    agreed = True
    for environment in environments():
        variables = dict(os.environ)
        for name in ("OPENBLAS_NUM_THREADS", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES"):
            variables.pop(name, None)
        command = [sys.executable, "-m", "kdtr.conformance.golden_check", str(directory)]
        command += [environment.kernel or "-", *environment.off]
        child = subprocess.run(
            command, env={**variables, **environment.variables()}, capture_output=True, text=True
        )
        lines = (child.stdout + child.stderr).strip().splitlines()
        show(f"{environment.name}: {'same bytes' if child.returncode == 0 else 'DIFFERS'}")
        for line in lines:
            show(f"  {line}")
        agreed = agreed and child.returncode == 0
    return agreed


def blas_kernel() -> str:
    """The kernel that NumPy's OpenBLAS runs, or "" where there is no such library."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        return ""
    for line in maps.read_text(encoding="utf-8").splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if "openblas" in path:
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_get_corename64_", "openblas_get_corename"):
                if hasattr(library, name):
                    ask = getattr(library, name)
                    ask.restype = ctypes.c_char_p
                    return str(ask().decode())
    return ""


def _prove(kernel: str, off: Sequence[str]) -> None:
    still_on = [name for name in off if _CPU.__cpu_features__.get(name)]
    if still_on:
        raise EnvironmentFault(f"{', '.join(still_on)} are still on; expected them off")
    if kernel != "-" and blas_kernel() != kernel:
        raise EnvironmentFault(f"OpenBLAS runs {blas_kernel()!r}; expected {kernel!r}")


def main(directory: str, kernel: str, *off: str) -> int:
    """One child: prove the environment, record the corpus and compare."""
    try:
        _prove(kernel, off)
        differences = check_corpus(Path(directory))
    except KdtrError as error:
        print(f"{type(error).__name__}: {error}")
        return 2
    for difference in differences:
        print(difference)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
