"""What an engine makes of files: each of file_cases.py is loaded, and judged on a case if it is.

The files are written anew for every run. An engine that does not read a form at all is not asked
for its other files.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kdtr.conformance.bundle import GoldenBundle, GoldenCase
from kdtr.conformance.drive import MODES, Mode
from kdtr.conformance.file_cases import FILE_CASES, FileCase
from kdtr.conformance.finding import CaseResult, Finding, Place, Verdict
from kdtr.conformance.judge import judge_case
from kdtr.conformance.noise_floor import CaseNoise
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.smoke import smoke_first
from kdtr.conformance.state_script import SCRIPT
from kdtr.contract import Engine, EngineError, EngineInfo, KdtrError, Model

FILES = "files"
_SMALL = 1 << 20  # bytes of weights: every file is written, and many are loaded


def first_small(bundles: Sequence[GoldenBundle]) -> GoldenBundle | None:
    """The bundle whose model is written to files: the first small one, or else the smallest."""
    sizes = {
        i: sum(bundle.weights[name].nbytes for name in bundle.weights)
        for i, bundle in enumerate(bundles)
    }
    small = [i for i, size in sizes.items() if size <= _SMALL]
    return bundles[small[0] if small else min(sizes, key=lambda i: sizes[i])] if bundles else None


def judge_files(
    name: str,
    engine: Engine,
    info: EngineInfo,
    bundle: GoldenBundle,
    noise_of: Callable[[GoldenCase], CaseNoise],
) -> CaseResult:
    """Ask for every file of the bundle's model; `name` is what findings call the bundle."""
    result = CaseResult(name, FILES, SCRIPT)
    case = smoke_first(bundle.cases)[0]
    mode = next((mode for mode in MODES if mode.traces and mode.verbs <= info.verbs), None)
    if mode is None:
        result.verdict = Verdict.UNSUPPORTED
        result.unshown.update(f"{verb}()" for verb in MODES[0].verbs - info.verbs)
        return result
    question = _Question(name, engine, info, bundle, case, noise_of(case), mode)
    unread: set[str] = set()  # forms
    for file in FILE_CASES:
        if file.form in unread:
            continue
        with tempfile.TemporaryDirectory(prefix="kdtr-files-") as folder:
            source = file.write(Path(folder), bundle.config, bundle.weights)
            asked = question.ask(file, source)
        if asked.unread:
            unread.add(file.form)
            result.unshown.add(f"load() of a {file.form}")
            continue
        result.points += 1
        result.comparisons += 1
        if asked.wrong:
            place = Place(name, FILES, SCRIPT, file.name)
            result.findings.append(
                Finding(Verdict.FAIL, place, file.name, asked.wrong, rules=file.rules)
            )
            result.verdict = Verdict.FAIL
    if not result.points:
        result.verdict = Verdict.UNSUPPORTED
    return result


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is wrong with what became of a file, in words; or that its form is not read at all."""

    wrong: str = ""
    unread: bool = False


@dataclass(frozen=True, slots=True)
class _Question:
    """One engine, and the case that a loaded file is judged on."""

    name: str
    engine: Engine
    info: EngineInfo
    bundle: GoldenBundle
    case: GoldenCase
    noise: CaseNoise
    mode: Mode

    def ask(self, file: FileCase, source: Path) -> _Asked:
        is_plain = file.name == file.form
        try:
            model = self.engine.load(str(source))
        except EngineError as error:  # what went wrong in it, not what it refuses
            return _Asked(unread=True) if is_plain else _Asked(f"load() raised {told(error)}")
        except KdtrError:
            return _Asked(unread=is_plain)
        except RAISED as error:
            if is_plain:  # a path is nothing that it knows
                return _Asked(unread=True)
            text = f"load() raised {told(error)}; expected the model, or a refusal: a KdtrError"
            return _Asked(text)
        if file.broken:
            _close(model)
            return _Asked(f"was loaded, although {file.broken}; expected a refusal")
        try:
            return _Asked(self._judged(model))
        finally:
            _close(model)

    def _judged(self, model: Model) -> str:
        """The first finding of the case, in words."""
        judged = judge_case(
            self.name, model, self.info, self.bundle.config, self.case, self.noise, self.mode
        )
        bad = [finding for finding in judged.findings if finding.verdict.is_bad]
        if not bad:
            return ""
        first = bad[0]
        alias, at = self.case.inputs.alias, f", at {first.where}" if first.where else ""
        return (
            f"was loaded, and computes otherwise than from the same tensors as arrays: {alias} / "
            f"{self.mode.name} / {first.place.point}: {first.stage}: {first.summary}{at}"
        )


def _close(model: Any) -> None:
    try:
        model.close()
    except RAISED:
        return  # the file is what is judged; closing is judged with every bundle
