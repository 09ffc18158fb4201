"""The table of linear.py, beside this file, as Markdown."""

from __future__ import annotations

from linear_times import Times
from table_head import WHAT_FELL_SHORT, measured_by


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
    return "\n".join([*lines, "", WHAT_FELL_SHORT]) + "\n"
