"""One written order of arithmetic: the same bits everywhere, and close to the exact values."""

import json
import math
import os
import subprocess
import sys
from fractions import Fraction
from functools import cache

import mpmath
import numpy as np
import pytest
from numpy._core import _multiarray_umath as umath

from kdtr.contract import Yarn
from kdtr.reference import arithmetic, make_engine
from kdtr.reference.arithmetic import (
    FAST,
    FIXED,
    contract_sum,
    exp_fixed,
    log_fixed,
    sigmoid,
    sin_cos_fixed,
    sum_fixed,
)
from kdtr.reference.rotary import (
    amplitude,
    inverse_frequencies,
    rotary_tables,
    softmax_scale,
)

UNIT = 2.0**-53  # half the distance from 1 to the next double
SPECS = (
    "m,mo->o",
    "nm,mo->no",
    "hc,tc->ht",
    "ht,tc->hc",
    "nhd,hdc->nhc",
    "nhc,hcv->nhv",
    "sc,hdc->shd",
    "nhd,shd->nhs",
    "nhs,shv->nhv",
)


def gamma(n):
    """The relative error of n roundings (Higham, Accuracy and Stability, 3.1)."""
    return n * UNIT / (1 - n * UNIT)


def roundings(length):
    """Of a product and of the additions above it, in halves onto halves."""
    return 1 + math.ceil(math.log2(length)) if length > 1 else 1


def ulps(actual, exact):
    """The worst distance, in units of the last place of the exact value."""
    with mpmath.workdps(60):
        return max(
            float(abs(mpmath.mpf(a) - e) / mpmath.mpf(math.ulp(float(e))))
            for a, e in zip(np.ravel(actual).tolist(), exact, strict=True)
        )


def exactly(function, values):
    with mpmath.workdps(60):
        return [function(mpmath.mpf(v)) for v in np.ravel(values).tolist()]


def same_bits(expected, actual):
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(np.int64), np.ascontiguousarray(expected).view(np.int64)
    )


def operands(spec, seed, size=None):
    """Axes of different lengths, and numbers over several orders of magnitude."""
    rng = np.random.default_rng(seed)
    letters = sorted(set(spec) - set(",->"))
    length = {letter: 3 + 2 * i for i, letter in enumerate(letters)}
    if size is not None:
        left, rest = spec.split(",")
        right, out = rest.split("->")
        (summed,) = set(left) & set(right) - set(out)
        length[summed] = size
    return tuple(
        rng.standard_normal(shape) * 2.0 ** rng.integers(-9, 10, shape)
        for shape in (
            [length[letter] for letter in word] for word in spec.split("->")[0].split(",")
        )
    )


# exp, log, sine, cosine


def test_exp_is_within_one_and_a_half_ulp():
    """1 + r tail: the addition rounds by half an ulp, and r tail carries 3 roundings of at most
    |r tail| <= 0.293 where an ulp is smallest, below 1: 0.5 + 3 * 0.293 < 1.5."""
    rng = np.random.default_rng(0)
    steps = np.arange(-1020, 1020, 7) * math.log(2)
    x = np.concatenate(
        [
            rng.uniform(-708, 709, 3000),
            rng.uniform(-1, 1, 3000),
            steps,
            steps + math.log(2) / 2,
            [0.0, -0.0, 5e-324, 1e-300, -1e-17, 709.782712893384],
        ]
    )

    actual = exp_fixed(x)

    assert ulps(actual, exactly(mpmath.exp, x)) <= 1.5


def test_exp_rounds_a_subnormal_result_once():
    """Half an ulp for the last rounding, on top of an error that is far below an ulp there."""
    x = np.random.default_rng(1).uniform(-745.1, -712, 500)

    actual = exp_fixed(x)

    assert 0 < actual.max() < 2.0**-1022
    assert ulps(actual, exactly(mpmath.exp, x)) <= 0.51


def test_exp_at_the_ends():
    x = np.array([-np.inf, -1e300, -746.0, -745.2, 0.0, 709.79, 1e300, np.inf, np.nan])

    actual = exp_fixed(x)

    np.testing.assert_array_equal(actual, [0, 0, 0, 0, 1, np.inf, np.inf, np.inf, np.nan])


