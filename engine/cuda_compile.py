"""Compiling the kernels for an architecture without a device, and what the compiler says of them.

`python -m kdtr.engine.cuda_compile` prints the table: registers, spills and shared memory of every
kernel for the architectures it must run on. The last is what a block may have on sm_120, or on
Hopper for what is Hopper's alone.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_cuts import RESERVED_BYTES
from kdtr.engine.cuda_modules import CUDA_DTYPES, HOPPER_FILES, KERNELS, files, options

ARCHITECTURES = ("sm_90", "sm_100", "sm_120")
MAX_SHARED_BYTES = 101_376  # a block's on sm_120, of which the system takes the next
MAX_HOPPER_SHARED_BYTES = 233_472  # likewise, of Hopper
MAX_SPILL_BYTES = 16
MAX_FRAME_BYTES = 64  # sinf takes 40

_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


class CompileError(Exception):
    """NVRTC refused a file; the message is its log."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes on one architecture, as ptxas reports it.

    frame_bytes  in local memory: what is spilled, and arrays that an index keeps out of registers
    """

    kernel: str
    registers: int
    spill_bytes: int
    frame_bytes: int
    static_shared_bytes: int


def everything() -> Iterator[tuple[str, str, str]]:
    """What must compile: dtype, file, architecture."""
    for dtype in CUDA_DTYPES:
        for file in files(dtype):
            for architecture in ARCHITECTURES:
                yield dtype, file, architecture
    for file in HOPPER_FILES:
        yield "bfloat16", file, cuda_hopper.ARCHITECTURE


def within_limits(kernel: Resources, architecture: str) -> bool:
    """Whether a block has the shared memory, and local memory costs next to nothing."""
    from kdtr.engine.cuda_shared import dynamic_shared_bytes

    hopper = architecture == cuda_hopper.ARCHITECTURE
    shared = kernel.static_shared_bytes + dynamic_shared_bytes(kernel.kernel) + RESERVED_BYTES
    most = MAX_HOPPER_SHARED_BYTES if hopper else MAX_SHARED_BYTES
    local = kernel.spill_bytes <= MAX_SPILL_BYTES and kernel.frame_bytes <= MAX_FRAME_BYTES
    return shared <= most and local


def compiled(file: str, dtype: str, architecture: str) -> list[Resources]:
    """Every kernel of kernels/<file>.cu."""
    return compiled_source((KERNELS / f"{file}.cu").read_text(), f"{file}.cu", dtype, architecture)


def compiled_source(source: str, name: str, dtype: str, architecture: str) -> list[Resources]:
    """Every kernel of a source text. Raises CompileError."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source, name, (), ())
    try:
        nvrtc.compileProgram(
            program, (f"-arch={architecture}", "--ptxas-options=-v", *options(dtype))
        )
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        raise CompileError(
            f"{name}, {dtype}, {architecture}: {error}\n{nvrtc.getProgramLog(program)}"
        ) from None
    finally:
        nvrtc.destroyProgram(program)
    return _resources(log)


def _resources(log: str) -> list[Resources]:
    found, kernel, spilled, frame = [], "", 0, 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, spilled, frame = entry[1], 0, 0
        elif spills := _SPILLS.search(line):
            frame, spilled = int(spills[1]), max(int(spills[2]), int(spills[3]))
        elif used := _USED.search(line):
            shared = _SHARED.search(used[2])
            static = int(shared[1]) if shared else 0
            found.append(Resources(kernel, int(used[1]), spilled, frame, static))
    return found


def main() -> int:
    """Prints the table; 1 if a kernel is over a limit or does not compile."""
    from kdtr.engine.cuda_shared import dynamic_shared_bytes

    bad = 0
    sizes = f"{'registers':>9} {'spills':>7} {'frame':>6} {'shared':>8}"
    print(f"{'kernel':32} {'dtype':9} {'for':7} {sizes}")
    for dtype, file, architecture in everything():
        for one in compiled(file, dtype, architecture):
            shared = one.static_shared_bytes + dynamic_shared_bytes(one.kernel)
            over = not within_limits(one, architecture)
            bad += over
            sizes = f"{one.registers:9} {one.spill_bytes:7} {one.frame_bytes:6} {shared:8}"
            note = "  over the limit" if over else ""
            print(f"{one.kernel:32} {dtype:9} {architecture:7} {sizes}{note}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
