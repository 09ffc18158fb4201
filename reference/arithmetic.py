"""Float64 arithmetic with one written order: the same bits on every machine.

BLAS, libm and SIMD reductions choose their own order or polynomial, and so their own last bit.
Here a product is summed from separate multiplications and additions, halves onto halves; exp,
log, sine and cosine are fixed polynomials. Each step is one correctly rounded IEEE operation
per element, so no thread count, instruction set or batch can change a bit: the order of a sum
depends on its length alone, and row i of a batch equals that row computed alone.

`FAST` offers the same operations through BLAS and NumPy, for volume; nothing golden comes
from it.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import numpy as np

_BLOCK = 1 << 15  # elements of a product held at once (256 KiB); changes speed, never a bit


class Arithmetic(Protocol):
    """The operations whose order matters."""

    name: str

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Sum of products over the one letter that `spec` ("nm,mo->no") does not keep."""
        ...

    def sum(self, x: np.ndarray) -> np.ndarray:
        """Sum over the last axis."""
        ...

    def exp(self, x: np.ndarray) -> np.ndarray: ...

    def log(self, x: np.ndarray) -> np.ndarray: ...

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        """What is kept of a stage, or of the `residual` after attention: x, in the truth."""
        ...


class _FixedOrder:
    name = "fixed"

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return contract_sum(spec, x, y)

    def sum(self, x: np.ndarray) -> np.ndarray:
        return sum_fixed(x)

    def exp(self, x: np.ndarray) -> np.ndarray:
        return exp_fixed(x)

    def log(self, x: np.ndarray) -> np.ndarray:
        return log_fixed(x)

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        return x


