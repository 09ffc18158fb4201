"""An emulated precision errs as much as it declares, and no more."""

import ml_dtypes
import numpy as np
import pytest

from kdtr.reference import make_engine
from kdtr.reference.arithmetic import FIXED
from kdtr.reference.emulated import STORAGE, EmulatedArithmetic

UNITS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # half a last place
each_storage = pytest.mark.parametrize("storage", STORAGE)


@each_storage
def test_a_product_of_exact_operands_rounds_once(storage):
    """Small integers: their sum is exact in float32, and its rounding is the storage's."""
    rng = np.random.default_rng(1)
    x, y = rng.integers(-9, 10, (5, 40)) / 4, rng.integers(-9, 10, (40, 7)) / 2

    found = EmulatedArithmetic(storage).contract("nm,mo->no", x, y)

    np.testing.assert_array_equal(found, (x @ y).astype(STORAGE[storage]).astype(np.float64))
    assert np.float64 == found.dtype


@each_storage
def test_a_product_errs_within_the_declared_precision(storage):
    """Two operands and the result rounded to storage, and at most 64 additions in float32."""
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((5, 64)), rng.standard_normal((64, 7))

    error = abs(EmulatedArithmetic(storage).contract("nm,mo->no", x, y) - x @ y)

    unit = UNITS[storage]
    bound = ((1 + unit) ** 3 * (1 + 64 * 2.0**-24) - 1) * (abs(x) @ abs(y))
    assert (error <= bound).all()
    assert error.max() > unit / 4


@each_storage
def test_operands_are_rounded_before_they_are_multiplied(storage):
    """1 and half a last place more, less 1: nothing is left where the operand was rounded."""
    x = np.array([[1 + UNITS[storage], -1.0]])

    found = EmulatedArithmetic(storage).contract("nm,mo->no", x, np.ones((2, 1)))

    assert [[0]] == found.tolist()


def test_norms_and_softmax_stay_in_float64():
    x = np.random.default_rng(3).standard_normal((4, 33))
    emulated = EmulatedArithmetic("bfloat16")

    np.testing.assert_allclose(emulated.sum(x), FIXED.sum(x), rtol=1e-13)
    np.testing.assert_allclose(emulated.exp(x), FIXED.exp(x), rtol=1e-14)
    np.testing.assert_allclose(emulated.log(abs(x)), FIXED.log(abs(x)), rtol=0, atol=1e-14)


def test_the_noise_of_a_model_grows_with_its_unit(small, draw_tensors):
    """Coarser storage is further from the truth; the finest is not exact, the coarsest not lost."""
    source = small, draw_tensors(small, 4)

    def logits(arithmetic):
        session = make_engine(arithmetic=arithmetic).load(source).open(max_len=8)
        return session.forward_tokens(range(6), np.arange(6), np.tri(6, dtype=bool))

    truth = logits("fixed")
    noise = {name: abs(logits(name) - truth).max() / abs(truth).max() for name in UNITS}

    assert UNITS["float32"] / 4 < noise["float32"] < noise["float16"] < noise["bfloat16"] < 0.2


def test_storage_names_are_those_of_numpy():
    assert {"float32", "bfloat16", "float16"} == set(STORAGE)
    assert np.dtype(ml_dtypes.bfloat16) == STORAGE["bfloat16"]
