from __future__ import annotations

from inspect import Parameter, signature

import numpy as np
import pytest

from kdtr.engine.host_kernels import HostKernels
from kdtr.engine.kernel_set import KernelSet, Visibility
from kdtr.engine.rounded_kernels import RoundedKernels
from kdtr.engine.shuffled_kernels import ShuffledKernels

HOST_SETS = (HostKernels(), ShuffledKernels(0), RoundedKernels(HostKernels(), "bfloat16"))

OPERATIONS = sorted(
    name for name, member in vars(KernelSet).items() if callable(member) and name[0] != "_"
)


def arguments(operation: object) -> list[Parameter]:
    parameters = signature(operation).parameters.values()  # type: ignore[arg-type]
    return [p.replace(annotation=Parameter.empty) for p in parameters if p.name != "self"]


@pytest.mark.parametrize("kernels", HOST_SETS, ids=lambda kernels: type(kernels).__name__)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_host_twins_have_the_same_arguments(name: str, kernels: HostKernels) -> None:
    assert arguments(getattr(KernelSet, name)) == arguments(getattr(kernels, name))


def test_what_crosses_to_and_from_the_device_is_a_copy() -> None:
    kernels = HostKernels()
    mine = np.arange(3)

    uploaded = kernels.upload(mine)
    fetched, (among_others, _) = kernels.to_host(uploaded), kernels.all_to_host(uploaded, uploaded)
    mine[0] = 9
    uploaded[1] = 9

    assert [0, 1, 2] == fetched.tolist() == among_others.tolist()
    assert [0, 9, 2] == uploaded.tolist()


def test_visibility_counts_the_prefix_and_the_block() -> None:
    assert 9 == Visibility(open_len=4, block=np.zeros((2, 5), bool)).n_slots
