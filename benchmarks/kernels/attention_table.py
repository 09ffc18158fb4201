"""The page of verify_attn.py, beside this file: its table, its peers', and what to say of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attention_shapes import GOALS_US, MMA_FLOP_PER_S, READ_BYTES_PER_S, Shape
from table_head import measured_by


def table(times: dict[str, float], portable: dict[str, float], peers: dict[str, Any]) -> str:
    """Markdown.

    times     shape -> microseconds of what the engine launches on this device
    portable  the same without Hopper's own kernel; empty on another device
    peers     as peers_attention.time_peers returns it
    """
    own = _own_rows(times, portable)
    return "\n".join([*_head(), *own, *_peer_rows(times, peers), "", *NOTES]) + "\n"


def _head() -> Iterator[str]:
    yield "# Tree attention on a GPU"
    yield ""
    yield from measured_by("verify_attn.py")
    yield ""
    yield "Microseconds a call: one layer, bfloat16, c = 512, r = 64, cold L2, launches included;"
    yield "median over replays of a CUDA graph. A shape is heads/nodes/committed tokens."
    yield (
        f"Floor: the longer of bytes at {READ_BYTES_PER_S / 1e12} TB/s and operations at "
        f"{MMA_FLOP_PER_S / 1e12:.0f} TFLOP/s of mma.sync, both measured on an H200."
    )


def _own_rows(times: dict[str, float], portable: dict[str, float]) -> Iterator[str]:
    """The engine's choice of kernel, splits and grid, for the buckets that it would launch for."""
    yield ""
    yield "us: what the engine launches here, for its own buckets of rows and slots. portable: the"
    yield "same without wgmma, the build for every architecture, which the goals were set for."
    yield ""
    yield "| shape | us | portable | goal | floor | of floor |"
    yield "|---|---|---|---|---|---|"
    for name, us in times.items():
        floor = Shape.parse(name).floor_us()
        goal = GOALS_US.get(name, "-")
        other = f"{portable[name]:.1f}" if name in portable else "-"
        yield f"| {name} | {us:.1f} | {other} | {goal} | {floor:.1f} | {100 * floor / us:.0f} % |"


def _peer_rows(times: dict[str, float], peers: dict[str, Any]) -> Iterator[str]:
    if not peers:
        return
    yield ""
    yield "## Peers, in the same run"
    yield ""
    yield "Microseconds, and how many times ours that is. The best of the settings tried."
    yield ""
    yield f"| peer | tree mask | {' | '.join(times)} |"
    yield "|---|---|" + "---|" * len(times)
    for peer, its in peers["times"].items():
        cells = [
            f"{its[s]:.1f} ({its[s] / us:.1f}x)" if s in its else "-" for s, us in times.items()
        ]
        masked = "yes" if peer in peers["tree_capable"] else "no"
        yield f"| {peer} | {masked} | {' | '.join(cells)} |"
    yield ""
    yield from (f"* {note}" for note in peers["notes"])
    yield ""
    yield "## Ratios"
    yield ""
    yield "| shape | against | its us | ours | ratio | asked |"
    yield "|---|---|---|---|---|---|"
    for name, us in times.items():
        shape = Shape.parse(name)
        for against, candidates, asked in _asked(shape, peers):
            its = {peer: peers["times"][peer].get(name) for peer in candidates}
            known = {peer: us for peer, us in its.items() if us is not None}
            if known:
                peer = min(known, key=lambda peer: known[peer])
                what = against if against == peer else f"{against}: {peer}"
                yield (
                    f"| {name} | {what} | {known[peer]:.1f} | {us:.1f} "
                    f"| {known[peer] / us:.1f} | {asked} |"
                )


def _asked(shape: Shape, peers: dict[str, Any]) -> Iterator[tuple[str, list[str], float]]:
    """Against what, its candidates, and the ratio that is asked for."""
    every = [peer for peer in peers["times"] if peer not in peers["partial"]]
    trees = [peer for peer in every if peer in peers["tree_capable"]]
    if shape.nodes == 1:
        yield "fastest MLA kernel", every, 1.5 if shape.committed <= 1024 else 2.0
    if (shape.heads, shape.nodes) == (8, 17) and shape.committed <= 8192:
        yield "fastest with a tree mask", trees, 2.5
    if shape.heads == 8 and shape.committed >= 8192:
        extend = [peer for peer in trees if peer in peers["extend"]]
        yield from ((peer, [peer], 30.0) for peer in extend)


