"""How a session launches its forwards on the host: at once, without padding and without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kdtr.contract import Trace
from kdtr.engine.kernel_set import Rows

if TYPE_CHECKING:
    from kdtr.engine.host_kernels import HostKernels

T = TypeVar("T")


class HostLauncher:
    """A `Launcher` whose bucket of n rows is n."""

    def __init__(self, kernels: HostKernels) -> None:
        self._upload = kernels.upload

    def stage(
        self,
        committed_len: int,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        *,
        stop_tokens: Sequence[int] = (),
        max_emitted: int = 1,
    ) -> Rows:
        """The values themselves, as a copy."""
        n, upload = len(tokens), self._upload
        return Rows(
            n=n,
            count=n,
            committed_len=committed_len,
            n_slots=committed_len + n,
            max_slots=committed_len + n,
            tokens=upload(np.array(tokens)),
            slots=upload(np.arange(committed_len, committed_len + n)),
            parents=None if parents is None else upload(np.array(parents)),
            stop_tokens=upload(np.array(stop_tokens, np.int64)),
            max_emitted=max_emitted,
        )

    def run(self, name: str, rows: Rows, program: Callable[[Trace], T], trace: Trace) -> T:
        """The program, here and now."""
        return program(trace)

    def close(self) -> None:
        """Nothing was kept."""
