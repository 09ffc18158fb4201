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
  every SM at work: here at 8/17/8k, 8/17/64k, 8/65/8k, 8/65/64k and 64/17/8k. Its floor is another,
  790 TFLOP/s; `of floor` is against that of mma.sync, for comparison.
* The last tile of a cache, which a tree's own rows share with the end of the prefix, held up every
  launch: one block has it, and all wait for that block. It loaded the bits of the mask by branches,
  one after the other, and cleared shared memory behind the last slot: 1.4 us of 8/17/1k, 2.1 of
  8/1/1k, 3.8 of 8/17/8k. Loads without a branch and at the start of the block, and addresses of the
  last slot in the place of clearing (on Hopper, clearing by the group that is idle), took 8/1/1k
  from 6.5 us to 4.8, 8/17/1k from 9.0 to 8.2, 8/65/1k from 15.2 to 14.2, 8/17/8k from 19.4 to 17.9.
  What is left of it (0.5 us) may be instructions that no other block asks for.
* Blocks of 16 rows where tiles are few: 8/17/1k took 11.1 us by 32 rows, 9.0 by 16 (8.2 now), and
  64/1/1k 10.3 and 8.4. From 8k on they read the cache too often: 97 us against 84 at 8/17/64k.
* A merge in the same launch (cooperative, each block waiting for the others on its rows, then
  merging a share of the columns): 15.0 us at 8/17/1k, where two launches took 11.6. To meet took
  1.5 us, as much as the second launch, and a third of the SMs merged instead of all.
* The portable kernel misses its goals where products bind, by 10 to 25 %. They take 14 clocks an
  `mma`, twice what the unit takes, with one block on an SM or two; with the copies left out,
  8/65/64k still takes four fifths of its time. Eight warps a block with 48 rows, tiles of 16
  slots in four stages and the softmax beside the products of another tile lost: 101 us against 85
  at 8/17/64k.
* 8/65/1k (goal 14): 231 blocks of 16 rows read 42 MB from L2 in five tiles each; 117 of 32 rows
  read half, and multiply longer: 14.1 and 13.9. 8/17/8k (goal 17): 28 MB from L2 to SMs, 12 MB of
  partial results written and read: by 33 splits 18.6, by 43 18.0, by 26 20.0. Tiles that the
  three row blocks share as a cluster (multicast, Hopper's alone) were not tried: GPCs of 16 to 18
  SMs hold five or six clusters of three, fewer in all than the 43 splits of three tiles each.
* 8/1/64k (goal 26): while it streams, 4.0 TB/s. Splits that share the tiles evenly: 26.5 us by 187,
  26.8 by 171, 27.9 by 257. Asking L2 for the tile after the next as well took 26.7 us to 28.7; for
  all tiles at once 20 % in an earlier design.
* A graph serves a bucket of slots, the next power of two; how many of its splits share the tiles
  is decided on the device: a division, and a read of the page table that waits for it.
* Reading the page table for each copy held up all warps at the barrier after the scores: it is
  read 32 tiles ahead, which took 8/1/64k from 35 us to 27.
* The merge read a row's splits with threads of 92 registers, two blocks an SM: 56 registers and
  nine smaller blocks took a microsecond less.
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
