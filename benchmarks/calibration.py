"""False alarms and misses of the judge's numeric bounds, on engines of which the answer is known.

    python benchmarks/calibration.py [--rounds 20000] [--out benchmarks/results/calibration.md]

Honest engines (every storage dtype, sums through BLAS and in shuffled orders, several page and
split sizes) verify random trees behind random prompts; each round is judged as the gate does, with
the path of the truth committed. A failure is a false alarm. Then the same engines with one leaked
mask bit, or one node at a wrong position, in one forward each: a round that passes is a miss. The
engine shows everything, everything but the integers that give it away, or logits alone.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.conformance import load_engine
from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.drive import MODE
from kdtr.conformance.finding import CaseResult, Verdict
from kdtr.conformance.golden import Models, record_case
from kdtr.conformance.judge import judge_case
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor
from kdtr.contract import TRACED, EngineInfo, NumericProfile
from kdtr.property_tests.strategies import PLAIN, YARNS, SmallModel

HONEST: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, pages of 3, splits of 5": {"page_size": 3, "split_size": 5},
    "float32, splits of 1": {"page_size": 1, "split_size": 1},
    **{
        f"float32, sums shuffled {seed}": {"summation": "shuffled", "summation_seed": seed}
        for seed in range(4)
    },
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, splits of 5": {"dtype": "bfloat16", "page_size": 3, "split_size": 5},
    "bfloat16, sums shuffled": {"dtype": "bfloat16", "summation": "shuffled"},
    "float16": {"dtype": "float16"},
    "float16, splits of 5": {"dtype": "float16", "page_size": 3, "split_size": 5},
    "float16, sums shuffled": {"dtype": "float16", "summation": "shuffled"},
}
_INTEGERS = frozenset({"positions", "mask", "slots", "scores"})
SHOWN: dict[str, frozenset[str]] = {
    "all stages": TRACED,
    "no integers, no scores": TRACED - _INTEGERS,
    "logits alone": frozenset(),
}
_ROUNDS = 4  # of a case
_LONG = (700, 1500, 3000)  # tokens of a few prompts


@dataclass(slots=True)
class Count:
    """Of one engine: rounds judged, what became of the cases, the largest error/bound."""

    rounds: int = 0
    rows: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    headroom: float = 0.0
    first: str = ""

    def add(self, result: CaseResult) -> None:
        self.rounds += max(0, result.points - 1)
        self.rows += result.rows
        self.verdicts[result.verdict.value] += 1
        self.headroom = max(self.headroom, result.headroom or 0.0)
        if result.verdict.is_bad and not self.first:
            finding = result.findings[-1]
            self.first = f"{finding.stage} {finding.where}: {finding.summary}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20_000, help="of honest engines, in all")
    parser.add_argument("--faulty", type=int, default=300, help="forwards with each fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="a file for the tables, beside standard output")
    args = parser.parse_args()
    begin = time.perf_counter()
    with ProcessPoolExecutor(args.jobs) as pool:
        honest = _honest(args, pool)
        faulty = _faulty(args, pool)
    lines = _page(args, honest, faulty, time.perf_counter() - begin)
    print("\n".join(lines))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if any(count.first for count in honest.values()) else 0


def scenes(
    seed: int, n_rounds: int, long: tuple[int, ...]
) -> Iterator[tuple[SmallModel, CasePlan]]:
    """Random models and cases, one after another, without an end; the first have long prompts."""
    random = np.random.default_rng(seed)
    lengths = list(long)
    for number in range(sys.maxsize):
        model = _model(random)
        if lengths:
            model = replace(model, config=model.config.replace(max_position_embeddings=4096))
        length = lengths.pop() if lengths else int(random.integers(1, 30))
        prompt = tuple(random.integers(0, model.config.vocab_size, length).tolist())
        cut = int(random.integers(0, length))
        chunks = tuple(chunk for chunk in (prompt[:cut], prompt[cut:]) if chunk)
        rounds = tuple(_planted(random) for _ in range(n_rounds))
        yield model, CasePlan(f"case{number}", "random", ("FWD-4",), rounds, chunks)


def _model(random: np.random.Generator) -> SmallModel:
    layers, dense = [(1, 1), (2, 1), (3, 1), (2, 0)][int(random.integers(4))]
    yarn = list(YARNS.values())[int(random.integers(len(YARNS)))]
    config = PLAIN.replace(
        hidden_size=int(random.choice([24, 48])),
        num_hidden_layers=layers,
        first_k_dense_replace=dense,
        rope_interleave=bool(random.integers(2)),
        yarn=yarn,
        max_position_embeddings=128,
    )
    return SmallModel(config, seed=int(random.integers(1000)))


def _planted(random: np.random.Generator) -> Planted:
    n = int(random.integers(2, 13))
    parents = [-1, *(int(random.integers(max(0, i - 4), i)) for i in range(1, n))]
    path = [0]
    while children := [i for i in range(n) if parents[i] == path[-1]]:
        if random.random() < 0.25:
            break
        path.append(int(random.choice(children)))
    return Planted(tuple(parents), tuple(path))


@dataclass(slots=True)
class Recorded:
    """A case with the truth, and its noise by profile."""

    model: SmallModel
    case: GoldenCase
    _noise: dict[NumericProfile, CaseNoise] = field(default_factory=dict)

    def noise(self, profile: NumericProfile) -> CaseNoise:
        if profile not in self._noise:
            tensors = self.model.tensors()
            self._noise[profile] = NoiseFloor(self.model.config, tensors, profile).case(self.case)
        return self._noise[profile]


def record(model: SmallModel, plan: CasePlan) -> Recorded:
    tensors = model.tensors()
    inputs, expected, _ = record_case(Models(model.config, tensors), plan)
    named = {f"expect/{plan.alias}/{name}": array for name, array in expected.items()}
    return Recorded(model, GoldenCase(inputs, named, tensors))


def judge(engine: Any, info: EngineInfo, recorded: Recorded) -> CaseResult:
    config = recorded.model.config
    model = engine.load((config, recorded.model.tensors()))
    noise = recorded.noise(info.profile)
    return judge_case("calibration", model, info, config, recorded.case, noise, MODE["stepwise"])


def _honest(args: argparse.Namespace, pool: Executor) -> dict[str, Count]:
    counts = {name: Count() for name in HONEST}
    drawn = scenes(args.seed, _ROUNDS, _LONG)
    while True:
        for results in pool.map(_judge_honest, islice(drawn, 8 * args.jobs)):
            for name, result in results.items():
                counts[name].add(result)
            rounds = sum(count.rounds for count in counts.values())
            if rounds >= args.rounds:  # the same cases, however many processes
                return counts
        print(f"{rounds:,} rounds", file=sys.stderr, flush=True)


def _judge_honest(scene: tuple[SmallModel, CasePlan]) -> dict[str, CaseResult]:
    """One case, by every honest engine."""
    recorded = record(*scene)
    engines = {name: load_engine("host", options) for name, options in HONEST.items()}
    return {name: judge(engine, engine.info, recorded) for name, engine in engines.items()}


# One fault in one forward


Plant = Callable[[np.random.Generator, np.ndarray, np.ndarray], bool]


def leaked_bit(random: np.random.Generator, positions: np.ndarray, sees: np.ndarray) -> bool:
    """One node becomes visible to one row that must not see it."""
    hidden = np.argwhere(~sees)
    if not len(hidden):
        return False
    sees[tuple(hidden[random.integers(len(hidden))])] = True
    return True


def wrong_position(random: np.random.Generator, positions: np.ndarray, sees: np.ndarray) -> bool:
    """One node but the root is one position too high."""
    positions[int(random.integers(1, len(positions)))] += 1
    return True


FAULTS: dict[str, Plant] = {"one leaked mask bit": leaked_bit, "one wrong position": wrong_position}


class FaultyLayout:
    """The layout of a tree, with the fault."""

    def __init__(self, kernels: Any, plant: Plant, random: np.random.Generator) -> None:
        self._honest, self._plant, self._random = kernels.tree_layout, plant, random
        self.planted = 0

    def __call__(self, parents: Any, committed_len: int) -> tuple[Any, Any]:
        positions, sees = (np.array(a) for a in self._honest(parents, committed_len))
        self.planted += self._plant(self._random, positions, sees)
        return positions, sees


def _faulty(args: argparse.Namespace, pool: Executor) -> dict[tuple[str, str, str], list[int]]:
    """[caught, planted] by fault, dtype and what is shown."""
    found: dict[tuple[str, str, str], list[int]] = {}
    cases = islice(scenes(args.seed + 1, 1, ()), args.faulty)
    for outcomes in pool.map(_judge_faulty, cases, range(args.seed, args.seed + args.faulty)):
        for key, (caught, planted) in outcomes.items():
            both = found.setdefault(key, [0, 0])
            both[0] += caught
            both[1] += planted
    return found


def _judge_faulty(
    scene: tuple[SmallModel, CasePlan], seed: int
) -> dict[tuple[str, str, str], tuple[bool, bool]]:
    """(caught, planted) of one case with one fault each time."""
    recorded, outcomes = record(*scene), {}
    for fault, plant in FAULTS.items():
        for dtype in ("float32", "bfloat16", "float16"):
            for shown, stages in SHOWN.items():
                engine: Any = load_engine("host", {"dtype": dtype})
                layout = FaultyLayout(engine.kernels, plant, np.random.default_rng(seed))
                engine.kernels.tree_layout = layout
                result = judge(engine, replace(engine.info, stages=stages), recorded)
                planted = layout.planted > 0
                caught = planted and result.verdict is Verdict.FAIL
                outcomes[fault, dtype, shown] = caught, planted
    return outcomes


def _page(
    args: argparse.Namespace,
    honest: dict[str, Count],
    faulty: dict[tuple[str, str, str], list[int]],
    seconds: float,
) -> list[str]:
    rounds = sum(count.rounds for count in honest.values())
    alarms = sum(count.verdicts["fail"] + count.verdicts["error"] for count in honest.values())
    lines = [
        f"# {rounds:,} rounds of honest engines, {alarms} false alarms",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, numpy {version('numpy')}; {seconds:.0f} s. Command: "
        f"`python benchmarks/calibration.py --rounds {args.rounds} --faulty {args.faulty} --seed "
        f"{args.seed}`",
        "",
        "| honest engine | rounds | rows compared | pass | near tie | fail | worst error/bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, count in honest.items():
        v = count.verdicts
        lines.append(
            f"| {name} | {count.rounds:,} | {count.rows:,} | {v['pass']:,} | {v['near tie']:,} | "
            f"{v['fail'] + v['error']} | {count.headroom:.2f} |"
        )
        if count.first:
            lines.append(f"| | | | | | | {count.first} |")
    lines += [
        "",
        "Cases are counted under pass, near tie and fail; each has 4 rounds.",
        "",
        "| one fault in one forward | dtype | shown | caught | of |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for (fault, dtype, shown), (caught, planted) in faulty.items():
        lines.append(f"| {fault} | {dtype} | {shown} | {caught} | {planted} |")
    lines += [
        "",
        "What logits alone do not tell in low precision, the x-ray models do: there a masked row "
        "contributes nothing at all (`kdtr xray`).",
    ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
