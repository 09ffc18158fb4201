"""Tree attention on a CUDA device: checked, timed against its floor, and beside its peers.

    python benchmarks/kernels/verify_attn.py --check --time --peers [--shapes 8/17/8k ...]
    python benchmarks/kernels/verify_attn.py --time --peers --table FILE.md
    python benchmarks/kernels/verify_attn.py --sweep --parts    # choice of a cut; where time goes
    ncu -k regex:verify_attn -c 2 --set full python benchmarks/kernels/verify_attn.py --one 8/17/8k

A shape is heads/nodes/committed tokens; one layer, bfloat16, c = 512, r = 64. Times are medians
over replays of a CUDA graph that holds one call per copy of the cache, with copies enough that L2
has forgotten a copy when its turn comes again. Needs CuPy and a GPU; peers also need torch.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from attention_shapes import ROW, SCALE, SHAPES, C, R, Shape
from attention_table import table
from table_head import output_of

from kdtr.engine import cuda_attention as attention
from kdtr.engine import cuda_hopper
from kdtr.engine.cuda_cuts import MOST_SPLITS, Cut, choose_cut, splits_in_use
from kdtr.engine.cuda_launcher import row_bucket, slot_bucket
from kdtr.engine.cuda_modules import KERNELS

PAGE = 64


# Data, on the host: bfloat16 as uint16


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def random_ancestors(rng: np.random.Generator, n: int, n_counted: int) -> np.ndarray:
    """[n, n] bool, self included; rows and columns of padding see and are seen by themselves."""
    seen = np.eye(n, dtype=bool)
    for i in range(1, n_counted):
        parent = int(rng.integers(max(0, i - 6), i))
        seen[i] |= seen[parent]
    return seen


def pack_bits(seen: np.ndarray) -> np.ndarray:
    """[n, width] bool -> [n, ceil(width / 32)] uint32."""
    n, width = seen.shape
    padded = np.zeros((n, -(-max(width, 1) // 32) * 32), bool)
    padded[:, :width] = seen
    return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def reference(query: np.ndarray, rows: np.ndarray, seen: np.ndarray, c: int, scale: float) -> tuple:
    """float64 on the device: query [n, h, c + r], rows [s, c + r], seen [n, s] -> out, scores."""
    import cupy as cp

    q, k = cp.asarray(query, cp.float64), cp.asarray(rows, cp.float64)
    visible = cp.asarray(seen)[:, None, :]
    scores = cp.where(visible, cp.einsum("nhe,se->nhs", q, k) * scale, -np.inf)
    p = cp.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return cp.asnumpy(cp.einsum("nhs,sc->nhc", p, k[:, :c])), cp.asnumpy(scores)


# The device


class Device:
    """Compiled kernels of the project, by name, for one storage type.

    hopper  whether to take the kernel of Hopper's own instructions, where the engine does
    """

    def __init__(self, hopper: bool = True) -> None:
        import cupy as cp

        self.cp = cp
        self.hopper = hopper and cp.cuda.Device().compute_capability == "90"
        self._modules: dict[tuple[str, bool], Any] = {}
        for file in ("verify_attn", "verify_attn_mma"):
            for bf16 in (False, True) if file == "verify_attn" else (True,):
                options = ["-std=c++17", f"-I{KERNELS}", *(["-DSTORE_BF16"] if bf16 else [])]
                code = (KERNELS / f"{file}.cu").read_text()
                self._modules[file, bf16] = cp.RawModule(code=code, options=tuple(options))
        if self.hopper:
            code = (KERNELS / "verify_attn_wgmma.cu").read_text()
            options = ("-std=c++17", f"-I{KERNELS}", "-DSTORE_BF16")
            module = cuda_hopper.compiled(cp, code, "verify_attn_wgmma.cu", options)
            self._modules["verify_attn_wgmma", True] = module
        self._kernels: dict[tuple[str, bool, str], Any] = {}

    def getter(self, file: str, bf16: bool) -> Callable[[str], Any]:
        def get(name: str) -> Any:
            key = (file, bf16, name)
            if key not in self._kernels:
                self._kernels[key] = self._modules[file, bf16].get_function(name)
            return self._kernels[key]

        return get

    def attend(
        self,
        layer: Any,
        query: Any,
        visibility: Any,
        max_slots: int,
        *,
        c: int = C,
        scale: float = SCALE,
        split_size: int = 256,
        scores: Any = None,
        cut: Any = None,
    ) -> Any:
        bf16 = query.dtype.itemsize == 2
        return attention.verify_attn(
            self.getter("verify_attn", bf16),
            self.getter("verify_attn_mma", True),
            *(layer, query, visibility, c, scale, split_size, max_slots, scores),
            wgmma=self.getter("verify_attn_wgmma", True) if self.hopper else None,
            cut=cut,
        )


class Captured:
    """A graph of calls, with the memory they allocated."""

    def __init__(self, work: Callable[[], Any]) -> None:
        import cupy as cp

        cp.cuda.Device().synchronize()  # the operands are there
        self.stream = cp.cuda.Stream(non_blocking=True)
        self.pool = cp.cuda.MemoryPool()
        with self.stream, cp.cuda.using_allocator(self.pool.malloc):
            self.results = work()  # compiles, and fills the pool
            self.stream.synchronize()
            self.results = None
            self.stream.begin_capture()
            self.results = work()
            self.graph = self.stream.end_capture()
        self.graph.upload(self.stream)

    def replay(self) -> None:
        self.graph.launch(self.stream)

    def median_us(self, calls: int, replays: int = 11) -> float:
        import cupy as cp

        times = []
        for i in range(replays + 2):
            start, end = cp.cuda.Event(), cp.cuda.Event()
            start.record(self.stream)
            self.replay()
            end.record(self.stream)
            end.synchronize()
            if i >= 2:
                times.append(cp.cuda.get_elapsed_time(start, end) * 1e3 / calls)
        return statistics.median(times)


# Checks


@dataclass
class Case:
    """One forward with everything hostile around it: NaN wherever nothing may be read."""

    n: int
    counted: int
    h: int
    committed: int
    page_size: int = PAGE
    c: int = C
    r: int = R
    bf16: bool = True
    swizzled: bool = True
    arbitrary: bool = False  # a mask over all slots, open_len 0
    seed: int = 0
    poisoned_node: int = -1  # its row is NaN
    spare: int = 3  # pages more than needed, and so max_slots above n_slots

    def build(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.n_slots = self.committed + self.counted
        block = random_ancestors(rng, self.n, self.counted)
        self.seen = np.ones((self.n, self.n_slots), bool)
        self.seen[:, self.committed :] = block[:, : self.counted]
        self.open_len = self.committed
        if self.arbitrary:
            self.seen[:, : self.committed] = rng.random((self.n, self.committed)) < 0.4
            self.open_len, block = 0, self.seen
        pages = -(-self.n_slots // self.page_size)
        total = pages + self.spare
        self.max_slots = total * self.page_size
        self.table = np.full(total, -1, np.int64)
        self.table[:pages] = rng.permutation(total)[:pages]
        row_len = self.c + self.r
        self.rows = rng.standard_normal((self.n_slots, row_len)).astype(np.float32)
        self.query = rng.standard_normal((self.n, self.h, row_len)).astype(np.float32)
        if self.bf16:
            self.rows, self.query = from_bf16(to_bf16(self.rows)), from_bf16(to_bf16(self.query))
        stored = self.rows.copy()
        if self.poisoned_node >= 0:
            stored[self.committed + self.poisoned_node] = np.nan
        query = self.query.copy()
        query[self.counted :] = np.nan
        slots = np.arange(self.n_slots)
        physical = np.full((total * self.page_size, row_len), np.nan, np.float32)
        where = self.table[slots // self.page_size] * self.page_size + slots % self.page_size
        physical[where] = stored
        if self.bf16:
            physical, query = to_bf16(physical), to_bf16(query)
        if self.swizzled:
            physical = attention.swizzle(physical)
        import cupy as cp

        def number(x: int) -> Any:
            return cp.asarray([x], cp.int64)

        self.layer = attention.LayerCache(
            cp.asarray(physical), cp.asarray(self.table), self.page_size, self.swizzled
        )
        self.device_query = cp.asarray(query)
        self.visibility = attention.DeviceVisibility(
            number(self.counted),
            number(self.open_len),
            number(self.n_slots),
            cp.asarray(pack_bits(block)),
        )

    def run(self, device: Device, scores: Any = None, cut: Any = None) -> np.ndarray:
        out = device.attend(
            *(self.layer, self.device_query, self.visibility, self.max_slots),
            c=self.c,
            split_size=100 if not self.swizzled else 256,
            scores=scores,
            cut=cut,
        )
        host = device.cp.asnumpy(out)[: self.counted]
        return from_bf16(host) if self.bf16 else host


SPLITS = (1, 3, 40)


def cuts_of(device: Device, case: Case) -> list[Any]:
    """None, which is the engine's choice, and those of every kernel that takes the case."""
    if not case.swizzled:
        return [None]
    hoppers = cuda_hopper.ROWS if device.hopper and case.page_size % cuda_hopper.TILE == 0 else 0
    return [None, *(Cut(rows, s) for rows in (16, 32, hoppers) if rows for s in SPLITS)]