def test_log_is_within_four_ulp():
    """Next to 1 the result is 2 s series alone: s carries 2 roundings, the series and the two
    products one each; elsewhere k ln 2 dominates and an ulp is larger."""
    rng = np.random.default_rng(2)
    x = np.concatenate(
        [
            2.0 ** rng.uniform(-1074, 1023, 3000),
            rng.uniform(0.5, 2, 3000),
            1 + rng.uniform(-1e-9, 1e-9, 1000),
            2.0 ** np.arange(-1074, 1024, 13),
            [5e-324, 2.0**-1022, np.finfo(float).max, np.nextafter(1, 0), np.nextafter(1, 2)],
        ]
    )
    x = x[x != 1]

    actual = log_fixed(x)

    assert ulps(actual, exactly(mpmath.log, x)) <= 4


def test_log_of_one_is_zero_and_of_more_is_not_negative():
    x = 1 + np.arange(64) * 2.0**-52

    actual = log_fixed(x)

    assert 0 == actual[0]
    assert (np.diff(actual) > 0).all()


def test_sine_and_cosine_are_within_one_and_a_half_ulp_up_to_an_eighth_turn():
    """Half an ulp for the last operation; before it, the sine's series, close to 1, brings one,
    and the cosine's, 3 roundings of at most 0.31 in all, where an ulp is smallest."""
    angle = np.concatenate(
        [np.linspace(-math.pi / 4, math.pi / 4, 4001), [5e-324, 1e-20, -1e-9, 0.0]]
    )

    sine, cosine = sin_cos_fixed(angle)

    rest = angle != 0
    assert ulps(sine[rest], exactly(mpmath.sin, angle[rest])) <= 1.5
    assert ulps(cosine, exactly(mpmath.cos, angle)) <= 1.5
    assert (sine[~rest] == 0).all()


def test_sigmoid_is_within_four_ulp_and_never_overflows():
    """exp 1.5 ulp, the addition and the division half each; an ulp may halve across a power."""
    x = np.concatenate([np.linspace(-700, 700, 1201), np.linspace(-3, 3, 601)])

    actual = sigmoid(FIXED, x)

    assert ulps(actual, exactly(lambda v: 1 / (1 + mpmath.exp(-v)), x)) <= 4
    assert [0, 1] == sigmoid(FIXED, np.array([-np.inf, np.inf])).tolist()


@pytest.mark.parametrize("function", [exp_fixed, lambda x: log_fixed(x * x + 1), sin_cos_fixed])
def test_an_element_does_not_depend_on_its_neighbours(function):
    """Vector instructions take several at once, and another path for the rest."""
    x = np.random.default_rng(3).uniform(-0.7, 0.7, 101)

    together = np.atleast_2d(function(x))

    for i in (0, 1, 7, 50, 99, 100):
        same_bits(together[:, i : i + 1], np.atleast_2d(function(x[i : i + 1])))
    same_bits(together[:, ::3], np.atleast_2d(function(x[::3])))


# Rotary tables

YARN = Yarn(factor=40.0, original_max_position_embeddings=32)


