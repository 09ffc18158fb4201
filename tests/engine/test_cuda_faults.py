"""Every fault that a GPU's tests plant in a kernel is in its text, and compiles.

So that a kernel that is rewritten takes its faults along, on a machine without a device too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_faults import FAULTS, CudaFault, faulty_text

from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_compile import compiled_source
from kdtr.engine.cuda_modules import HOPPER_FILES, KERNELS

IN_KERNELS = {name: fault for name, fault in FAULTS.items() if fault.file}


@pytest.mark.parametrize("name", IN_KERNELS)
def test_it_is_in_the_text(name: str) -> None:
    assert faulty_text(name, KERNELS) != (KERNELS / f"{FAULTS[name].file}.cu").read_text()


def together(faults: list[CudaFault]) -> Iterator[str]:
    """The text with as many faults of a file at once as do not change the same place."""
    while faults:
        text = (KERNELS / f"{faults[0].file}.cu").read_text()
        left = []
        for fault in faults:
            if fault.before in text:
                text = text.replace(fault.before, fault.after)
            else:
                left.append(fault)
        assert len(left) < len(faults), f"{left} are not in the text"
        yield text
        faults = left


@pytest.mark.parametrize("file", sorted({fault.file for fault in IN_KERNELS.values()}))
def test_they_compile(file: str) -> None:
    pytest.importorskip("cupy", reason="NVRTC is called through CuPy: pip install 'kdtr[compile]'")
    architecture = cuda_hopper.ARCHITECTURE if file in HOPPER_FILES else "sm_90"
    for text in together([fault for fault in IN_KERNELS.values() if fault.file == file]):
        assert compiled_source(text, f"{file}.cu", "bfloat16", architecture)