class _Fast:
    name = "fast"

    def contract(self, spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.einsum(spec, x, y, optimize=True)

    def sum(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x.sum(axis=-1))

    def exp(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(x))

    def log(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(x))

    def stored(self, stage: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        return x


FIXED: Arithmetic = _FixedOrder()
FAST: Arithmetic = _Fast()


def contract_sum(spec: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Multiply and sum over the one letter that is in both operands and not in the result.

    In the operands' own precision: float64 but for emulated.py.

    >>> contract_sum("nm,mo->no", np.array([[1.0, 2.0]]), np.array([[3.0], [5.0]]))
    array([[13.]])
    """
    left, right, out, summed = _parse(spec)
    x = _laid_out(x, left, summed + out)  # [summed, *out], 1 where the letter is absent
    y = _laid_out(y, right, summed + out)
    shape = np.broadcast_shapes(x.shape, y.shape)
    result = np.empty(shape[1:], dtype=np.result_type(x, y))
    rows, columns = _blocks(shape)
    for i in range(0, shape[1], rows):
        for j in range(0, shape[-1], columns):
            block = slice(i, i + rows), slice(j, j + columns)
            product = _cut(x, *block) * _cut(y, *block)
            if result.ndim == 1:
                result[block[1]] = _halve(product)
            else:
                result[block[0], ..., block[1]] = _halve(product)
    return result


def sum_fixed(x: np.ndarray) -> np.ndarray:
    """Sum over the last axis in the order of `contract_sum`."""
    return _halve(np.array(np.moveaxis(x, -1, 0), order="C"))


def _halve(x: np.ndarray) -> np.ndarray:
    """Sum over the first axis, adding the upper half onto the lower; overwrites x.

    The error grows with the logarithm of the length, where a running sum's grows with it.
    """
    n = len(x)
    while n > 1:
        half = (n + 1) // 2
        np.add(x[: n - half], x[half:n], out=x[: n - half])
        n = half
    return x[0]


@cache
def _parse(spec: str) -> tuple[str, str, str, str]:
    operands, out = spec.split("->")
    left, right = operands.split(",")
    summed = "".join(letter for letter in left if letter in right and letter not in out)
    assert len(summed) == 1, f"{spec}: exactly one letter is summed over"
    return left, right, out, summed


def _laid_out(x: np.ndarray, letters: str, axes: str) -> np.ndarray:
    assert x.ndim == len(letters), f"{letters} names {len(letters)} axes, the array has {x.ndim}"
    x = x.transpose([letters.index(letter) for letter in axes if letter in letters])
    return x[tuple(slice(None) if letter in letters else np.newaxis for letter in axes)]


def _blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the product [summed, rows, ..., columns] to hold at once."""
    if len(shape) == 2:
        return shape[1], max(1, _BLOCK // shape[0])
    inner = int(np.prod(shape[2:-1]))
    columns = max(1, min(shape[-1], _BLOCK // (shape[0] * inner)))
    rows = max(1, _BLOCK // (shape[0] * inner * columns))
    return rows, columns


def _cut(x: np.ndarray, rows: slice, columns: slice) -> np.ndarray:
    """The block of a broadcastable operand; an axis of one stays whole."""
    if x.ndim > 2 and x.shape[1] > 1:
        x = x[:, rows]
    return x[..., columns] if x.shape[-1] > 1 else x


_LOG2_E = 1.4426950408889634
_LN2_HI = float.fromhex("0x1.62e42fee00000p-1")  # 32 bits: k * _LN2_HI is exact for |k| < 2**20
_LN2_LO = float.fromhex("0x1.a39ef35793c76p-33")
_FACTORIALS = [1.0]
for _i in range(1, 20):
    _FACTORIALS.append(_FACTORIALS[-1] * _i)  # exact: 19! < 2**57, with 16 factors of two


def exp_fixed(x: np.ndarray) -> np.ndarray:
    """e**x to about 1 ulp: x = k ln 2 + r with |r| <= ln(2)/2, Taylor series of degree 13 in r.

    The first term left out is r**14/14! < 4.2e-18 relative to 1.
    """
    x = np.asarray(x, dtype=np.float64)
    bounded = np.clip(x, -746.0, 710.0)  # beyond: 0 and inf, as at the ends
    bounded = np.where(np.isnan(x), 0.0, bounded)
    k = np.rint(bounded * _LOG2_E)
    r = (bounded - k * _LN2_HI) - k * _LN2_LO
    tail = _horner(r, [1 / f for f in _FACTORIALS[1:14]])  # (e**r - 1) / r
    result = _times_power_of_two(1.0 + r * tail, k.astype(np.int64))
    return np.where(np.isnan(x), x, result)


def log_fixed(x: np.ndarray) -> np.ndarray:
    """Natural logarithm to 3 ulp, for x > 0: x = 2**k m, ln m = 2 artanh((m-1)/(m+1)).

    sqrt(1/2) <= m < sqrt(2), so |s| < 0.1716 and the first term left out is below 1e-20.
    """
    m, k = np.frexp(np.asarray(x, dtype=np.float64))  # exact; 0.5 <= m < 1
    low = m < 0.7071067811865476
    m, k = np.where(low, 2.0 * m, m), k - low
    s = (m - 1.0) / (m + 1.0)
    series = _horner(s * s, [1 / (2 * i + 1) for i in range(13)])
    return k * _LN2_HI + (2.0 * s * series + k * _LN2_LO)


def sin_cos_fixed(angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sine and cosine of |angle| <= pi/4 to about 1 ulp: Taylor series of degree 17 and 18."""
    square = -(angle * angle)
    sine = angle * _horner(square, [1 / f for f in _FACTORIALS[1:18:2]])
    cosine = _horner(square, [1 / f for f in _FACTORIALS[0:19:2]])
    return sine, cosine


def sigmoid(arithmetic: Arithmetic, x: np.ndarray) -> np.ndarray:
    """1 / (1 + e**-x) without overflow on either side."""
    small = arithmetic.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, small) / (1.0 + small)


def _horner(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    total = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x + coefficient
    return total


def _times_power_of_two(x: np.ndarray, k: np.ndarray) -> np.ndarray:
    """x * 2**k in two exact factors, so that only a subnormal result rounds, and once."""
    first = k // 2
    with np.errstate(over="ignore"):  # inf is the right answer
        return x * _power_of_two(first) * _power_of_two(k - first)


def _power_of_two(k: np.ndarray) -> np.ndarray:
    return ((k + 1023) << 52).view(np.float64)