def exact_frequencies(config):
    """From arXiv 2309.00071; low is clamped from below and high from above, as in HF's code."""
    r, theta, yarn = config.qk_rope_head_dim, mpmath.mpf(config.rope_theta), config.yarn
    plain = [theta ** (-mpmath.mpf(2 * i) / r) for i in range(r // 2)]
    if yarn is None:
        return plain

    def correction_dim(turns):
        original = mpmath.mpf(yarn.original_max_position_embeddings)
        return r * mpmath.log(original / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(theta))

    low = max(int(mpmath.floor(correction_dim(yarn.beta_fast))), 0)
    high = min(int(mpmath.ceil(correction_dim(yarn.beta_slow))), r - 1)
    width = high - low if high != low else mpmath.mpf("0.001")
    ramp = [min(max((i - low) / mpmath.mpf(width), 0), 1) for i in range(r // 2)]
    return [f / yarn.factor * t + f * (1 - t) for f, t in zip(plain, ramp, strict=True)]


def rope(small, theta=300.0, r=4, yarn=None):
    return small.replace(rope_theta=theta, qk_rope_head_dim=r, yarn=yarn)


ROPES = {
    "small": {},
    "theta 1.5": {"theta": 1.5, "r": 6},
    "theta 1e4": {"theta": 1e4, "r": 64},
    "theta 5e4": {"theta": 5e4, "r": 16},
    "theta 1e7": {"theta": 1e7, "r": 10},
    "yarn": {"theta": 1e4, "r": 32, "yarn": YARN},
    "yarn as V3": {
        "theta": 1e4,
        "r": 64,
        "yarn": Yarn(factor=40.0, original_max_position_embeddings=4096),
    },
    "yarn, equal ends": {
        "theta": 5e4,
        "r": 64,
        "yarn": Yarn(
            factor=32.0, original_max_position_embeddings=4096, beta_fast=1.0, beta_slow=1.0
        ),
    },
    "yarn, ends within the pairs and behind them": {
        "theta": 1e4,
        "r": 8,
        "yarn": Yarn(factor=8.0, original_max_position_embeddings=10**6, beta_fast=2e3),
    },
    "yarn, an end behind the last dimension": {
        "theta": 1e4,
        "r": 8,
        "yarn": Yarn(factor=8.0, original_max_position_embeddings=10**8, beta_fast=2e5),
    },
    "yarn, both ends at 0": {
        "theta": 1e4,
        "r": 8,
        "yarn": Yarn(factor=3.0, original_max_position_embeddings=6, beta_slow=1.0),
    },
    "yarn, both ends behind the last dimension": {  # the ramp falls: all scaled, as in HF's code
        "theta": 1.5,
        "r": 8,
        "yarn": Yarn(factor=8.0, original_max_position_embeddings=10**6),
    },
}
each_rope = pytest.mark.parametrize("name", ROPES)


@each_rope
def test_frequencies_to_fifty_digits(name, small):
    config = rope(small, **ROPES[name])

    frequencies = inverse_frequencies(config)

    with mpmath.workdps(60):
        expected = exact_frequencies(config)
        for wanted, found in zip(expected, frequencies, strict=True):
            assert abs(mpmath.mpf(str(found)) / wanted - 1) < mpmath.mpf("1e-50")


def test_yarn_blends_between_its_ends(small):
    """The ramp has pairs at both ends and pairs between: all three branches are in the test."""
    config = rope(small, **ROPES["yarn as V3"])

    plain = inverse_frequencies(config.replace(yarn=None))
    ratios = [f / s for f, s in zip(plain, inverse_frequencies(config), strict=True)]

    assert 1 == ratios[0]
    assert abs(float(ratios[-1]) - 40) < 1e-12
    assert [r for r in ratios if 1 < r < 39]
    assert ratios == sorted(ratios)


@each_rope
def test_tables_at_any_position(name, small):
    """The angle within an eighth turn carries 3 roundings (integer to float, the constant, the
    product), at most 3 u pi/4; sine and cosine add an ulp, 2 u at most; the amplitude 2 more."""
    config = rope(small, **ROPES[name])
    rng = np.random.default_rng(4)
    where = np.concatenate([[0, 1, 2, 3, 1000, 10**6, 2**31, 2**32 - 1], rng.integers(0, 2**32, 8)])

    cos, sin = rotary_tables(config, where)

    bound = (3 * math.pi / 4 + 2 + 2) * UNIT * amplitude(config)
    with mpmath.workdps(60):
        size = mpmath.mpf(amplitude(config))
        for i, frequency in enumerate(exact_frequencies(config)):
            for row, p in enumerate(where.tolist()):
                assert abs(cos[row, i] - size * mpmath.cos(p * frequency)) <= bound
                assert abs(sin[row, i] - size * mpmath.sin(p * frequency)) <= bound


def test_a_position_does_not_depend_on_the_others(small):
    where = np.array([5, 2**32 - 1, 10**6, 5])

    cos, sin = rotary_tables(small, where)

    for i in range(4):
        alone = rotary_tables(small, where[i : i + 1])
        same_bits(cos[i : i + 1], alone[0])
        same_bits(sin[i : i + 1], alone[1])


def m(factor, key):
    return mpmath.mpf("0.1") * key * mpmath.log(factor) + 1


# keys of the yarn map, the amplitude of cos and sin (MLA-5), the factor of the scale (MLA-4)
MSCALES = {
    "both, different": (
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        lambda f: m(f, 0.7) / m(f, 1.3),
        lambda f: m(f, 1.3) ** 2,
    ),
    "both, equal": (
        {"mscale": 1.0, "mscale_all_dim": 1.0},
        lambda f: 1,
        lambda f: m(f, 1) ** 2,
    ),
    "only mscale": ({"mscale": 0.7}, lambda f: m(f, 1), lambda f: 1),
    "only mscale_all_dim": ({"mscale_all_dim": 0.6}, lambda f: m(f, 1), lambda f: m(f, 0.6) ** 2),
    "mscale zero": (
        {"mscale": 0.0, "mscale_all_dim": 0.6},
        lambda f: m(f, 1),
        lambda f: m(f, 0.6) ** 2,
    ),
    "mscale_all_dim zero": (
        {"mscale": 0.7, "mscale_all_dim": 0.0},
        lambda f: m(f, 1),
        lambda f: 1,
    ),
    "none": ({}, lambda f: m(f, 1), lambda f: 1),
    "attention_factor": (
        {"attention_factor": 0.85, "mscale": 0.7, "mscale_all_dim": 1.3},
        lambda f: mpmath.mpf(0.85),
        lambda f: m(f, 1.3) ** 2,
    ),
    "attention_factor alone": ({"attention_factor": 2.0}, lambda f: 2, lambda f: 1),
}


@pytest.mark.parametrize("name", MSCALES)
@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_amplitude_and_scale_under_every_set_of_keys(name, factor, small):
    """Correctly rounded from 60 digits: half an ulp."""
    keys, size, grown = MSCALES[name]
    yarn = Yarn(factor=factor, original_max_position_embeddings=32, **keys)
    config = small.replace(yarn=yarn)

    found = amplitude(config), softmax_scale(config)

    with mpmath.workdps(60):
        width = mpmath.mpf(small.qk_nope_head_dim + small.qk_rope_head_dim)
        expected = [mpmath.mpf(size(factor)), grown(factor) / mpmath.sqrt(width)]
    assert ulps(found, expected) <= 0.5


def test_without_yarn_there_is_no_amplitude(small):
    assert 1.0 == amplitude(small)
    assert 10**-0.5 == softmax_scale(small)


# Sums


def halves_onto_halves(values):
    """The written order, independently: fold the upper half onto the lower until one is left."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        upper = values[half:]
        values = [v + upper[i] if i < len(upper) else v for i, v in enumerate(values[:half])]
    return values[0]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 12, 31, 64, 100, 1000])
def test_the_order_of_a_sum_is_the_written_one(length):
    rng = np.random.default_rng(length)
    x = rng.standard_normal((2, length)) * 2.0 ** rng.integers(-30, 30, (2, length))
    y = rng.standard_normal((length, 3))

    sums, products = sum_fixed(x), contract_sum("nm,mo->no", x, y)

    same_bits([halves_onto_halves(row.tolist()) for row in x], sums)
    expected = [[halves_onto_halves((row * column).tolist()) for column in y.T] for row in x]
    same_bits(expected, products)


def test_a_sum_leaves_its_operands_alone():
    x, y = operands("nm,mo->no", 5)
    kept = x.copy(), y.copy()

    sum_fixed(x)
    contract_sum("nm,mo->no", x, y)

    same_bits(kept[0], x)
    same_bits(kept[1], y)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("block", [1, 7, 64, 1000])
def test_the_block_size_changes_no_bit(spec, block, monkeypatch):
    x, y = operands(spec, 6)
    whole = contract_sum(spec, x, y)

    monkeypatch.setattr(arithmetic, "_BLOCK", block)
    blocked = contract_sum(spec, x, y)

    same_bits(whole, blocked)
    np.testing.assert_allclose(np.einsum(spec, x, y), whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "m,mo->o"])
def test_a_row_alone_equals_the_row_in_a_batch(spec):
    x, y = operands(spec, 7, size=37)
    batch = contract_sum(spec, x, y)

    for i in range(len(x)):
        same_bits(batch[i : i + 1], contract_sum(spec, x[i : i + 1], y))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", ["fortran", "strided", "offset"])
def test_the_memory_layout_changes_no_bit(spec, layout):
    x, y = operands(spec, 8)
    plain = contract_sum(spec, x, y)

    def laid_out(array):
        if layout == "fortran":
            return np.asfortranarray(array)
        if layout == "strided":
            return np.repeat(array, 2, axis=-1)[..., ::2]
        raw = np.zeros(array.nbytes + 8, dtype=np.uint8)[8:].view(np.float64)
        raw[:] = array.ravel()
        return raw.reshape(array.shape)

    same_bits(plain, contract_sum(spec, laid_out(x), laid_out(y)))


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 700])
def test_a_contraction_is_within_its_bound_of_the_exact_sum(length):
    """|error| <= gamma(1 + ceil(log2 length)) sum |x y|, against sums of fractions."""
    x, y = operands("nm,mo->no", 9, size=length)

    found = contract_sum("nm,mo->no", x, y)

    for i in range(len(x)):
        for j in range(y.shape[1]):
            terms = [Fraction(a) * Fraction(b) for a, b in zip(x[i], y[:, j], strict=True)]
            bound = Fraction(gamma(roundings(length))) * sum(map(abs, terms))
            assert abs(Fraction(float(found[i, j])) - sum(terms)) <= bound


@pytest.mark.parametrize("length", [1, 2, 3, 64, 1000])
def test_a_sum_is_within_its_bound_of_fsum(length):
    x = np.random.default_rng(10).standard_normal((4, length))

    sums = sum_fixed(x)

    for row, found in zip(x, sums, strict=True):
        bound = gamma(roundings(length)) * math.fsum(map(abs, row)) + math.ulp(found)
        assert abs(math.fsum(row) - found) <= bound


def test_a_cancelled_sum_keeps_what_is_left():
    """What separates this order from a running sum."""
    assert 2.0**-60 == sum_fixed(np.array([1.0, 2.0**-60, -1.0]))


# FAST against FIXED


@pytest.mark.parametrize("spec", SPECS)
def test_fast_contractions_are_within_the_bound_of_any_order(spec):
    """Any order of k products, fused or not, errs by gamma(k) sum |x y|; ours by its own."""
    x, y = operands(spec, 11, size=130)

    difference = abs(FAST.contract(spec, x, y) - FIXED.contract(spec, x, y))

    size = np.einsum(spec, abs(x), abs(y))
    assert (difference <= (gamma(130) + gamma(roundings(130)) + gamma(131)) * size).all()


def test_fast_elementary_functions_are_within_their_ulps():
    """FIXED's own 1.5 and 4 ulp, and 4 more: the accuracy that NumPy's tests ask of its own."""
    x = np.random.default_rng(12).uniform(-30, 30, 5000)
    positive = np.exp(x)

    exp, log = abs(FAST.exp(x) - FIXED.exp(x)), abs(FAST.log(positive) - FIXED.log(positive))
    sums = abs(FAST.sum(x) - FIXED.sum(x))

    assert (exp <= 5.5 * np.spacing(positive)).all()
    assert (log <= 8 * np.spacing(abs(x))).all()
    assert sums <= (gamma(5000) + gamma(roundings(5000))) * abs(x).sum()


def test_fast_forward_agrees_with_the_fixed_one(small, draw_tensors):
    """Float64 both: the tolerance of test_hf_checkpoints, for a model of the same size."""
    source = small, draw_tensors(small, 13)
    logits = {}
    for name in ("fixed", "fast"):
        session = make_engine(arithmetic=name).load(source).open(max_len=16)
        logits[name] = session.forward_tokens(range(9), np.arange(9), np.tri(9, dtype=bool))

    difference = abs(logits["fast"] - logits["fixed"]).max()

    assert difference <= 1e-12 * abs(logits["fixed"]).max()


# The same bits in another process

CHILD = """
import hashlib, json
import numpy as np
from numpy._core._multiarray_umath import __cpu_features__
from kdtr.contract import DraftTree, ModelConfig, Yarn, tensor_shapes
from kdtr.reference import build_tree, make_engine

yarn = Yarn(factor=8.0, original_max_position_embeddings=192, mscale=0.7, mscale_all_dim=1.1)
config = ModelConfig.tiny().replace(num_hidden_layers=2, vocab_size=96, yarn=yarn)
rng = np.random.default_rng(2026)
tensors = {}
for name, shape in tensor_shapes(config).items():
    drawn = rng.integers(-8, 9, shape) / 8  # a grid: no library function makes the weights
    if name.endswith("norm.weight"):
        tensors[name] = 1 + drawn / 8
    else:
        tensors[name] = drawn / 2 ** (0 if "embed" in name else 3)
session = make_engine().load((config, tensors)).open(max_len=64)
digest = hashlib.sha256()
def trace(stage, layer, array):
    digest.update(np.ascontiguousarray(array).tobytes())
root = session.prefill(rng.integers(0, 96, 21), trace=trace)
tree = session.build(rng.integers(-40, 9, (4, 96)) / 8, 9)
session.round(tree, trace=trace)
session.decode(trace=trace)
held = session.snapshot()
for array in (held.c_kv, held.k_pe, np.array(tree.tokens), np.array(tree.parents)):
    digest.update(array.tobytes())
features = {name: bool(on) for name, on in __cpu_features__.items()}
print(json.dumps({"bits": digest.hexdigest(), "features": features}))
"""


@cache
def child(**environment):
    """A full forward, round and decode in a fresh interpreter; what it saw and hashed."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "environment",
    [
        {"OPENBLAS_NUM_THREADS": "1"},
        {"OPENBLAS_NUM_THREADS": "2"},
        {"OPENBLAS_CORETYPE": "Prescott"},
    ],
    ids=str,
)
def test_the_linear_algebra_library_changes_no_bit(environment):
    assert child()["bits"] == child(**environment)["bits"]


@pytest.mark.parametrize("feature", umath.__cpu_dispatch__)
def test_a_vector_instruction_set_changes_no_bit(feature):
    if not umath.__cpu_features__[feature]:
        pytest.skip(f"this machine lacks {feature}: there is nothing to turn off")

    without = child(NPY_DISABLE_CPU_FEATURES=feature)

    assert False is without["features"][feature]
    assert child()["bits"] == without["bits"]


def test_no_vector_instruction_set_at_all_changes_no_bit():
    present = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
    if not present:
        pytest.skip("this machine has none of the sets that NumPy chooses at run time")

    without = child(NPY_DISABLE_CPU_FEATURES=" ".join(present))

    assert [] == [name for name in present if without["features"][name]]
    assert child()["bits"] == without["bits"]


def test_the_tables_do_not_depend_on_the_callers_decimal_context():
    """A product of constants at import would be rounded to the context of whoever imports."""
    script = (
        "import decimal; decimal.getcontext().prec = {precision}\n"
        "import numpy as np\n"
        "from kdtr.contract import ModelConfig\n"
        "from kdtr.reference.rotary import rotary_tables\n"
        "cos, sin = rotary_tables(ModelConfig.kimi_k2(), np.arange(0, 2**20, 977))\n"
        "print((cos + 2 * sin).tobytes().hex()[:4000])"
    )

    shown = {
        subprocess.run(
            [sys.executable, "-c", script.format(precision=precision)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for precision in (5, 28, 90)
    }

    assert 1 == len(shown)
