"""One engine before a docket: what the judge finds in each entry, and every bit that it shows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kdtr.conformance.bundle import GoldenCase
from kdtr.conformance.bundle_check import stage_name
from kdtr.conformance.drive import MODES, Driver, Mode
from kdtr.conformance.file_script import FILES, judge_files
from kdtr.conformance.finding import Finding
from kdtr.conformance.judge import judge_case, pin_of
from kdtr.conformance.mutants.docket import Docket, Entry
from kdtr.conformance.observe import Observation
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.state_script import judge_state

_SHOWN = ("stepwise", "round", "decode", "forward")  # shipped is round without a trace


class EngineRun:
    """An engine with what it has loaded; each entry is judged once."""

    def __init__(self, docket: Docket, engine: Any) -> None:
        self._docket = docket
        self._engine = engine
        self._info = engine.info
        self._models: dict[str, Any] = {}
        self._found: dict[Entry, Finding | None] = {}

    def close(self) -> None:
        """Let go of the models."""
        for model in self._models.values():
            model.close()
        self._models.clear()

    def first(self, entries: Iterable[Entry]) -> tuple[int, Finding | None]:
        """How many entries were judged, up to the first with a finding; and that."""
        judged = 0
        for judged, entry in enumerate(entries, start=1):
            finding = self.finding(entry)
            if finding is not None:
                return judged, finding
        return judged, None

    def finding(self, entry: Entry) -> Finding | None:
        """The first in any mode that is no near tie."""
        if entry not in self._found:
            findings = self._findings(entry)
            self._found[entry] = next((one for one in findings if one.verdict.is_bad), None)
        return self._found[entry]

    def behaviour(self, entry: Entry) -> Iterator[str]:
        """A digest of every bit that the engine shows, point by point in every mode, unjudged.

        Two engines of equal digests do not differ in anything that this case can show. A script's
        is not known: it yields nothing.
        """
        if entry.is_script:
            return
        case = self._docket.case(entry)
        for mode in MODES:
            if mode.name in _SHOWN and self._applies(mode, case):
                yield from self._shown(entry, case, mode)

    def _findings(self, entry: Entry) -> Iterator[Finding]:
        bundle, info = self._docket.bundles[entry.bundle], self._info
        model, case = self._model(entry), self._docket.case(entry)
        if entry.case == FILES:
            yield from judge_files(
                entry.bundle,
                self._engine,
                info,
                bundle,
                lambda one: self._docket.noise(Entry(entry.bundle, one.inputs.alias), info.profile),
            ).findings
        elif entry.is_script:
            yield from judge_state(entry.bundle, model, info, bundle.config, case.inputs).findings
        else:
            for mode in MODES:
                if self._applies(mode, case):
                    noise = self._docket.noise(entry, info.profile)
                    yield from judge_case(
                        entry.bundle, model, info, bundle.config, case, noise, mode
                    ).findings

    def _model(self, entry: Entry) -> Any:
        if entry.bundle not in self._models:
            bundle = self._docket.bundles[entry.bundle]
            self._models[entry.bundle] = self._engine.load((bundle.config, bundle.weights))
        return self._models[entry.bundle]

    def _applies(self, mode: Mode, case: GoldenCase) -> bool:
        return mode.applies(case.inputs) and (mode.traces or bool(self._info.stages))

    def _shown(self, entry: Entry, case: GoldenCase, mode: Mode) -> Iterator[str]:
        """One session: a digest of its arrays, or of its error, per point."""
        inputs, config = case.inputs, self._docket.bundles[entry.bundle].config
        try:
            session = self._model(entry).open(max_len=inputs.max_len)
            if inputs.root is not None:
                session.set_root(inputs.root)
            driver = Driver(session, self._info, config, traces=mode.traces)
            for point in inputs.points():
                seen = Observation(config.num_hidden_layers)
                is_chunk = point.startswith("chunk")
                pin = pin_of(case.expectation(point), is_chunk=is_chunk)
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
