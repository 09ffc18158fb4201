"""Every kernel that may serve a projection: its bits, the rows it touches, the kernel it waits for.

All of them give the same bits, and a row alone as among others; so a row's bits do not depend on
the number of rows, which decides which kernel runs. That wgmma gives the bits of mma.sync is an
observation, made by these tests on an H200: the instruction set promises it nowhere. Where the two
differ, Hopper's half fails, and linear.cu alone may serve projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from cuda_pair import FLOAT32, ROUNDOFF, Pair

from kdtr.engine import cuda_linear
from kdtr.engine.cuda_launch import launch

# o, i. Weights of 4,096 rows and more have 8 slices of i, smaller ones 16; a step is 32 elements of
# i, a stage of wgmma 64; a block has 16, 32, 64 or 128 rows of weights.
SHAPES = (
    (72, 8),  # a quarter of a step: all slices but one are empty
    (64, 64),  # two steps for 16 slices: most are empty; fewer rows than a block may have
    (576, 1056),  # 33 steps: slices that begin in the middle of a stage
    (576, 1048),  # the same, and a last step that lacks one chunk of 16 bytes
    (1100, 2080),  # rows left over that are no whole eights
    (1100, 2088),  # the same, and a last step of one chunk
    (1100, 7168),  # more stages than a ring has, several times
    (4100, 520),  # 8 slices: four rows left over, and a last step of one chunk
    (4160, 2336),  # 8 slices: 64 rows left over, all that a block of wgmma has
)
FEW_STEPS = ((576, 8), (576, 96), (4100, 32))  # most slices are empty
ROWS = (1, 20, 100)  # the last block of rows of no kernel is full
NAN, UNTOUCHED = 0x7FC0, 0x1234  # bits of bfloat16
BAND = 128  # rows before and behind those that a kernel is given: more than a block has
CLOCKS = 2_000_000  # about a millisecond: a hundred times what the host takes for the next launch


@pytest.fixture(scope="session")
def bfloat16(cuda_sets: dict[str, Any]) -> Any:
    return cuda_sets["bfloat16"]


@pytest.fixture(params=["linear", cuda_linear.WGMMA])
def file(bfloat16: Any, request: pytest.FixtureRequest) -> str:
    """Whose kernels a test is of."""
    if not bfloat16._modules.has(request.param):
        found = bfloat16._cupy.cuda.Device().compute_capability
        pytest.skip(f"{request.param}.cu is Hopper's (90); this device has {found}")
    return str(request.param)


def fitting(o: int, file: str) -> list[str]:
    names = [n for n in cuda_linear.fitting(o, hopper=True) if cuda_linear.file_of(n) == file]
    assert names, f"no kernel of {file}.cu fits {o} rows of weights: nothing would be tested"
    return names


def kernel_of(kernels: Any, file: str) -> Callable[[str], Any]:
    return partial(kernels._modules.kernel, file)


def spread(kernels: Any, x: Any) -> Any:
    """The same rows in a wider array, with NaN on both sides of them."""
    n, i = x.shape
    wide = kernels._empty((n, 8 + i + 16), x.dtype)
    wide.fill(NAN)
    view = wide[:, 8 : 8 + i]
    view[...] = x
    return view


@pytest.mark.parametrize(("o", "i"), SHAPES)
@pytest.mark.parametrize("n", [25, 40, 65, 130])
def test_all_kernels_give_the_same_bits(bfloat16: Any, file: str, o: int, i: int, n: int) -> None:
    """Those of the first one of linear.cu, whose distance from the exact product is bounded."""
    pair = Pair(bfloat16, "bfloat16", seed=o + n)
    x, on_device = pair.numbers(n, i)
    weight, its = pair.numbers(o, i)
    counted = n - n // 4

    def run(name: str, rows: Any) -> np.ndarray:
        assert cuda_linear.fast(rows, its)
        out = bfloat16._empty((n, o), np.uint16)
        out.fill(UNTOUCHED)
        get = kernel_of(bfloat16, cuda_linear.file_of(name))
        cuda_linear.run(get, name, rows, its, out, count)
        bits: np.ndarray = out.get()
        return bits

    with bfloat16.turn:
        count = bfloat16._uploaded(np.array([counted], np.int64))
        on_device[counted:] = NAN  # where rows are padding
        layouts = {"contiguous rows": on_device, "rows further apart": spread(bfloat16, on_device)}
        first = run(fitting(o, "linear")[0], on_device)
        found = {
            f"{name}, {layout}": run(name, rows)
            for name in fitting(o, file)
            for layout, rows in layouts.items()
        }
        alone = [
            cuda_linear.linear(kernel_of(bfloat16, "linear"), on_device[row : row + 1], its).get()
            for row in (0, counted - 1)
        ]

    exact = x[:counted].astype(np.float64) @ weight.astype(np.float64).T
    size = abs(x[:counted]).astype(np.float64) @ abs(weight).astype(np.float64).T
    values = (first[:counted].astype(np.uint32) << 16).view(np.float32)
    assert (abs(values - exact) <= i * FLOAT32 * size + ROUNDOFF["bfloat16"] * abs(exact)).all()
    assert np.array_equal(first[[0, counted - 1]], np.concatenate(alone))
    for which, bits in found.items():
        assert (bits[counted:] == UNTOUCHED).all(), f"{which}: padding is written"
        assert np.array_equal(first[:counted], bits[:counted]), which


@pytest.mark.parametrize("exponent", [-64, -66, -68])
def test_sums_below_the_normal_numbers_agree_too(bfloat16: Any, file: str, exponent: int) -> None:
    """Eight products of 2^-128, 2^-132 and 2^-136: whether such sums are 0 is one of the bits."""
    n, o, i = 25, 576, 8
    with bfloat16.turn:
        x, weight = (
            bfloat16.upload_weight(np.full(s, 2.0**exponent, np.float32)) for s in ((n, i), (o, i))
        )
        found = {}
        for name in (fitting(o, "linear")[0], *fitting(o, file)):
            out = bfloat16._empty((n, o), np.uint16)
            get = kernel_of(bfloat16, cuda_linear.file_of(name))
            cuda_linear.run(get, name, x, weight, out, None)
            found[name] = out.get().tobytes()

    assert 1 == len(set(found.values())), found.keys()


@dataclass(frozen=True)
class Operation:
    """Of rows: x [n, *] -> out [n, *row].

    x      on the device, with BAND rows of numbers before those n, and behind them
    start  takes x and out, both without the bands, count, and overlap
    """

    x: Any
    row: tuple[int, ...]
    start: Callable[[Any, Any, Any, bool], None]

    def out(self, kernels: Any) -> Any:
        """Between bands as well, nothing written."""
        out = kernels._empty((len(self.x), *self.row), np.uint16)
        out.fill(UNTOUCHED)
        return out

    def run(self, out: Any, count: Any, *, overlap: bool = False) -> None:
        self.start(self.x[BAND:-BAND], out[BAND:-BAND], count, overlap)


def operations(
    pair: Pair, file: str, n: int, shapes: Sequence[tuple[int, int]] = ((576, 1048), (4100, 520))
) -> dict[str, Operation]:
    """By kernel: those of a file that may serve n rows of a projection, or of heads."""
    get = kernel_of(pair.cuda, file)

    def project(name: str, weight: Any, x: Any, out: Any, count: Any, overlap: bool) -> None:
        cuda_linear.run(get, name, x, weight, out, count, overlap=overlap)

    found: dict[str, Operation] = {}
    for o, i in shapes:
        (_, x), (_, weight) = pair.numbers(BAND + n + BAND, i), pair.numbers(o, i)
        names = fitting(o, file) + (["linear_any"] if file == "linear" else [])
        for name in names:
            found[f"{name}, o = {o}, i = {i}"] = Operation(x, (o,), partial(project, name, weight))
    return found | (of_heads(pair, n) if file == "linear" else {})


def of_heads(pair: Pair, n: int) -> dict[str, Operation]:
    """`linear_heads` and `latent_query`, of as many rows of x a block as n asks for."""
    get = kernel_of(pair.cuda, "linear")
    h, c, d, r = 3, 40, 136, 16
    rows = BAND + n + BAND
    (_, x), (_, q) = pair.numbers(rows, h, d), pair.numbers(rows, h, d + r)
    (_, w_vc), (_, w_kc) = pair.numbers(h, c, d), pair.numbers(h, c, d)
    angles = pair.rng.standard_normal((2, rows, r // 2)).astype(np.float32)
    cos, sin = (pair.cuda.upload(of)[BAND:-BAND] for of in angles)

    def values(x: Any, out: Any, count: Any, overlap: bool) -> None:
        assert cuda_linear.fast(x, w_vc)
        cuda_linear.batched_linear(get, x, w_vc, out, count, overlap=overlap)

    def query(q: Any, out: Any, count: Any, overlap: bool) -> None:
        assert cuda_linear.fast_query(q, w_kc)
        cuda_linear.latent_query(get, q, w_kc, cos, sin, out, count, overlap=overlap)

    return {
        "linear_heads": Operation(x, (h, c), values),
        "latent_query": Operation(q, (h, c + r), query),
    }


@pytest.mark.parametrize("beyond", [1, 100, 1 << 32])
@pytest.mark.parametrize("n", ROWS)
def test_a_count_beyond_the_rows_is_all_of_them(
    bfloat16: Any, file: str, n: int, beyond: int
) -> None:
    """No row beyond them is written, nor read: what is read is multiplied, and written."""
    pair = Pair(bfloat16, "bfloat16", seed=n)
    found = {}
    with bfloat16.turn:
        counts = [bfloat16._uploaded(np.array([count], np.int64)) for count in (n, n + beyond)]
        for name, operation in operations(pair, file, n).items():
            outs = [operation.out(bfloat16) for _ in counts]
            for out, count in zip(outs, counts, strict=True):
                operation.run(out, count)
            found[name] = [out.get() for out in outs]

    for name, (expected, bits) in found.items():
        written = (expected != UNTOUCHED).reshape(len(expected), -1).any(axis=1)
        assert written[BAND:-BAND].all(), f"{name}: a row that counts is not written"
        assert not written[:BAND].any(), f"{name}: written before the first row"
        assert not written[-BAND:].any(), f"{name}: written behind the last row"
        assert np.array_equal(expected, bits), f"{name}, count = {n + beyond} of {n} rows"


# The first lets the kernel behind it start, takes its time, and then writes. The second reads
# before it waits for the kernel ahead, and after.
LATE = """
extern "C" __global__ void write_late(
    const unsigned short* from, unsigned short* to, int n, int clocks)  // [n], [n]
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    long long begin = clock64();
    while (clock64() - begin < clocks) {}
    for (int at = blockIdx.x * blockDim.x + threadIdx.x; at < n; at += gridDim.x * blockDim.x)
        to[at] = from[at];
}
extern "C" __global__ void read_twice(
    const volatile unsigned short* x, unsigned short* seen)  // [1], [2]
{
    seen[0] = x[0];
    asm volatile("griddepcontrol.wait;" ::: "memory");
    seen[1] = x[0];
}
"""


@dataclass(frozen=True)
class Late:
    """A slow writer, behind which the next kernel may start at once."""

    writer: Any
    reader: Any

    def write(self, finished: Any, x: Any, clocks: int = CLOCKS) -> None:
        """`finished` is read late as well."""
        launch(self.writer, (16, 1, 1), 256, 0, (finished, x, x.size, clocks))

    def is_overtaken(self, kernels: Any) -> bool:
        """Whether a kernel behind it that does not wait reads what was there before."""
        finished, x, seen = (kernels._empty((size,), np.uint16) for size in (1, 1, 2))
        finished.fill(UNTOUCHED)
        early = UNTOUCHED
        for clocks in (0, CLOCKS):  # 0: loads the kernels, which may take longer than the writer
            x.fill(NAN)
            self.write(finished, x, clocks)
            launch(self.reader, (1, 1, 1), 1, 0, (x, seen), overlap=True)
            early, waited = seen.get().tolist()
            assert waited == UNTOUCHED, "a kernel that waits reads what the one ahead wrote"
        return early == NAN

    def skip_unless_overtaken(self, kernels: Any) -> None:
        if not self.is_overtaken(kernels):
            pytest.skip(
                "launches do not overlap here: CUDA_LAUNCH_BLOCKING, or a tool that runs kernels "
                "one by one"
            )


@pytest.fixture(scope="session")
def late() -> Late:
    cupy = pytest.importorskip("cupy")
    found = cupy.cuda.Device().compute_capability
    if int(found) < 90:
        pytest.skip(f"launches overlap from compute capability 9.0 on; this device has {found}")
    module = cupy.RawModule(code=LATE, options=("-std=c++17",))
    return Late(module.get_function("write_late"), module.get_function("read_twice"))


# `late` comes first: below compute capability 9.0 there are no kernels either.
@pytest.mark.parametrize("n", ROWS)
def test_a_kernel_that_starts_early_waits_for_its_rows(
    late: Late, bfloat16: Any, file: str, n: int
) -> None:
    pair = Pair(bfloat16, "bfloat16", seed=n)
    found = {}
    with bfloat16.turn:
        late.skip_unless_overtaken(bfloat16)
        count = bfloat16._uploaded(np.array([n], np.int64))
        for name, operation in operations(pair, file, n).items():
            expected, out = operation.out(bfloat16), operation.out(bfloat16)
            operation.run(expected, count)  # loads the kernel, too
            finished = operation.x.copy()
            operation.x.fill(NAN)
            late.write(finished, operation.x)
            operation.run(out, count, overlap=True)
            found[name] = expected.get(), out.get()

    for name, (expected, bits) in found.items():
        assert (expected[BAND:-BAND] != UNTOUCHED).any(), f"{name}: nothing is written"
        assert np.array_equal(expected, bits), name


@pytest.mark.parametrize("n", ROWS)
def test_a_kernel_that_starts_early_leaves_what_the_one_ahead_still_reads(
    late: Late, bfloat16: Any, file: str, n: int
) -> None:
    """A graph's buffers serve one kernel after another: its result may go where that reads."""
    pair = Pair(bfloat16, "bfloat16", seed=n)
    found = {}
    with bfloat16.turn:
        late.skip_unless_overtaken(bfloat16)
        count = bfloat16._uploaded(np.array([n], np.int64))
        for name, operation in operations(pair, file, n, ((576, 1048), *FEW_STEPS)).items():
            expected, out = operation.out(bfloat16), operation.out(bfloat16)
            operation.run(expected, count)  # loads the kernel, too
            read = bfloat16._empty(out.shape, out.dtype)
            late.write(out, read)
            operation.run(out, count, overlap=True)
            found[name] = expected.get(), out.get(), read.get()

    for name, (expected, bits, read) in found.items():
        assert (expected[BAND:-BAND] != UNTOUCHED).any(), f"{name}: nothing is written"
        assert np.array_equal(expected, bits), name
        assert (read == UNTOUCHED).all(), f"{name}: written before the kernel ahead had read"
