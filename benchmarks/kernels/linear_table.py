"""The table of linear.py, beside this file, as Markdown."""

from __future__ import annotations

from linear_times import Times
from table_head import measured_by


def table(times: Times) -> str:
    lines = [
        "# Projections, router and experts on a GPU",
        "",
        *measured_by("linear.py"),
        "",
        f"of 1 GB: of {times.bandwidth:.0f} GB/s, what a kernel that only reads reached in this "
        "run on 1 GB. of its size: of what that kernel reached on as many bytes, launch included. "
        "bfloat16, cold L2, medians over replays of a graph. `overlap`: the launch may begin "
        "before the one ahead of it ends.",
        "",
        "| what | rows | MB | us | GB/s | of 1 GB | of its size |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['what'].strip()} | {row['n'] or ''} | {row['mb']:.1f} | {row['us']:.2f} "
        f"| {row['gb_per_s']:.0f} | {100 * row['gb_per_s'] / times.bandwidth:.0f} % "
        f"| {100 * row['reading_us'] / row['us']:.0f} % |"
        for row in times.rows
    ]
    return "\n".join([*lines, "", _NOTES])


_NOTES = """\
## What fell short, and what was tried

Microseconds in this section are of earlier runs on an H200.

* 75 % of reading 1 GB is reached at 117 MB; at 15 and 30 MB not even a kernel that only reads does,
  in a launch of its own (57 and 72 %). Of what reading reaches at its size, one row has 87 %
  at 15 and at 30 MB, launches apart.
* With 65 rows cuBLAS is still faster: by 1.5 times at 15 MB, 1.3 at 30, 1.1 at 117, launches apart.
  By mma.sync, which every architecture has, it was 1.9, 1.4 and 1.3.
* A block of linear_wide had 64 rows of weights, and 32 a warp: a tile of x was read from shared
  memory for every two products, which took as long as the products; a round of 36 of them took 870
  clocks. With 64 rows a warp, and a cluster that adds up through shared memory instead of a last
  block that reads partial results from L2, 117 MB went from 47.7 to 41.1 us.
* One warp on each quarter of an SM waits 350 clocks a round for barriers and fragments, whatever
  its size: a second block on the SM hides that. At 30 MB there is one: 19.5 us.
* A chain of wgmma gives the bits of mma.sync, so Hopper has a kernel of its own from 25 rows on
  (linear_wgmma.cu). The compiler waits for every product whose sums a branch may touch: 900 clocks
  a stage of 64 elements. A loop for every slice took 117 MB from 42.8 to 36.1 us, 30 MB from 21.7
  to 18.6, and two warpgroups a block there to 17.5. Blocks of 256 rows read x a quarter as often
  and were slower at 117 MB (38.7 us): 74 KB of sums a block go through the cluster's shared memory,
  at 14 bytes a clock. What is left at 15 and 30 MB is the first stage (2.5 us: all blocks ask for
  all of their stages at once) and adding up (2 us).
* Asking L2 for weights before the launch ahead has ended was tried, and cost as much as it gained.
* One row of experts reaches 60 %: eight experts are 88 MB in 256 pieces of work, for 396 blocks.
"""
