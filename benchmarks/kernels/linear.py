"""Projections, router and experts on a CUDA device: checked, timed, and beside cuBLAS and torch.

    python benchmarks/kernels/linear.py --check --time [--variants] [--table FILE] [--out FILE]

Checks compare with float64, demand the same bits in every replay of a graph, and that a row's bits
do not depend on the other rows. Times are medians over replays of a CUDA graph with one call per
copy of the weights, with copies enough that L2 has forgotten a copy when its turn comes again; a
call's time is the graph's divided by its calls, launches included. `overlap` lets a launch begin
before the one ahead of it ends. The read bandwidth is that of a kernel that only reads, in the same
run.
Needs CuPy, torch and a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import linear_checks_experts
import linear_checks_projections
import linear_checks_replays
import linear_times_experts
import linear_times_projections
from linear_checks import Checks
from linear_device import Device
from linear_table import table
from linear_times import Times

CHECKS = (
    linear_checks_projections.projections,
    linear_checks_experts.router,
    linear_checks_experts.experts,
    linear_checks_replays.replays,
)
TIMES = (
    linear_times_projections.projections,
    linear_times_projections.heads,
    linear_times_projections.queries,
    linear_times_experts.experts,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--variants", action="store_true", help="time every kernel that fits")
    parser.add_argument("--out", type=Path, help="every row, as JSON")
    parser.add_argument("--table", type=Path, help="every row, as Markdown")
    options = parser.parse_args()
    device = Device()
    properties = device.torch.cuda.get_device_properties(0)
    print(f"{properties.name}, torch {device.torch.__version__}, cupy {device.cp.__version__}")
    good = True
    if options.check:
        good = Checks(device).run(*CHECKS)
    if options.time:
        times = Times(device, options.variants)
        times.run(*TIMES)
        if options.table:
            options.table.parent.mkdir(parents=True, exist_ok=True)
            options.table.write_text(table(times), encoding="utf-8")
        if options.out:
            options.out.write_text(
                json.dumps({"card": properties.name, "rows": times.rows}, indent=1)
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
