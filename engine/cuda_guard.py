"""Guarded device memory: a write outside of a buffer, and a read of what nothing wrote, are seen.

Every buffer that a program allocates lies between two bands of a known byte, and holds NaN (as
integers: -1) until a kernel writes it, in every replay of a graph anew. After each run the bands
are compared, and those beside the session's cache rows. For gates and hunts, not for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kdtr.contract import EngineError

_BAND = 256  # bytes on either side; keeps the alignment that CuPy promises
_BAND_BYTE, _NAN_BYTE = 0xA5, 0xFF


class Guard:
    """An allocator of CuPy's, and what it has allocated since it was made.

    malloc  of the pool that the memory comes from
    """

    def __init__(self, cupy: Any, malloc: Callable[[int], Any]) -> None:
        self._cupy = cupy
        self._malloc = malloc
        self._allocated: list[tuple[Any, int]] = []  # kept: a freed band could be written again

    def malloc(self, size: int) -> Any:
        """`size` bytes between two bands."""
        stream = self._cupy.cuda.get_current_stream()
        memory = self._malloc(size + 2 * _BAND)
        memory.memset_async(_BAND_BYTE, _BAND, stream)
        (memory + _BAND).memset_async(_NAN_BYTE, size, stream)
        (memory + (_BAND + size)).memset_async(_BAND_BYTE, _BAND, stream)
        self._allocated.append((memory + _BAND, size))
        return memory + _BAND

    def check(self) -> None:
        """Raises EngineError if a band was written; waits for the current stream."""
        self._cupy.cuda.get_current_stream().synchronize()
        for number, (memory, size) in enumerate(self._allocated):
            check_bands(memory, size, f"buffer {number}, in the order of allocation,")


def check_bands(memory: Any, size: int, what: str) -> None:
    """Raises EngineError if a band beside `size` bytes of a Guard's was written.

    The stream that wrote must have come to its end.
    """
    for where, offset in (("before", -_BAND), ("behind", size)):
        band = np.empty(_BAND, np.uint8)
        (memory + offset).copy_to_host(band.ctypes.data, _BAND)
        if (band != _BAND_BYTE).any():
            at = int(np.flatnonzero(band != _BAND_BYTE)[0])
            raise EngineError(
                f"a kernel wrote outside of its buffer: byte {at} of the {_BAND} {where} "
                f"{what} of {size} bytes"
            )
