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
import sys
import time
from pathlib import Path
from typing import Any

from attention_checks import check
from attention_device import Device
from attention_shapes import SHAPES, Shape
from attention_table import table
from attention_times import one, parts, sweep, time_shapes
from table_head import output_of

from kdtr.engine.cuda_cuts import MMA_ROWS


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
    for rows in MMA_ROWS:
        kernel = device.getter("verify_attn_mma", "bf16")(f"verify_attn_mma_{rows}")
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
