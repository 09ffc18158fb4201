"""Whole rounds on a GPU: launches, host and device time, and 512 tokens by decoding and by trees.

    python benchmarks/kernels/rounds.py [--split-size 64] [--out benchmarks/results/rounds-gpu.md]

The model is `ModelConfig.tiny()` with seed weights. The drafter is an oracle: it knows the greedy
continuation, and at every depth ranks its token first with the probability asked for, and third
otherwise, among tokens that a hash chooses. Its own time is not counted; that of building the
tree is.

Decoding and trees should give the same tokens. Where they do not, the distance of the two tokens'
logits is told, in steps of the dtype, as decoding has them: within MOST_STEPS it is a near tie, for
a row's sums are in another order where its path lies in other slots (NUM-4). Beyond, this exits 1.
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
from table_head import measured_by

from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import DraftTree, ModelConfig
from kdtr.engine import make_cuda_engine
from kdtr.engine.cuda_launcher import row_bucket
from kdtr.engine.cuda_modules import import_cupy

PROMPT = [int(token) for token in np.random.default_rng(3).integers(512, size=24)]
N_TOKENS = 512
BUDGETS, HITS = (4, 16, 64), (0.5, 0.8, 0.95)
# Of the dtype, that the rounding of two logits and of what leads to them explains.
MOST_STEPS = {"float32": 64, "bfloat16": 4}
_FRACTION_BITS = {"float32": 23, "bfloat16": 7}
_DEPTH = 12  # tokens that the oracle drafts
_REPLAYS = 400
_READ = 4.6e12  # bytes/s, measured on an H200 (benchmarks/kernels/linear.py)


_NOTES = """\
What fell short (numbers of an earlier run on an H200): a round of the tiny model is 62 kernels,
one after another, each waiting for the one before: 2 us a kernel in bfloat16 at one row, 3.2 in
float32, whose products are plain loops. Its bytes are nothing beside that. Overlapping launches
took bfloat16 at one row from 189 us to 128. A round as called is Python besides: checks, staging
(27 us, 11 of them the copy) and the books. Slices of the inbox made anew for each round and four
waits for its outcome, one for each array, were 56 us more, of 295 (bfloat16, one row, 230 tokens).

Tiny's attention is the general kernel, whose splits are chunks of 32 slots one after another, 4 us
each. By splits of 32, 64, 128 and 256 slots (--split-size) a round of one row took 140, 153, 193
and 254 us of the device at 220 tokens (bfloat16), and 157, 167, 202 and 279 at 1,400. At 32,000,
with 8 heads of 512 + 64 (float32, two layers), it took 1,388, 794, 531 and 550: splits are large
there.

A launch varies with the host and with what it does besides. Where a replay follows another at once
it took 3.2 to 5.6 us, whatever dtype and rows; on an idle device medians of 400 were 3.4 to 6.0 us
on one machine, with 95 of 100 within 16.1. On another with the same card and the same kernels they
were 13.0 to 21.9 in float32 and 6.0 in bfloat16, with 95 of 100 within 28.8.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the tables, beside standard output")
    parser.add_argument("--split-size", type=int, help="of the attention, in the place of its own")
    args = parser.parse_args()
    load = partial(_model, split_size=args.split_size)
    lines = [*_head(), *_launches(load)]
    wrong = False
    for dtype in ("float32", "bfloat16"):
        table, steps = _generation(load(dtype), dtype)
        lines += table
        wrong |= steps > MOST_STEPS[dtype]
    text = "\n".join([*lines, "", _NOTES])
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    return int(wrong)


def _head() -> list[str]:
    return ["# Rounds of the tiny model on a GPU", "", *measured_by("rounds.py")]


def _model(dtype: str, split_size: int | None) -> Any:
    config = ModelConfig.tiny()
    engine = make_cuda_engine(dtype=dtype, split_size=split_size)
    return engine.load((config, seed_tensors(config, 7)))


def _chain(session: Any, n: int) -> DraftTree:
    return DraftTree((session.root, *range(1, n)), tuple(range(-1, n - 1)))


