"""i4x2: two 4-bit integers a byte, two's complement, C order.

Element 0 lies in the low nibble; an odd count leaves a spare high nibble, which is zero.
"""

from collections.abc import Sequence
from math import prod

import ml_dtypes
import numpy as np


def pack_i4x2(values: np.ndarray) -> np.ndarray:
    """values [...] ml_dtypes.int4 -> uint8 [ceil(n / 2)] for its n elements in C order."""
    # ml_dtypes keeps one int4 a byte and gives no meaning to that byte's high nibble
    nibbles = np.ascontiguousarray(values).reshape(-1).view(np.uint8) & 0x0F
    packed = nibbles[0::2].copy()
    packed[: len(nibbles) // 2] |= nibbles[1::2] << 4
    return packed


def unpack_i4x2(packed: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """packed uint8 [ceil(n / 2)] -> ml_dtypes.int4 of `shape` with its n elements; a copy."""
    nibbles = np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(-1)  # [2 * ceil(n / 2)]
    values: np.ndarray = nibbles[: prod(shape)].view(ml_dtypes.int4)
    return values.reshape(shape)
