"""Reading a 1 GB file of tensors: KDTR beside safetensors and npz, in one run.

    python benchmarks/bundle_reading.py [--mib 1024] [--out benchmarks/results/bundle-reading.md]

Each measurement is a process of its own, after the file has been read once, so that the disk is
out of the picture. Resident memory is the process's own peak above what it had before opening.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from kdtr.kdtr_format import Bundle, write_bundle

_TENSORS = 64
_REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of each file")
    parser.add_argument("--out", type=Path, help="a file for the table, beside standard output")
    parser.add_argument("--child", nargs=2, metavar=("TASK", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_measure(*args.child)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        files = _write(Path(scratch), args.mib)
        rows = [_row(task, files[task.split()[0]]) for task in TASKS]
    table = "\n".join(_table(rows, args.mib)) + "\n"
    print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table, encoding="utf-8")


def _write(directory: Path, mib: int) -> dict[str, Path]:
    rng = np.random.default_rng(7)
    each = mib * 2**20 // _TENSORS // 4
    tensors = {f"t{i:02}": rng.random(each, dtype=np.float32) for i in range(_TENSORS)}
    files = {name: directory / f"x.{name}" for name in ("kdtr", "safetensors", "npz")}
    write_bundle(files["kdtr"], tensors, {})
    save_file(tensors, files["safetensors"])
    np.savez(files["npz"], **tensors)
    for file in files.values():
        file.read_bytes()
    return files


def _kdtr_open(file: str) -> object:
    return Bundle.open(file)


def _kdtr_one(file: str) -> object:
    with Bundle.open(file) as bundle:
        return float(bundle["t40"][:10].sum())


def _kdtr_verify(file: str) -> object:
    with Bundle.open(file) as bundle:
        bundle.verify()
    return None


def _safetensors_open(file: str) -> object:
    return safe_open(file, framework="numpy")


def _safetensors_one(file: str) -> object:
    with safe_open(file, framework="numpy") as tensors:
        return float(tensors.get_tensor("t40")[:10].sum())


def _safetensors_all(file: str) -> object:
    with safe_open(file, framework="numpy") as tensors:
        return sum(float(tensors.get_tensor(name)[0]) for name in tensors.keys())  # noqa: SIM118


def _npz_open(file: str) -> object:
    return np.load(file)


def _npz_one(file: str) -> object:
    with np.load(file) as arrays:
        return float(arrays["t40"][:10].sum())


def _npz_all(file: str) -> object:
    with np.load(file) as arrays:
        return sum(float(arrays[name][0]) for name in arrays.files)


TASKS: dict[str, Callable[[str], object]] = {
    "kdtr open": _kdtr_open,
    "safetensors open": _safetensors_open,
    "npz open": _npz_open,
    "kdtr one tensor, verified": _kdtr_one,
    "safetensors one tensor": _safetensors_one,
    "npz one tensor, verified": _npz_one,
    "kdtr everything verified": _kdtr_verify,
    "safetensors everything read": _safetensors_all,
    "npz everything read, verified": _npz_all,
}


def _measure(task: str, file: str) -> dict[str, float]:
    before = _resident("VmRSS"), _resident("RssAnon")
    start = time.perf_counter()
    kept = TASKS[task](file)
    seconds = time.perf_counter() - start
    anonymous = _resident("RssAnon") - before[1]
    peak = _resident("VmHWM") - before[0]
    del kept
    return {"seconds": seconds, "anonymous": anonymous, "peak": peak}


def _resident(field: str) -> float:
    """MiB of this process, from the kernel."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return float("nan")


def _row(task: str, file: Path) -> tuple[str, float, float, float]:
    command = [sys.executable, __file__, "--child", task, str(file)]
    runs = [json.loads(subprocess.check_output(command, text=True)) for _ in range(_REPEATS)]
    return (
        task,
        float(np.median([run["seconds"] for run in runs])),
        float(np.median([run["peak"] for run in runs])),
        float(np.median([run["anonymous"] for run in runs])),
    )


def _table(rows: list[tuple[str, float, float, float]], mib: int) -> list[str]:
    seconds = {task: took for task, took, _, _ in rows}
    lines = [
        f"# Reading {mib} MiB in {_TENSORS} float32 tensors",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {_cpu()}, Python {platform.python_version()}, "
        f"numpy {version('numpy')}, safetensors {version('safetensors')}; medians of {_REPEATS}.",
        "Command: `make bench`",
        "",
        "| task | ms | of kdtr's | GB/s | peak resident, MiB | of it copied, MiB |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    kdtr = [task for task in seconds if task.startswith("kdtr")]
    for i, (task, took, peak, anonymous) in enumerate(rows):
        base = seconds[kdtr[i // 3]]
        n_bytes = {0: 0, 1: mib * 2**20 / _TENSORS, 2: mib * 2**20}[i // 3]
        rate = f"{n_bytes / took / 1e9:.2f}" if n_bytes else ""
        lines.append(
            f"| {task} | {took * 1e3:.2f} | {took / base:.2f} | {rate} | {peak:.0f} | "
            f"{anonymous:.0f} |"
        )
    return lines


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
