"""The gate over the committed corpus, the tiny bundle and the x-ray models: time and memory.

    python benchmarks/judging.py [--out benchmarks/results/judging.md]

Each engine is judged in a process of its own, all in one run, so that the ratios hold on this
machine. Rows are those that were compared, stage by stage. The peak is the process's own, with the
reference's ensemble of honest engines in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kdtr.conformance import load_engine
from kdtr.conformance.gate import run_gate

ROOT = Path(__file__).resolve().parents[1]
ENGINES: dict[str, dict[str, Any]] = {
    "host float32": {},
    "host bfloat16": {"dtype": "bfloat16"},
    "host float16": {"dtype": "float16"},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the table, beside standard output")
    parser.add_argument("--child", metavar="ENGINE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_measure(args.child)))
        return 0
    table = "\n".join(_table({name: _in_a_process(name) for name in ENGINES})) + "\n"
    print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table, encoding="utf-8")
    return 0


def _bundles() -> list[Path]:
    tiny = ROOT / "build" / "golden" / "tiny.kdtr"
    corpus = sorted((ROOT / "conformance" / "corpus").glob("*.kdtr"))
    return [*corpus, *([tiny] if tiny.is_file() else [])]


def _measure(name: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine = load_engine("host", ENGINES[name])
    start = time.perf_counter()
    gate = run_gate(engine, _bundles(), engine_name="host", options=ENGINES[name], xray=True)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    headrooms = [r.headroom for r in gate.results if r.headroom is not None]
    return {
        "seconds": seconds,
        "rows": sum(result.rows for result in gate.results),
        "comparisons": sum(result.comparisons for result in gate.results),
        "headroom": max(headrooms),
        "passed": gate.passed,
        "start_mib": before / 1024,
        "peak_mib": peak / 1024,
    }


def _in_a_process(name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name]
    found: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    return found


def _table(measured: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        f"# {len(_bundles())} golden bundles and the x-ray models, judged",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {version('numpy')}. Command: `python "
        "benchmarks/judging.py`",
        "",
        "| engine | verdict | s | rows | rows/s | worst error/bound | MiB at start | peak MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, m in measured.items():
        verdict = "passed" if m["passed"] else "FAILED"
        lines.append(
            f"| {name} | {verdict} | {m['seconds']:.1f} | {m['rows']:,} | "
            f"{m['rows'] / m['seconds']:,.0f} | {m['headroom']:.2f} | {m['start_mib']:.0f} | "
            f"{m['peak_mib']:.0f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
