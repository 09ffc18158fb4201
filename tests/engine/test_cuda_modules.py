"""What kernels are compiled with, and how often, without a device."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from cuda_stand_in import StandIn

from kdtr.engine import cuda_compile, cuda_modules
from kdtr.engine.cuda_modules import KERNELS, Modules


def test_a_header_that_changed_makes_other_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy knows a binary on disk by these and by the .cu file, which includes the headers."""
    before = cuda_modules.options("bfloat16")
    found = {}
    for name, text in (("same", ""), ("changed", "\n// other")):
        folder = tmp_path / name / "kernels"
        shutil.copytree(KERNELS, folder)
        header = folder / "common.cuh"
        header.write_text(header.read_text() + text)
        monkeypatch.setattr(cuda_modules, "KERNELS", folder)
        found[name] = cuda_modules.options("bfloat16")

    def headers(options: tuple[str, ...]) -> set[str]:
        return {option for option in options if option.startswith("-DHEADERS=")}

    assert headers(before) == headers(found["same"]) != headers(found["changed"])


def test_everything_is_compiled_with_the_same_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """By CuPy, for Hopper alone, and where the kernels are compiled without a device."""
    asked: dict[str, set[tuple[str, ...]]] = {"CuPy": set(), "Hopper": set(), "gate": set()}
    cupy = StandIn()

    class RawModule(cupy.RawModule):  # type: ignore[misc]
        def __init__(self, options: tuple[str, ...] = (), **others: Any) -> None:
            super().__init__(**others)
            if options:
                asked["CuPy"].add(options)

    def compiling(who: str) -> Any:
        def compile_program(_: Any, options: tuple[str, ...]) -> None:
            architecture = [word for word in options if word.startswith("-arch=")]
            asked[who].add(tuple(w for w in options if w not in (*architecture, VERBOSE)))
            assert 1 == len(architecture)

        return compile_program

    cupy.RawModule = RawModule
    cupy.cuda.nvrtc.compileProgram = compiling("Hopper")
    Modules(cupy, "bfloat16")
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    monkeypatch.setattr(nvrtc, "compileProgram", compiling("gate"))
    cuda_compile.compiled("tree", "bfloat16", "sm_120")

    (options,) = asked["CuPy"]
    assert {"Hopper": {options}, "gate": {options}, "CuPy": {options}} == asked
    assert "-ftz=true" in options  # CuPy adds it to its own, whatever is asked for


VERBOSE = "--ptxas-options=-v"


def test_a_kernel_for_hopper_is_compiled_once() -> None:
    cupy, names, paths = StandIn(), [], []

    class RawModule(cupy.RawModule):  # type: ignore[misc]
        def __init__(self, path: str = "", **others: Any) -> None:
            super().__init__(**others)
            if path:
                paths.append(path)
                assert Path(path).exists()

    cupy.RawModule = RawModule
    cupy.cuda.nvrtc.createProgram = lambda _, name, *__: names.append(name)
    for _ in range(3):
        Modules(cupy, "bfloat16")

    assert ["verify_attn_wgmma.cu", "linear_wgmma.cu"] == names
    assert 6 == len(paths)
    assert 2 == len(set(paths))  # CuPy keeps what it has loaded by path
    assert all(Path(path).exists() for path in paths)