def check_case(device: Device, case: Case, cut: Any = None) -> float:
    """The largest error over the largest value; raises where a promise is broken."""
    cp = device.cp
    case.build()
    scores = cp.full((case.n, case.h, case.max_slots), -np.inf, cp.float32)
    out = case.run(device, cut=cut)
    traced = case.run(device, scores, cut)
    assert np.array_equal(out, traced, equal_nan=True), "scores change the result"
    keep = np.ones(case.counted, bool)
    if case.poisoned_node >= 0:
        keep = ~case.seen[: case.counted, case.committed + case.poisoned_node]
        assert np.isnan(out[~keep]).all(), "a node that sees a NaN must be NaN"
    assert np.isfinite(out[keep]).all(), f"{np.isnan(out[keep]).sum()} values are not finite"
    count = case.counted
    expected, expected_scores = reference(
        case.query[:count], case.rows, case.seen[:count], case.c, SCALE
    )
    error = np.abs(out - expected)[keep].max(initial=0.0) / np.abs(expected).max()
    got = cp.asnumpy(scores)[:count]
    assert np.isneginf(got[..., case.n_slots :]).all(), "a score beyond n_slots"
    got = got[..., : case.n_slots]
    visible = np.broadcast_to(case.seen[:count, None, :], got.shape)
    assert np.isneginf(got[~visible]).all(), "a score of a hidden slot"
    near = np.abs(np.where(visible, got - np.where(visible, expected_scores, 0), 0))[keep]
    assert near.max(initial=0.0) < 1e-4 * np.abs(expected_scores[visible]).max(), near.max()
    return float(error)


