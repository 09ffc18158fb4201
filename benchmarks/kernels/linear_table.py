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
* With 65 rows, launches apart, cuBLAS takes 1 % more at 15 MB, 4 % at 5, 14 % at 30, and 1.5 %
  less at 117. A launch that overlaps the one ahead of it, as the engine's do, is slower than apart
  by 10 % at 30 MB and 3 % at 117; with four stages of w ahead of the first x, 30 MB took 12.2 us.
  cuBLAS is ahead where weights are more than one round of blocks: 25.9 us for 24,576 by 1,536
  (cuBLAS 23.0), 131 for 32,768 by 7,168 (120). By mma.sync, which every architecture has, 65 rows
  take 1.9, 1.4 and 1.3 times as long as by cuBLAS at 15, 30 and 117 MB.
* A block of linear_wide had 64 rows of weights, and 32 a warp: a tile of x was read from shared
  memory for every two products, which took as long as the products; a round of 36 of them took 870
  clocks. With 64 rows a warp, and a cluster that adds up through shared memory instead of a last
  block that reads partial results from L2, 117 MB went from 47.7 to 41.1 us.
* One warp on each quarter of an SM waits 350 clocks a round for barriers and fragments, whatever
  its size: a second block on the SM hides that. At 30 MB there is one: 19.5 us.
* A chain of wgmma gives the bits of mma.sync, so Hopper has a kernel of its own from 25 rows on
  (linear_wgmma.cu). The compiler waits for every product whose sums a branch may touch, and for
  all of them where two loops have sums under way: 900 clocks a stage of 64 elements. A loop for
  every slice, of whole stages of four products, takes 300.
* The first version took 11.2, 18.0 and 37.0 us at 15, 30 and 117 MB. What helped at 15 MB: a warp
  that only asks for copies, 10.3; all eight slices in a block of two warpgroups with a ring each,
  not in a cluster of two, 9.2; x's copies behind w's stage by stage, not behind all of w, and no
  wait for the number of rows before the first: 7.5, and the first product after 3,200 clocks, not
  7,000; every second tile of sums kept by a warpgroup and the others given away, 7.3; stages as a
  whole, 7.0; slices joined by branches instead of choices, 6.8; five stages instead of four, 6.7,
  and 0.7 less at 117 MB.
* A cluster took 3,100 clocks to add up: two barriers with a fence of all memory each, and a second
  round of reads for the few sums that the first left. Sent from registers (st.async) to the block
  that adds them up, which counts their bytes, sums take 1,100 with 64 rows of weights a block and
  2,100 with 128: blocks of a cluster exchange 14 bytes a clock.
* An H200 holds 30 clusters of four blocks with an SM for each block, 15 of eight, 66 of two. So
  33 clusters at 30 MB put two blocks on each of 12 SMs and leave 12 without: 12.9 us, and 16.2
  where a block fills an SM. 17 clusters of 128 rows of weights a block, on 68 SMs: 12.0.
* Without gain: rows of x sent to both blocks of a cluster at once (multicast), 61 us at 117 MB
  instead of 35; four warpgroups of two slices each, 0.2 us less at 117 MB and 0.6 more at 15; more
  than one stage of w ahead of the first x; clusters of eight at 30 MB; tensor maps asked for early;
  letting the next launch start later; L2 asked for 128 bytes instead of 256.
* Of 7.0 us at 15 MB, 1.0 was an empty launch, 0.3 passed before the first copy was asked for, and
  0.9 between the last products and the end. Without weights it took 5.9, without products 6.8.
* The latent query of 64 heads takes 13.3 us with 65 rows, its product alone 11.4, and as many
  bytes the other way round (128 by 512) 7.2: 1,088 blocks with a step for each warp, of which 528
  find room at a time. Products of wgmma per head were not tried.
* Asking L2 for weights before the launch ahead has ended was tried, and cost as much as it gained.
* One row of experts reaches 60 %: eight experts are 88 MB in 256 pieces of work, for 396 blocks.
"""
