"""The whole gate of the CUDA engine, on the GPU of this machine, and its table (`make gate-gpu`).

    python benchmarks/kernels/gate.py [--out benchmarks/results/gate-gpu.md] [BUNDLE ...]

In this order: the tests that need a device, mutants of this engine among them; the bundles and the
x-ray models, per dtype, with graphs, without, and with guarded buffers; the laws, profile ci; and
compute-sanitizer's memcheck and racecheck on small rounds, where it can be run. Exits 1 if one of
them fails; what could not run is said, and is no pass.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="*", help="beside the corpus")
    parser.add_argument("--out", type=Path, help="a file for the table, beside standard output")
    parser.add_argument("--logs", type=Path, help="a folder for what each part prints")
    parser.add_argument("--jobs", type=int, default=1, help="parts at a time; seconds then mix")
    parser.add_argument("--profile", default="ci", help="of Hypothesis, for the laws")
    args = parser.parse_args()
    try:
        head = _head()
    except UnsupportedError as error:
        sys.exit(f"gate-gpu: {error}")
    bad, rows = 0, []
    with ThreadPoolExecutor(args.jobs) as pool:
        for part in pool.map(_run, _parts(args)):
            bad += part.status != 0
            if args.logs:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / (re.sub(r"\W+", "-", part.name) + ".log")).write_text(part.output)
            outcome = "passed" if part.status == 0 else f"FAILED ({part.status})"
            rows.append(f"| {part.name} | {outcome} | {_said(part.output)} | {part.seconds:.0f} |")
            print(rows[-1], flush=True)
            if part.status:
                print(part.output[-6000:], flush=True)
    if not shutil.which("compute-sanitizer"):
        rows.append("| compute-sanitizer | not run: not installed | | |")
    text = "\n".join([*head, *rows]) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return int(bad > 0)


class Part(NamedTuple):
    """What one part printed, and how it ended."""

    name: str
    status: int
    output: str
    seconds: float


def _run(part: tuple[str, list[str], dict[str, str]]) -> Part:
    name, command, environment = part
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    ran_nothing = "pytest" in command and not re.search(r"[1-9]\d* passed", done.stdout)
    status = done.returncode or int(ran_nothing)
    return Part(name, status, done.stdout, time.perf_counter() - start)


def _parts(
    args: argparse.Namespace,
) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    """(name, command, environment) of every part."""
    bundles = [str(path) for path in sorted(CORPUS.glob("*.kdtr"))] + args.bundles
    kdtr_command = [sys.executable, "-m", "kdtr.conformance.cli"]
    yield "device tests", [*PYTEST, "tests/engine/gpu"], {}
    for dtype, options in VARIANTS:
        words = [f"{key}={value}" for key, value in {"dtype": dtype, **options}.items()]
        flags = [word for option in words for word in ("--engine-option", option)]
        yield (
            f"gate {' '.join(words)}",
            [*kdtr_command, "gate", "--engine", "cuda", *flags, *bundles],
            {"COLUMNS": "140"},
        )
    for dtype in ("float32", "bfloat16"):
        yield (
            f"laws dtype={dtype}, profile {args.profile}",
            [
                *PYTEST,
                "--pyargs",
                "kdtr.property_tests",
                "--kdtr-engine",
                "cuda",
                "--kdtr-engine-option",
                f"dtype={dtype}",
                "--kdtr-engine-option",
                "page_size=3",
                "--kdtr-engine-option",
                "split_size=5",
            ],
            {"KDTR_HYPOTHESIS_PROFILE": args.profile},
        )
    if shutil.which("compute-sanitizer"):
        for tool in ("memcheck", "racecheck"):
            for dtype in ("float32", "bfloat16"):
                yield (
                    f"compute-sanitizer {tool}, {dtype}",
                    [
                        "compute-sanitizer",
                        "--tool",
                        tool,
                        "--error-exitcode",
                        "9",
                        sys.executable,
                        "benchmarks/kernels/small_rounds.py",
                        dtype,
                    ],
                    {},
                )


def _said(output: str) -> str:
    """The line that sums a part up: of the gate, of pytest, of the sanitizer."""
    marks = ("gate passed", "gate FAILED", " passed", " failed", "ERROR SUMMARY", "RACECHECK")
    for line in reversed(output.splitlines()):
        if any(mark in line for mark in marks):
            return line.strip("= ").replace("|", "/")
    return ""


def _head() -> list[str]:
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
        "# The gate of the CUDA engine",
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
