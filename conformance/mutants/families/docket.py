"""Cases one by one, and what the judge says of an engine in each: the smallest first.

The gate's order tells a fault best, as it begins with plain decoding; here many engines are to be
killed soon.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.bundle_check import stage_name
from kdtr.conformance.drive import MODES, Driver, Mode
from kdtr.conformance.file_script import FILES, first_small, judge_files
from kdtr.conformance.finding import Finding
from kdtr.conformance.judge import _pin, judge_case
from kdtr.conformance.mutants.families.occasion import Occasion, Watch
from kdtr.conformance.noise_floor import CaseNoise, NoiseFloor
from kdtr.conformance.observe import Observation
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.smoke import is_chain, smoke_first
from kdtr.conformance.state_script import CASE, judge_state, suits


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """A case of a bundle, or one of its scripts: "base/trees", "base/state", "base/files"."""

    bundle: str
    case: str

    def __str__(self) -> str:
        return f"{self.bundle}/{self.case}"

    @property
    def is_script(self) -> bool:
        return self.case in (CASE, FILES)


class Docket:
    """Bundles, opened once; what rounding may do to a case is the same for every engine."""

    def __init__(self, bundles: Sequence[str | os.PathLike[str]]) -> None:
        self.bundles = {one.path.stem: one for one in map(GoldenBundle.open, bundles)}
        self._cases: dict[Entry, GoldenCase] = {}
        self._floors: dict[str, NoiseFloor] = {}
        self._noise: dict[Entry, CaseNoise] = {}
        scripts = []
        for name, bundle in self.bundles.items():
            for case in bundle.cases:
                self._cases[Entry(name, case.inputs.alias)] = case
            script = next((one for one in bundle.cases if suits(one.inputs)), None)
            if script is not None:
                scripts.append((Entry(name, CASE), script))
        in_files = first_small(list(self.bundles.values()))
        if in_files is not None:
            scripts.append((Entry(in_files.path.stem, FILES), smoke_first(in_files.cases)[0]))
        self._scripts = dict(scripts)

    def __enter__(self) -> Docket:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for bundle in self.bundles.values():
            bundle.close()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every case and script, the smallest first."""
        return tuple(sorted((*self._cases, *self._scripts), key=lambda one: (self._cost(one), one)))

    @property
    def in_gate_order(self) -> tuple[Entry, ...]:
        """Bundle by bundle: plain decoding, chains, all other cases, the scripts."""
        return tuple(
            entry
            for name, bundle in self.bundles.items()
            for entry in (
                *(Entry(name, case.inputs.alias) for case in smoke_first(bundle.cases)),
                Entry(name, CASE),
                Entry(name, FILES),
            )
            if entry in self._cases or entry in self._scripts
        )

    def is_smoke(self, entry: Entry) -> bool:
        """Whether no tree of the case has a branch."""
        return entry in self._cases and is_chain(self._cases[entry].inputs)

    def content_id(self, entry: Entry) -> str:
        """Of the case; of the script's own."""
        return (self._cases.get(entry) or self._scripts[entry]).inputs.case_id

    def first_finding(self, engine: Any, models: dict[str, Any], entry: Entry) -> Finding | None:
        """The first in any mode that is no near tie; `models` keeps what the engine has loaded."""
        bundle = self.bundles[entry.bundle]
        info, model = engine.info, self._loaded(engine, models, entry.bundle)
        if entry.case == FILES:
            result = judge_files(
                entry.bundle,
                engine,
                info,
                bundle,
                lambda case: self._case_noise(Entry(entry.bundle, case.inputs.alias), engine),
            )
            return next((one for one in result.findings if one.verdict.is_bad), None)
        if entry.is_script:
            inputs = self._scripts[entry].inputs
            result = judge_state(entry.bundle, model, info, bundle.config, inputs)
            return next((one for one in result.findings if one.verdict.is_bad), None)
        case = self._cases[entry]
        for mode in MODES:
            if not _applies(mode, case, info):
                continue
            noise = self._case_noise(entry, engine)
            result = judge_case(entry.bundle, model, info, bundle.config, case, noise, mode)
            for finding in result.findings:
                if finding.verdict.is_bad:
                    return finding
        return None

    def behaviour(self, engine: Any, models: dict[str, Any], entry: Entry) -> Iterator[str]:
        """A digest of every bit that the engine shows, point by point in every mode, unjudged.

        Two engines of equal digests do not differ in anything that this case can show. A script's
        is not known: it yields nothing.
        """
        if entry.is_script:
            return
        bundle, case = self.bundles[entry.bundle], self._cases[entry]
        model = self._loaded(engine, models, entry.bundle)
        for mode in MODES:
            if mode.name in _SHOWN and _applies(mode, case, engine.info):
                yield from _shown(model, engine, bundle, case, mode)

    def occasions(
        self, load: Callable[[], Any], entries: Iterable[Entry]
    ) -> dict[Entry, frozenset[Occasion]]:
        """What is under way in each entry, in any mode, of an engine that makes no fault."""
        found: dict[Entry, frozenset[Occasion]] = {}
        for entry in entries:
            engine, seen = load(), set[Occasion]()
            Watch(engine, seen.add)
            if entry.is_script:
                self.first_finding(engine, {}, entry)
            else:
                deque(self.behaviour(engine, {}, entry), maxlen=0)
            found[entry] = frozenset(seen)
        return found

    def _loaded(self, engine: Any, models: dict[str, Any], name: str) -> Any:
        if name not in models:
            bundle = self.bundles[name]
            models[name] = engine.load((bundle.config, bundle.weights))
        return models[name]

    def _cost(self, entry: Entry) -> int:
        """Rows times weights."""
        bundle = self.bundles[entry.bundle]
        size = sum(array.size for array in bundle.weights.values())
        inputs = (self._cases.get(entry) or self._scripts[entry]).inputs
        rows = sum(map(len, inputs.chunks)) + sum(len(one.tree) for one in inputs.rounds)
        return size * (10 * sum(map(len, inputs.chunks)) if entry.is_script else rows)

    def _case_noise(self, entry: Entry, engine: Any) -> CaseNoise:
        if entry not in self._noise:
            if entry.bundle not in self._floors:
                bundle = self.bundles[entry.bundle]
                self._floors[entry.bundle] = NoiseFloor.of_bundle(bundle, engine.info.profile)
            self._noise[entry] = self._floors[entry.bundle].case(self._cases[entry])
        return self._noise[entry]