def check(device: Device) -> None:
    cp = device.cp
    fast = [
        Case(1, 1, 8, 0),
        Case(1, 1, 8, 1),
        Case(1, 1, 8, 31),
        Case(1, 1, 8, 1024),
        Case(2, 2, 8, 63),
        Case(5, 3, 8, 65, page_size=32),
        Case(5, 5, 3, 200, page_size=128),
        Case(17, 17, 8, 0),
        Case(17, 12, 8, 1000, poisoned_node=4),
        Case(17, 17, 8, 1024, page_size=32, poisoned_node=0),
        Case(33, 30, 8, 2047, poisoned_node=20),
        Case(65, 65, 8, 1024, poisoned_node=33),
        Case(65, 50, 8, 8192, spare=400),
        Case(17, 17, 64, 1024),
        Case(1, 1, 64, 4097),
        Case(129, 129, 8, 333, poisoned_node=70),
        Case(17, 17, 8, 700, arbitrary=True),
        Case(3, 3, 8, 5000, arbitrary=True, page_size=256),
    ]
    plain = [
        Case(17, 12, 8, 300, swizzled=False, poisoned_node=4),
        Case(5, 4, 3, 70, swizzled=False, page_size=3, c=40, r=12, bf16=False, poisoned_node=1),
        Case(7, 7, 5, 129, swizzled=False, page_size=7, c=33, r=2, bf16=False),
        Case(9, 9, 4, 200, swizzled=False, page_size=16, c=64, r=16, arbitrary=True),
        Case(65, 65, 8, 500, swizzled=False, page_size=64, bf16=False, poisoned_node=9),
    ]
    for case in (*fast, *plain):
        for cut in cuts_of(device, case):
            error = check_case(device, case, cut)
            bound = 6e-3 if case.bf16 else 2e-6  # of the largest value; 3 roundings of 2^-9
            what = f"n {case.n} of {case.counted} h {case.h} L {case.committed}"
            by = "as chosen" if cut is None else f"{cut.rows} rows a block, {cut.splits} splits"
            print(f"{what:28s} page {case.page_size:3d} {by:28s} error {error:.2e}", flush=True)
            assert error < bound, (case, error)
    growing(device)
    for shape in ("8/17/8k", "8/65/1k", "8/1/8k"):
        inputs = Inputs(Shape.parse(shape), copies=1)
        captured = Captured(lambda inputs=inputs: inputs.attend_all(device))
        captured.replay()
        captured.stream.synchronize()
        first = captured.results[0].copy()
        for _ in range(100):
            captured.results[0].fill(0)
            captured.stream.synchronize()
            cp.cuda.Device().synchronize()
            captured.replay()
            captured.stream.synchronize()
            assert bool((captured.results[0] == first).all()), "a replay differs"
        print(f"{shape}: 100 replays give the same bits", flush=True)


