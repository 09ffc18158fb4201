"""A campaign in one process, over processes and over Ray, with the same units, in one run.

    python benchmarks/campaign.py [--cases 1500] [--out benchmarks/results/campaign.md]

Each measurement is a process of its own. Besides the rates it checks that every way gives the rows
that one process gives: also when a worker process is killed halfway, and when an actor of Ray is.
Exit code 1 where rows are lost, doubled or different. Without Ray its lines are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from kdtr.contract import EngineInfo
from kdtr.property_tests import profiles
from kdtr.property_tests.campaign_directory import Directory
from kdtr.property_tests.campaign_plan import Setup, Unit
from kdtr.property_tests.campaign_processes import Processes
from kdtr.property_tests.campaign_ray import RayActors
from kdtr.property_tests.campaign_run import Request, State, run_campaign
from kdtr.property_tests.campaign_unit import Outcome
from kdtr.property_tests.campaign_worker import THREADS, Worker

# Pages and splits shorter than most sequences of the laws, as in `conftest.py` of the laws.
_OPTIONS: dict[str, dict[str, Any]] = {
    "host": {"page_size": 3, "split_size": 5},
    "reference": {},
}
_TWINS: dict[str, dict[str, Any]] = {"host": {"page_size": 2}, "reference": {"cache": "scratch"}}


@dataclass(frozen=True, slots=True)
class Way:
    """How the units are run; kills: one worker is killed when half of the cases are done."""

    name: str
    crew: str
    workers: int
    kills: bool = False


WAYS = (
    Way("one process, in a loop", "serial", 1),
    Way("processes, 1 worker", "processes", 1),
    Way("processes, 2 workers", "processes", 2),
    Way("Ray, 1 worker", "ray", 1),
    Way("Ray, 2 workers", "ray", 2),
    Way("processes, 2 workers, one killed by SIGKILL", "processes", 2, kills=True),
    Way("Ray, 2 workers, one actor killed", "ray", 2, kills=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1500)
    parser.add_argument("--unit", type=int, default=20, help="examples of a unit")
    parser.add_argument("--law", action="append", default=[], help="only this law; repeatable")
    parser.add_argument(
        "--kills",
        action="store_true",
        help="only one process in a loop, and the ways in which a worker is killed",
    )
    parser.add_argument("--engine", choices=_OPTIONS, default="host")
    parser.add_argument("--out", type=Path, help="a file for the table, beside standard output")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "DIR"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    request = Request(
        args.engine,
        tuple(_OPTIONS[args.engine].items()),
        tuple(_TWINS[args.engine].items()),
        laws=tuple(args.law),
        cases=args.cases,
        most=args.unit,
    )
    if args.child:
        way, directory = args.child
        print(json.dumps(_measure(WAYS[int(way)], request, Path(directory))))
        return 0
    ways = [way for way in WAYS if way.crew != "ray" or find_spec("ray")]
    if args.kills:
        ways = [way for way in ways if way.kills or way.crew == "serial"]
    with tempfile.TemporaryDirectory() as scratch:
        directories = {way: Path(scratch) / str(WAYS.index(way)) for way in ways}
        measured = {way: _in_a_process(way, directories[way]) for way in ways}
        told = {way: _difference(directories[ways[0]], directories[way]) for way in ways}
    table = "\n".join(_table(args, measured, told)) + "\n"
    print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(table, encoding="utf-8")
    return 1 if any(told.values()) else 0


def _in_a_process(way: Way, directory: Path) -> dict[str, float]:
    command = [sys.executable, *sys.argv, "--child", str(WAYS.index(way)), str(directory)]
    environment = {**dict.fromkeys(THREADS, "1"), **os.environ}
    print(f"{way.name} ...", file=sys.stderr, flush=True)
    found = subprocess.check_output(command, text=True, env=environment).splitlines()[-1]
    numbers: dict[str, float] = json.loads(found)
    return numbers


class _Serial:
    """A crew of nobody: the units one after another in this process."""

    def __init__(self, setup: Setup) -> None:
        self._worker = Worker(setup)

    def describe(self) -> EngineInfo:
        return self._worker.describe()

    def outcomes(self, units: Iterable[Unit]) -> Iterator[Outcome]:
        return map(self._worker.run, units)

    def close(self) -> None:
        pass


def _measure(way: Way, request: Request, directory: Path) -> dict[str, float]:
    if way.crew == "serial":
        profiles.load_campaign(request.most)  # before the campaign imports the laws
    begin = time.perf_counter()
    crews: list[Any] = []
    ready: list[float] = []
    killed: list[int] = []

    def hire(setup: Setup) -> Any:
        assert setup.examples == request.most, "--cases are too few for --unit"
        if way.crew == "serial":
            crews.append(_Serial(setup))
        elif way.crew == "processes":
            crews.append(Processes(setup, way.workers))
        else:
            crews.append(RayActors(setup, way.workers))
        return crews[0]

    def show(state: State) -> None:
        if not ready:
            ready.append(time.perf_counter())
        if way.kills and not killed and 2 * state.cases >= state.planned:
            killed.append(_kill(way, crews[0]))

    summary = run_campaign(request, directory, hire, show)
    end = time.perf_counter()
    assert not way.kills or killed
    return {"start": ready[0] - begin, "run": end - ready[0], "cases": summary.cases}


def _kill(way: Way, crew: Any) -> int:
    if way.crew == "processes":
        os.kill(crew.pids[0], signal.SIGKILL)
    else:
        import ray

        ray.kill(crew.actors[0], no_restart=False)
    return 1


def _rows(directory: Path) -> dict[tuple[str, int], dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for path in sorted((directory / "shards").glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            key = (row["unit"], row["ordinal"])
            assert key not in rows, f"{key} is there twice"
            rows[key] = row
    return rows


def _difference(expected: Path, actual: Path) -> str:
    """What of the second directory's rows is not as in the first's; "" if nothing."""
    versions = [Directory(path).manifest()["versions"] for path in (expected, actual)]
    if versions[0] != versions[1]:
        return "other laws: they were edited during the run"
    ours, theirs = _rows(expected), _rows(actual)
    lost, more = ours.keys() - theirs.keys(), theirs.keys() - ours.keys()
    if lost or more:
        return f"{len(lost)} lost, {len(more)} too many"
    other = [key for key in ours if ours[key] != theirs[key]]
    if not other:
        return ""
    verdicts = sum(ours[key]["verdict"] != theirs[key]["verdict"] for key in other)
    (unit, ordinal), columns = other[0], ours[other[0]]
    fields = [
        f"{name} {value!r}, then {theirs[other[0]][name]!r}"
        for name, value in columns.items()
        if value != theirs[other[0]][name]
    ]
    return (
        f"{len(other)} rows differ, {verdicts} of them in the verdict; the first, {unit} "
        f"{ordinal}: {'; '.join(fields)}"
    )


def _table(
    args: argparse.Namespace, measured: dict[Way, dict[str, float]], told: dict[Way, str]
) -> list[str]:
    libraries = ["hypothesis", "numpy", "pyarrow", *(["ray"] if find_spec("ray") else [])]
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    first, *_ = measured
    options = "".join(f" {key}={value}" for key, value in _OPTIONS[args.engine].items())
    lines = [
        f"# A campaign of {measured[first]['cases']:,.0f} cases, in units of {args.unit}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {_cpu()}, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; engine {args.engine}{options}.",
        f"Command: `python benchmarks/campaign.py {shlex.join(sys.argv[1:])}`",
        "",
        "| units run in | start, s | run, s | cases/s | of one process | rows |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    base = measured[first]["cases"] / measured[first]["run"]
    for way, numbers in measured.items():
        rate = numbers["cases"] / numbers["run"]
        same = told[way] or ("the same" if way is not first else "")
        lines.append(
            f"| {way.name} | {numbers['start']:.1f} | {numbers['run']:.1f} | {rate:.1f} | "
            f"{rate / base:.2f} | {same} |"
        )
    lines += [
        "",
        "start: until the first worker has loaded its engine. run: from then to the summary, with "
        "the start of a second worker and of what replaces a killed one.",
    ]
    if not find_spec("ray"):
        lines.append("Ray is not installed here: pip install 'kdtr[ray]'.")
    return lines


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