def _applies(mode: Mode, case: GoldenCase, info: Any) -> bool:
    return mode.applies(case.inputs) and (mode.traces or bool(info.stages))


_SHOWN = ("stepwise", "round", "decode", "forward")  # shipped is round without a trace


def _shown(
    model: Any, engine: Any, bundle: GoldenBundle, case: GoldenCase, mode: Mode
) -> Iterator[str]:
    """One session: a digest of its arrays, or of its error, per point."""
    inputs = case.inputs
    try:
        session = model.open(max_len=inputs.max_len)
        if inputs.root is not None:
            session.set_root(inputs.root)
        driver = Driver(session, engine.info, bundle.config, traces=mode.traces)
        for point in inputs.points():
            seen = Observation(bundle.config.num_hidden_layers)
            is_chunk = point.startswith("chunk")
            pin = _pin(case.expectation(point), is_chunk=is_chunk)
            i = int(point.removeprefix("chunk").removeprefix("round"))
            if is_chunk:
                mode.drive_chunk(driver, inputs.chunks[i], pin, seen)
            else:
                mode.drive_round(driver, inputs.rounds[i], pin, seen)
            yield _digest(seen)
        session.close()
    except RAISED as error:
        yield told(error)


def _digest(seen: Observation) -> str:
    digest = hashlib.sha256()
    for (name, layer), array in seen.arrays.items():
        digest.update(f"{stage_name(name, layer)} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