def growing(device: Device) -> None:
    """One graph while the sequence grows: n_slots, open_len and count change on the device."""
    cp = device.cp
    case = Case(9, 9, 8, 400, spare=40)
    case.build()
    captured = Captured(
        lambda: device.attend(
            *(case.layer, case.device_query, case.visibility, case.max_slots), cut=Cut(32, 13)
        )
    )
    for committed, counted in ((400, 9), (390, 7), (33, 9), (0, 1), (400, 9)):
        seen = case.seen.copy()
        block = random_ancestors(np.random.default_rng(committed), 9, counted)
        seen = np.ones((9, committed + counted), bool)
        seen[:, committed:] = block[:, :counted]
        for at, value in zip(
            case.visibility[:3], (counted, committed, committed + counted), strict=True
        ):
            at.fill(value)
        case.visibility.bits[...] = cp.asarray(pack_bits(block))
        cp.cuda.Device().synchronize()
        captured.replay()
        captured.stream.synchronize()
        out = from_bf16(cp.asnumpy(captured.results))[:counted]
        expected, _ = reference(
            case.query[:counted], case.rows[: committed + counted], seen[:counted], C, SCALE
        )
        error = np.abs(out - expected).max() / np.abs(expected).max()
        assert error < 6e-3, (committed, counted, error)
    print("one graph serves a growing sequence", flush=True)


# Times


