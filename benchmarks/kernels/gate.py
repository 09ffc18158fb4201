"""The whole gate of the CUDA engine, on the GPU of this machine, and its table (`make gate-gpu`).

    python benchmarks/kernels/gate.py [--out benchmarks/results/gate-gpu.md] [BUNDLE ...]

In this order: the tests that need a device, mutants of this engine among them; the bundles and the
x-ray models, per dtype, with graphs, without, and with guarded buffers; the laws, profile ci, on
models of odd sizes and on those that the fast kernels take; and compute-sanitizer's memcheck and
racecheck on small rounds, where it can be run. Below the table stand near ties, what was skipped
and what each part did. Exits 1 if one of them fails, or says too little to have done it; what could
not run is said, and is no pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from gate_table import Reported, near_tie_lines, read_report, said, skipped_lines

import kdtr.conformance
from kdtr.contract import UnsupportedError
from kdtr.engine.cuda_modules import import_cupy

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(kdtr.conformance.__file__).parent / "corpus"
# Without the project's settings, which ask for pytest 9.
PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull),
    *("--rootdir", str(ROOT), "--import-mode=importlib"),
]
VARIANTS = (
    ("float32", {}),
    ("float32", {"graphs": "False"}),
    ("float32", {"guarded": "True"}),
    ("bfloat16", {}),
    ("bfloat16", {"graphs": "False"}),
    ("bfloat16", {"guarded": "True"}),
)
# The sizes of the drawn models, the engine's options, and what changes it into another that nobody
# may tell apart: the general kernels with an edge of a page and of a split in almost every example,
# then the fast ones.
LAWS = (
    ("odd", {"dtype": "float32", "page_size": "3", "split_size": "5"}, "page_size=7"),
    ("odd", {"dtype": "bfloat16", "page_size": "3", "split_size": "5"}, "graphs=False"),
    ("aligned", {"dtype": "bfloat16", "page_size": "64"}, "page_size=32"),
    ("aligned", {"dtype": "bfloat16", "page_size": "32", "guarded": "True"}, "graphs=False"),
)
DID = {
    "device tests": "every operation against its host twin; replays against launches and against "
    "themselves, bit for bit, on small and on tensor-core sizes, pages of 32, 64, 128; offsets "
    "beyond 2^31; memory that runs out; sessions, models, engines and threads by turns; every "
    "mutant of cuda_faults.py killed, and its stage named",
    "gate": "every case of the bundles and the x-ray models. Every page of a cache is NaN when it "
    "is handed out, in all parts",
    "gate guarded": "the same, every buffer that a kernel writes between two bands of 256 known "
    "bytes, and NaN until written: in launches, in every replay anew, and beside the cache rows; "
    "the bands are compared after each run",
    "laws": "every law of property_tests on models of odd sizes: the general kernels; beside an "
    "engine of other pages, or without graphs, that nobody may tell apart",
    "laws aligned": "the same on models with kv_lora_rank 512, qk_rope_head_dim 64 and rows of "
    "whole 16 bytes: the tensor cores' attention, streaming projections and experts",
    "compute-sanitizer": "prefill, build, verify and round of 1, 9 and 40 nodes, captured and "
    "launched, of tiny and of a model with tensor-core sizes; each buffer from the driver itself. "
    "portable: without the kernels that Hopper alone has",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="*", help="beside the corpus")
    parser.add_argument("--out", type=Path, help="a file for the table, beside standard output")
    parser.add_argument("--logs", type=Path, help="a folder for what each part prints")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time; seconds then mix")
    parser.add_argument("--workers", type=int, default=1, help="of pytest-xdist, in tests and laws")
    parser.add_argument("--only", default="", metavar="REGEX", help="parts with such a name")
    parser.add_argument("--profile", default="ci", help="of Hypothesis, for the laws")
    args = parser.parse_args()
    try:
        head = _head(whole=not args.only)
    except UnsupportedError as error:
        sys.exit(f"gate-gpu: {error}")
    with TemporaryDirectory() as folder:
        parts = [part for part in _parts(args, Path(folder)) if re.search(args.only, part.name)]
        if not parts:
            sys.exit(f"gate-gpu: no part's name has {args.only!r} in it")
        text, bad = _judge(parts, args)
    text = "\n".join([*head, *text]) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return int(bad)


def _judge(parts: list[Part], args: argparse.Namespace) -> tuple[list[str], bool]:
    """The table and what stands below it, and whether a part failed."""
    bad, lines = False, []
    outputs: dict[str, str] = {}
    reports: dict[str, Reported] = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for part, done in zip(parts, pool.map(_run, parts), strict=True):
            bad |= done.status != 0
            if args.logs:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / (re.sub(r"\W+", "-", part.name) + ".log")).write_text(done.output)
            outcome = "passed" if done.status == 0 else f"FAILED ({done.status})"
            words = said(done.output)
            if part.report:
                reports[part.name] = read_report(part.report)
                words += f"; error/bound {reports[part.name].headroom:.2f}"
            elif "pytest" in part.command:
                outputs[part.name] = done.output
            lines.append(f"| {part.name} | {outcome} | {words} | {done.seconds:.0f} |")
            print(lines[-1], flush=True)
            if done.status:
                print(done.output[-6000:], flush=True)
    if not shutil.which("compute-sanitizer") and re.search(args.only, "compute-sanitizer"):
        lines.append("| compute-sanitizer | not run: not installed | | |")
    lines += [*near_tie_lines(reports), *skipped_lines(outputs), "", "## What each part did", ""]
    lines += [f"- {name}: {DID[name]}" for name in dict.fromkeys(part.did for part in parts)]
    return lines, bad


@dataclass(frozen=True, slots=True)
class Part:
    """One command, and what its output must say for it to have done its work.

    did     what that is: a key of DID
    says    regular expressions
    report  of a gate: the JSON lines that it writes
    """

    name: str
    did: str
    command: list[str]
    says: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    report: Path | None = None


class Done(NamedTuple):
    """What one part printed, and how it ended."""

    status: int
    output: str
    seconds: float


def _run(part: Part) -> Done:
    start = time.perf_counter()
    done = subprocess.run(
        part.command,
        cwd=ROOT,
        env={**os.environ, **part.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    unsaid = [words for words in part.says if not re.search(words, done.stdout)]
    lines = [done.stdout, *(f"gate-gpu: it did not say {words!r}" for words in unsaid)]
    seconds = time.perf_counter() - start
    return Done(done.returncode or int(bool(unsaid)), "\n".join(lines), seconds)


def _parts(args: argparse.Namespace, folder: Path) -> Iterator[Part]:
    passed = r"[1-9]\d* passed"
    workers = ["-n", str(args.workers)] if args.workers > 1 else []
    yield Part(
        "device tests", "device tests", [*PYTEST, *workers, "-rs", "tests/engine/gpu"], (passed,)
    )
    bundles = [str(path) for path in sorted(CORPUS.glob("*.kdtr"))] + args.bundles
    for number, (dtype, options) in enumerate(VARIANTS):
        report = folder / f"{number}.jsonl"
        words = [f"{key}={value}" for key, value in {"dtype": dtype, **options}.items()]
        yield Part(
            f"gate {' '.join(words)}",
            "gate guarded" if "guarded" in options else "gate",
            [
                *(sys.executable, "-m", "kdtr.conformance.cli", "gate", "--engine", "cuda"),
                *(word for option in words for word in ("--engine-option", option)),
                *("--jsonl", str(report), *bundles),
            ],
            ("gate passed: [1-9]",),
            {"COLUMNS": "140"},
            report,
        )
    for sizes, options, twin in LAWS:
        words = [f"{key}={value}" for key, value in options.items()]
        yield Part(
            f"laws {' '.join(words)}, {sizes} sizes, profile {args.profile}",
            "laws" if sizes == "odd" else "laws aligned",
            [
                *(*PYTEST, *workers, "--pyargs", "kdtr.property_tests", "--kdtr-engine", "cuda"),
                *(word for option in words for word in ("--kdtr-engine-option", option)),
                *("--kdtr-twin-option", twin, "-rs"),
            ],
            (passed, r"examples of \d+ laws: [1-9]"),
            {"KDTR_HYPOTHESIS_PROFILE": args.profile, "KDTR_LAW_SIZES": sizes},
        )
    if not shutil.which("compute-sanitizer"):
        return
    for tool, clean in (
        ("memcheck", "ERROR SUMMARY: 0 errors"),
        ("racecheck", r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)"),
    ):
        for words in ("float32", "bfloat16", "bfloat16 portable"):
            yield Part(
                f"compute-sanitizer {tool}, {words}",
                "compute-sanitizer",
                [
                    *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
                    *(sys.executable, "benchmarks/kernels/small_rounds.py", *words.split()),
                ],
                (clean, "64 launched", "64 captured", "512 launched", "512 captured"),
            )


def _head(*, whole: bool) -> list[str]:
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
    ).stdout.split()
    return [
        "# The gate of the CUDA engine" + ("" if whole else ": a part of it, and no gate"),
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {runtime.getDeviceProperties(0)['name'].decode()}, driver "
        f"{driver[0] if driver else 'unknown'}, CUDA {runtime.runtimeGetVersion()}, CuPy "
        f"{cupy.__version__}, commit {commit or 'unknown'}. "
        f"Command: `{' '.join(['python', *sys.argv])}`.",
        "",
        "| part | outcome | said | s |",
        "|---|---|---|---|",
    ]


if __name__ == "__main__":
    sys.exit(main())