NOTES = """\
## What fell short, and what was tried

Microseconds in this section are from other runs on an H200 than the tables above.

* Hopper has a kernel of its own (`wgmma`, verify_attn_wgmma.cu) where its blocks of 64 rows keep
  every SM at work: here at 8/17/8k, 8/17/64k, 8/65/8k, 8/65/64k and 64/17/8k, which took 17, 54,
  29, 136 and 45 us. Its floor is another, 790 TFLOP/s; `of floor` is against that of mma.sync,
  for comparison.
* The portable kernel misses its goals from 17 nodes on, by 7 to 24 %. Its products take 14 clocks
  an `mma`, twice what the unit takes, with one block on an SM or two; with the copies left out,
  8/65/64k still takes four fifths of its time. Eight warps a block with 48 rows, tiles of 16
  slots in four stages and the softmax beside the products of another tile lost: 101 us against 85
  at 8/17/64k.
* At 1k the two launches are most of the time: with 33 tiles or fewer a row block, what splits
  save in tiles they cost in partial results. 8/17/1k took 11 us and 8/65/1k 15, goals 10 and 14.
* Splits that share the tiles evenly, where fewer than fill the device: 8/1/8k 9.0 us by 86, 9.5 by
  129; 8/1/64k 26.7 to 27.2 by 171, 28.0 by 257, goal 26. 8/17/1k takes 11.6 by 11 of 16 as by 17 of
  28: what the merge gains (10.9 where the grid is made for 11) the blocks that leave cost.
* Copies ask for memory two tiles ahead, for want of shared memory (99 KB on sm_120). Asking L2 for
  the tile after as well took 8/1/64k from 26.7 us to 28.7; for all tiles at once 20 % in an earlier
  design.
* Alone, the splits of 8/17/1k take 7.9 us and the merge 3.1, of 8/65/1k 12.2 and 3.2, of 8/17/8k
  17.2 and 4.4 (portable). A merge within a cluster of blocks would do without the second launch; it
  was not tried: eight blocks a cluster are too few splits at 1k, and reading each other's partial
  results goes at 14 bytes a clock and SM.
* A graph serves a bucket of slots, the next power of two; how many of its splits share the tiles
  is decided on the device. 8/1/1k and 8/1/8k took 5.4 and 8.2 us with grids made for exactly
  their slots, 6.2 and 8.9 with those of their buckets: a division, and a read of the page table
  that waits for it.
* The merge read a row's splits with threads of 92 registers, two blocks an SM. With 56 registers
  and nine smaller blocks, with tiles copied in three pieces, and with values searched for what is
  not finite only where scores show it, 8/17/8k went from 20.0 us to 17.6.
* Reading the page table for each copy held up all warps at the barrier after the scores: it is
  read 32 tiles ahead, which took 8/1/64k from 35 us to 27.
* A block of `wgmma` with a warp of its own for the copies, nine in all, could not be launched:
  registers belong to a quarter of an SM, and the third warp of one found none. A thread of the
  second group brings the tiles now, while that group has nothing to multiply.
* FlashInfer 0.5.3 took 15.7, 23.6 and 59.5 us at 8/1/1k, 8k and 64k by fa3, 24.1 at 8/17/8k, 160
  at 8/65/64k and 49.9 at 64/17/8k; by fa2 17.7, 30.4, 77.6, 33.2, 370 and 99.8.
* The peer with split-KV and a tree tail was written for this table, and is faster than the public
  ones it is built like: the ratio of 2.5 that is asked at 17 nodes is one of public
  constructions.
* The rebuilt extend_attention is faster at 65 nodes than the shipped one was measured to be
  (1,169 and 9,722 us at 8k and 64k).
* pytest-benchmark is not used here: its clock is the host's, which times a launch; these are
  events on the stream, around replays of a graph.
""".splitlines()