class Inputs:
    """Random data for a shape: `copies` caches, one query, a random tree."""

    def __init__(self, shape: Shape, copies: int | None = None) -> None:
        import cupy as cp

        self.shape = shape
        self.copies = shape.copies() if copies is None else copies
        rng = np.random.default_rng(1)
        pages = -(-shape.slots() // PAGE)
        self.table = rng.permutation(pages).astype(np.int64)
        generator = cp.random.default_rng(1)

        def normal(*size: int) -> Any:
            bits = generator.standard_normal(size, dtype=cp.float32).view(cp.uint32)
            return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(cp.uint16)

        self.rows = cp.empty((self.copies, pages * PAGE, ROW), cp.uint16)
        for i in range(self.copies):
            self.rows[i] = normal(pages * PAGE, ROW)  # any values are swizzled values of others
        self.query = normal(shape.nodes, shape.heads, ROW)
        self.ancestors = random_ancestors(rng, shape.nodes, shape.nodes)
        self.device_table = cp.asarray(self.table)
        self.visibility = attention.DeviceVisibility(
            *(cp.asarray([x], cp.int64) for x in (shape.nodes, shape.committed, shape.slots())),
            cp.asarray(pack_bits(self.ancestors)),
        )

    def attend_all(self, device: Device, cut: Any = None) -> list[Any]:
        results = []
        for i in range(self.copies):
            layer = attention.LayerCache(self.rows[i], self.device_table, PAGE, True)
            out = device.attend(
                layer, self.query, self.visibility, slot_bucket(self.shape.slots()), cut=cut
            )
            if i == 0:
                results.append(out)
        return results

    def time_us(self, device: Device, cut: Any = None) -> float:
        return Captured(lambda: self.attend_all(device, cut)).median_us(self.copies)


def time_shapes(device: Device, shapes: list[Shape]) -> dict[str, float]:
    """As the engine launches them: for the buckets of rows and slots that it would take."""
    times = {}
    print("| shape | rows a block, splits | us |\n|---|---|---|")
    for shape in shapes:
        assert row_bucket(shape.nodes) == shape.nodes, "a shape of the table is a bucket of rows"
        us = times[str(shape)] = Inputs(shape).time_us(device)
        print(f"| {shape} | {cut_of(device, shape)} | {us:.1f} |", flush=True)
    return times


def cut_of(device: Device, shape: Shape) -> str:
    """The engine's choice; of the splits in the grid, those in use."""
    slots, size = slot_bucket(shape.slots()), attention.device_size(0)
    cut = choose_cut(shape.rows(), slots, PAGE, size, hopper=device.hopper)
    in_use = splits_in_use(-(-shape.slots() // cut.tile), cut.splits)
    return f"{cut.rows}, {in_use} of {cut.splits}"


def sweep(device: Device, shapes: list[Shape]) -> None:
    """Every sensible cut."""
    size = attention.device_size(0)
    for shape in shapes:
        inputs = Inputs(shape)
        for rows in (16, 32, cuda_hopper.ROWS)[: 3 if device.hopper else 2]:
            tiles = -(-shape.slots() // Cut(rows, 1).tile)
            row_blocks = Cut(rows, 1).row_blocks(shape.rows())
            most = max(1, min(tiles, MOST_SPLITS, 3 * size.n_sms // row_blocks))
            wanted = {size.n_sms * fourths // (4 * row_blocks) for fourths in range(1, 13)}
            wanted |= {-(-tiles // t) for t in (1, 2, 3, 4, 5, 6, 8, 9)}
            in_use = {splits_in_use(tiles, s) for s in wanted if 1 <= s <= most}
            line = [f"{s}: {inputs.time_us(device, Cut(rows, s)):.1f}" for s in sorted(in_use)]
            what = f"{shape}, {rows} rows a block ({row_blocks} row blocks, {tiles} tiles)"
            print(what, *line, sep="  ", flush=True)


def parts(device: Device, shapes: list[Shape]) -> None:
    """The launches alone, and without overlap."""
    launch = attention.launch
    try:
        for shape in shapes:
            inputs = Inputs(shape)
            line = []
            for name, wanted, overlap in (
                ("both", "", True),
                ("without overlap", "", False),
                ("split", "mma_[0-9]|wgmma", True),
                ("merge", "merge", True),
            ):

                def chosen(
                    kernel: Any, *rest: Any, overlap: bool = overlap, wanted: str = wanted
                ) -> None:
                    if re.search(wanted, kernel.name):
                        launch(kernel, *rest, overlap=overlap)

                attention.launch = lambda *a, chosen=chosen, overlap=None: chosen(*a)
                line.append(f"{name} {inputs.time_us(device):.1f}")
            print(f"{shape}  " + "  ".join(line), flush=True)
    finally:
        attention.launch = launch


def one(device: Device, shape: Shape) -> None:
    """A few plain launches, for a profiler."""
    inputs = Inputs(shape, copies=4)
    inputs.attend_all(device)
    device.cp.cuda.Device().synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("check", "time", "sweep", "parts", "peers"):
        parser.add_argument(f"--{flag}", action="store_true")
    parser.add_argument("--portable", action="store_true", help="without Hopper's own kernel")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--one", metavar="SHAPE")
    parser.add_argument("--table", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--out", type=Path, help="a file for the times, in JSON")
    args = parser.parse_args()
    shapes = [Shape.parse(text) for text in args.shapes]
    started = time.time()
    device = Device(hopper=not args.portable)
    device.cp.cuda.Stream(non_blocking=True).use()
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    print(output_of("nvidia-smi", query, "--format=csv,noheader"))
    for rows in attention.MMA_SHARED_BYTES:
        kernel = device.getter("verify_attn_mma", True)(f"verify_attn_mma_{rows}")
        print(
            f"{rows} rows a block: {kernel.num_regs} registers, "
            f"{kernel.local_size_bytes} bytes of stack"
        )
    times: dict[str, float] = {}
    portable: dict[str, float] = {}
    peers: dict[str, Any] = {}
    if args.one:
        one(device, Shape.parse(args.one))
    if args.check:
        check(device)
        print(f"checked, {time.time() - started:.0f} s", flush=True)
    if args.time or args.peers or args.table:
        times = time_shapes(device, shapes)
        if device.hopper:
            print("without Hopper's own kernel")
            portable = time_shapes(Device(hopper=False), shapes)
        print(f"timed, {time.time() - started:.0f} s", flush=True)
    if args.parts:
        parts(device, shapes)
    if args.sweep:
        sweep(device, shapes)
    if args.peers:
        import peers_attention  # torch and Triton, which nothing else needs

        peers = peers_attention.time_peers(shapes)
    if args.table:
        text = table(times, portable, peers)
        print(text)
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_text(text, encoding="utf-8")
    if args.out:
        args.out.write_text(
            json.dumps({"verify_attn": times, "portable": portable, **peers}, indent=1)
        )
    print(f"done, {time.time() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
