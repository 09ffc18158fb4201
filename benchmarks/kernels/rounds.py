"""Whole rounds on a GPU: launches, host and device time, and 512 tokens by decoding and by trees.

    python benchmarks/kernels/rounds.py [--out benchmarks/results/rounds-gpu.md]

The model is `ModelConfig.tiny()` with seed weights. Tokens: rounds_tokens.py, beside this file.
Exits 1 where decoding and trees give other tokens and it is no near tie.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rounds_tokens import PROMPT, chain, generation
from table_head import WHAT_FELL_SHORT, cupy_or_exit, measured_by

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import ModelConfig
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_launcher import row_bucket

_REPLAYS = 400
_READ = 4.6e12  # bytes/s, measured on an H200 (benchmarks/kernels/linear.py)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the tables, beside standard output")
    parser.add_argument("--split-size", type=int, default=64, help="of the general attention")
    parser.add_argument("--without-graphs", action="store_true", help="of the tokens alone")
    args = parser.parse_args()
    cupy_or_exit()
    load = partial(_model, split_size=args.split_size)
    lines = [*_head(), *_launches(load)]
    wrong = False
    for dtype in ("float32", "bfloat16"):
        table, right = generation(load(dtype, graphs=not args.without_graphs), dtype)
        lines += table
        wrong |= not right
    text = "\n".join([*lines, "", WHAT_FELL_SHORT]) + "\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return int(wrong)


def _head() -> list[str]:
    return ["# Rounds of the tiny model on a GPU", "", *measured_by("rounds.py")]


def _model(dtype: str, **options: Any) -> Any:
    config = ModelConfig.tiny()
    return make_cuda_engine(dtype=dtype, **options).load((config, seed_tensors(config, 7)))


def _launches(load: Callable[[str], Any]) -> list[str]:
    """Per bucket: kernels of a round, host time of a replay, of a whole round, device time."""
    cupy = cupy_or_exit()
    lines = [
        "",
        "## One round, captured",
        "",
        "floors: each kernel's weights and rows at the card's read bandwidth, summed. launch: the "
        f"host's time for one replay on an idle device, the median of {_REPLAYS} after as many "
        "that are not counted, and what 95 of 100 take at most. device: 200 replays back to back. "
        "round: `Session.round` as called, with checks, staging, the copies of the outcome and "
        "the books.",
        "",
        "| dtype | rows | bucket | kernels | per MoE layer | launch us | 95 % | device us "
        "| floors us | round us |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for dtype in ("float32", "bfloat16"):
        model = load(dtype)
        for n in (1, 5, 17, 65):
            session = model.open(max_len=1500)
            session.prefill(PROMPT)
            kernels, stream = model._forward.kernels, model._forward.kernels.turn.stream
            session.round(chain(session, n))
            with _counted(kernels) as launched:
                session.round(chain(session, n))  # captured now, if the first was not
            ((key, graph),) = [
                (key, one.graph)
                for key, one in session._launcher._graphs.items()
                if key.name == "round" and key.n == row_bucket(n)
            ]
            host = []
            for _ in range(2 * _REPLAYS):
                start = time.perf_counter()
                kernels.replay(graph, key)
                host.append((time.perf_counter() - start) * 1e6)
                stream.synchronize()
            host = host[_REPLAYS:]
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            for _ in range(200):
                graph.graph.launch(stream)
            end.record(stream)
            end.synchronize()
            device = cupy.cuda.get_elapsed_time(begin, end) * 1000 / 200
            rounds = []
            for _ in range(60):
                tree = chain(session, n)
                start = time.perf_counter()
                session.round(tree)
                rounds.append(time.perf_counter() - start)
            lines.append(
                f"| {dtype} | {n} | {row_bucket(n)} | {len(launched)} | {_per_layer(launched)} "
                f"| {median(host):.1f} | {np.percentile(host, 95):.1f} | {device:.1f} "
                f"| {_floors(model, n, dtype):.1f} | {median(rounds) * 1e6:.0f} |"
            )
    return lines


def _per_layer(names: list[str]) -> int:
    """Launches between the starts of two MoE layers: from one append_normed to the next."""
    at = [i for i, name in enumerate(names) if name == "append_normed"]
    return at[-1] - at[-2]


@contextmanager
def _counted(kernels: Any) -> Iterator[list[str]]:
    """Names of the kernels launched while it is open."""
    modules, names = kernels._modules, []
    honest = modules.kernel

    def kernel(file: str, name: str) -> Any:
        names.append(name)
        return honest(file, name)

    modules.kernel = kernel
    yield names
    del modules.kernel


def _floors(model: Any, n: int, dtype: str) -> float:
    """Microseconds to read every weight that n rows need, once; all experts of a layer."""
    size = 4 if dtype == "float32" else 2
    shapes = seed_tensors(ModelConfig.tiny(), 7)
    n_bytes = sum(
        tensor.size * size for name, tensor in shapes.items() if "embed_tokens" not in name
    )
    return float(n_bytes / _READ * 1e6)


if __name__ == "__main__":
    sys.exit(main())