def _launches(load: Callable[[str], Any]) -> list[str]:
    """Per bucket: kernels of a round, host time of a replay, of a whole round, device time."""
    cupy = import_cupy()
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
            session.round(_chain(session, n))
            with _counted(kernels) as launched:
                session.round(_chain(session, n))  # captured now, if the first was not
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
                tree = _chain(session, n)
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


def _generation(model: Any, dtype: str) -> tuple[list[str], float]:
    """The table, and of all tokens that differ the most steps between the two logits."""
    plain, seconds = _decoded(model)
    worst = 0.0
    lines = [
        "",
        f"## {N_TOKENS} tokens, {dtype}",
        "",
        "| by | budget | hit rate | tokens/s | times decoding | accept_len | rounds | tokens |",
        "|---|---|---|---|---|---|---|---|",
        f"| decoding | 0 | | {N_TOKENS / seconds:.0f} | 1 | 1 | {N_TOKENS} | |",
    ]
    for budget in BUDGETS:
        for hit in HITS:
            tokens, rounds, by_trees = _by_trees(model, plain, budget, hit)
            said, steps = agreement(model, dtype, plain[:N_TOKENS], tokens)
            worst = max(worst, steps)
            lines.append(
                f"| trees | {budget} | {hit} | {N_TOKENS / by_trees:.0f} "
                f"| {seconds / by_trees:.2f} | {len(tokens) / rounds:.2f} | {rounds} "
                f"| {said} |"
            )
    return lines, worst


def agreement(model: Any, dtype: str, plain: list[int], tokens: list[int]) -> tuple[str, float]:
    """What to say of tokens beside those of decoding; steps between the first two that differ.

    A step is the distance of neighbouring numbers of the dtype at the greater of the two logits.
    """
    pairs = enumerate(zip(plain, tokens, strict=True))
    at = next((i for i, (one, other) in pairs if one != other), None)
    if at is None:
        return "identical", 0.0
    session = model.open(max_len=1500)
    decoded = [session.prefill(PROMPT), *(session.decode() for _ in range(at - 1))]
    assert plain[:at] == decoded, "decoding does not repeat itself"
    logits = session.verify(_chain(session, 1)).logits[0].astype(np.float64)
    one, other = logits[plain[at]], logits[tokens[at]]
    steps = float((one - other) / 2.0 ** (np.floor(np.log2(abs(one))) - _FRACTION_BITS[dtype]))
    what = "a near tie" if steps <= MOST_STEPS[dtype] else "NO near tie"
    return f"from token {at} on others: {what}, {steps:g} steps", steps


def _decoded(model: Any) -> tuple[list[int], float]:
    for _ in range(2):  # the first run captures
        session = model.open(max_len=1500)
        tokens = [session.prefill(PROMPT)]
        start = time.perf_counter()
        tokens += [session.decode() for _ in range(N_TOKENS + _DEPTH)]
        seconds = (time.perf_counter() - start) * N_TOKENS / (N_TOKENS + _DEPTH)
    return tokens, seconds


def _by_trees(
    model: Any, plain: list[int], budget: int, hit: float
) -> tuple[list[int], int, float]:
    for _ in range(2):
        random = np.random.default_rng(int(budget * 100 + hit * 100))
        session = model.open(max_len=1500)
        tokens, rounds, seconds = [session.prefill(PROMPT)], 0, 0.0
        while len(tokens) < N_TOKENS:
            drafts = _drafts(random, plain[len(tokens) : len(tokens) + _DEPTH], hit)
            start = time.perf_counter()
            done = session.round(session.build(drafts, budget))
            seconds += time.perf_counter() - start
            tokens.extend(done.emitted)
            rounds += 1
    return tokens[:N_TOKENS], rounds, seconds


def _drafts(random: np.random.Generator, right: list[int], hit: float) -> np.ndarray:
    """[depth, vocab]: the right token first, or third behind two others."""
    logits = random.standard_normal((len(right), ModelConfig.tiny().vocab_size))
    for depth, token in enumerate(right):
        others = random.integers(logits.shape[1], size=2)
        logits[depth, others] = 7.0, 6.0
        logits[depth, token] = 8.0 if random.random() < hit else 5.5
    return logits


if __name__ == "__main__":
    sys.exit(main())
