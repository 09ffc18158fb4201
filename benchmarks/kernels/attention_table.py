"""The page of verify_attn.py, beside this file: its table, its peers', and what to say of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attention_shapes import GOALS_US, MMA_FLOP_PER_S, READ_BYTES_PER_S, Shape
from table_head import WHAT_FELL_SHORT, measured_by


def table(times: dict[str, float], portable: dict[str, float], peers: dict[str, Any]) -> str:
    """Markdown.

    times     shape -> microseconds of what the engine launches on this device
    portable  the same without Hopper's own kernel; empty on another device
    peers     as peers_attention.time_peers returns it
    """
    own = _own_rows(times, portable)
    return "\n".join([*_head(), *own, *_peer_rows(times, peers), "", WHAT_FELL_SHORT]) + "\n"


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
