"""Files of weights: sound ones load as their tensors do, broken ones are refused."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import CaseResult, GateResult, GoldenBundle, Verdict, load_engine
from kdtr.conformance.file_cases import FILE_CASES, FileCase
from kdtr.conformance.file_image import kdtr_image, parts_of, safetensors_image
from kdtr.conformance.file_script import FILES, first_small
from kdtr.contract import (
    BundleError,
    CheckpointError,
    EngineError,
    KdtrError,
    UnsupportedError,
    rules,
)
from kdtr.kdtr_format import Bundle, open_model, read_checkpoint, write_bundle, write_checkpoint

Judge = Callable[..., GateResult]
SOUND = [file for file in FILE_CASES if not file.broken]
BROKEN = [file for file in FILE_CASES if file.broken]
# No loader need read these, and none may read them wrong.
REFUSED_HERE = {
    "KDTR file with payloads in reverse order": "leaves a hole",
    "checkpoint with a tensor in two files": "in two files",
}


def _id(file: FileCase) -> str:
    return file.name


@pytest.fixture(scope="module")
def golden(corpus: Path) -> GoldenBundle:
    return GoldenBundle.open(corpus / "all-moe.kdtr")


def script(judge: Judge, engine: Any, bundle: Path, **options: Any) -> CaseResult:
    (result,) = judge(engine, bundle, FILES, modes=["script"], **options).results
    return result


# The files


def test_an_image_is_what_the_writer_writes(tmp_path: Path, golden: GoldenBundle) -> None:
    tensors = {name: golden.weights[name] for name in golden.weights}

    for alignment in (64, 256, 4096):
        write_bundle(tmp_path / "written.kdtr", tensors, {}, alignment=alignment)

        written = (tmp_path / "written.kdtr").read_bytes()
        assert written == kdtr_image(parts_of(tensors), alignment=alignment)


def test_a_checkpoint_s_image_is_read_as_the_exporter_s(
    tmp_path: Path, golden: GoldenBundle
) -> None:
    tensors = {name: golden.weights[name] for name in golden.weights}
    write_checkpoint(tmp_path / "a", {}, tensors)
    write_checkpoint(tmp_path / "b", {}, tensors)

    (tmp_path / "b" / "model.safetensors").write_bytes(safetensors_image(parts_of(tensors)))

    one, other = (read_checkpoint(tmp_path / name).tensors for name in "ab")
    assert list(one) == list(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_names_begin_with_the_form_and_the_plain_one_comes_first() -> None:
    names = [file.name for file in FILE_CASES]

    assert len(names) == len(set(names))
    assert {"KDTR file", "checkpoint"} == {file.form for file in FILE_CASES}
    for form in {file.form for file in FILE_CASES}:
        of_form = [file for file in FILE_CASES if file.form == form]
        assert form == of_form[0].name
        assert all(file.name.startswith(form) for file in of_form)
    assert {rule for file in FILE_CASES for rule in file.rules} <= set(rules())


@pytest.mark.parametrize("file", SOUND, ids=_id)
def test_a_sound_file_holds_the_same_model(
    file: FileCase, tmp_path: Path, golden: GoldenBundle
) -> None:
    source = file.write(tmp_path, golden.config, golden.weights)

    if file.name in REFUSED_HERE:
        with pytest.raises(KdtrError, match=REFUSED_HERE[file.name]):
            open_model(source)
        return
    model = open_model(source)
    assert golden.config == model.config
    assert set(golden.weights) == set(model.tensors)
    for name in golden.weights:
        expected = golden.weights[name].astype(np.float32)
        assert np.array_equal(expected, model.tensors[name].astype(np.float32))


def test_payloads_in_reverse_order_lie_where_the_directory_says(
    tmp_path: Path, golden: GoldenBundle
) -> None:
    """A KDTR file has one order; a reader of any order would find every tensor."""
    (file,) = (one for one in SOUND if one.name == "KDTR file with payloads in reverse order")

    source = file.write(tmp_path, golden.config, golden.weights)

    with pytest.raises(BundleError):
        Bundle.open(source)
    data = source.read_bytes()
    n_entries = int.from_bytes(data[32:40], "little")
    for at in range(128, 128 + 192 * n_entries, 192):
        name = data[at : at + 96].rstrip(b"\0").decode()
        offset = int.from_bytes(data[at + 168 : at + 176], "little")
        n_bytes = int.from_bytes(data[at + 176 : at + 184], "little")
        if name.startswith("weights/"):
            expected = golden.weights[name.removeprefix("weights/")]
            assert np.ascontiguousarray(expected).tobytes() == data[offset : offset + n_bytes]


@pytest.mark.parametrize("file", BROKEN, ids=_id)
def test_a_broken_file_is_refused_by_the_engine(
    file: FileCase, tmp_path: Path, golden: GoldenBundle
) -> None:
    source = file.write(tmp_path, golden.config, golden.weights)

    with pytest.raises((BundleError, CheckpointError)):
        load_engine("host").load(str(source))


# Judging


@pytest.mark.parametrize("name", ["host", "reference"])
def test_both_honest_engines_pass(judge: Judge, corpus: Path, name: str) -> None:
    result = script(judge, name, corpus / "all-moe.kdtr")

    assert Verdict.PASS is result.verdict
    assert len(FILE_CASES) == result.points == result.comparisons
    assert set() == result.unshown


def test_an_engine_in_another_process_passes(judge: Judge, corpus: Path) -> None:
    kdtr = [sys.executable, "-m", "kdtr.conformance.cli", "serve-engine", "--engine", "host"]

    result = script(judge, f"stdio:{shlex.join(kdtr)}", corpus / "all-moe.kdtr")

    assert (Verdict.PASS, len(FILE_CASES)) == (result.verdict, result.points)


class _Loading:
    """The host engine with another `load`."""

    def __init__(self, load: Callable[[Any, Any], Any]) -> None:
        self._engine: Any = load_engine("host")
        self._load = load

    @property
    def info(self) -> Any:
        return self._engine.info

    def load(self, source: Any) -> Any:
        if isinstance(source, tuple):
            return self._engine.load(source)
        return self._load(self._engine, source)


def _judged(judge: Judge, corpus: Path, load: Callable[[Any, Any], Any]) -> CaseResult:
    return script(judge, _Loading(load), corpus / "all-moe.kdtr")


@pytest.mark.parametrize(
    "error", [UnsupportedError("no files"), TypeError("no path"), EngineError("")]
)
def test_an_engine_that_reads_no_files_is_not_judged(
    judge: Judge, corpus: Path, error: Exception
) -> None:
    def load(engine: Any, source: Any) -> Any:
        raise error

    result = _judged(judge, corpus, load)

    assert (Verdict.UNSUPPORTED, 0, []) == (result.verdict, result.points, result.findings)
    assert {"load() of a KDTR file", "load() of a checkpoint"} == result.unshown


def test_one_form_is_enough(judge: Judge, corpus: Path) -> None:
    def load(engine: Any, source: Any) -> Any:
        if Path(source).is_dir():
            raise UnsupportedError("KDTR only")
        return engine.load(source)

    result = _judged(judge, corpus, load)

    assert Verdict.PASS is result.verdict
    assert sum(file.form == "KDTR file" for file in FILE_CASES) == result.points
    assert {"load() of a checkpoint"} == result.unshown


def test_a_broken_file_that_raises_anything_is_not_refused(judge: Judge, corpus: Path) -> None:
    def load(engine: Any, source: Any) -> Any:
        try:
            return engine.load(source)
        except KdtrError:
            raise IndexError("out of range") from None

    result = _judged(judge, corpus, load)

    first = result.findings[0]
    assert "KDTR file with payloads in reverse order" == first.stage
    assert (
        "load() raised IndexError: out of range; expected the model, or a refusal: a KdtrError"
    ) == first.summary
    assert len(BROKEN) + len(REFUSED_HERE) == len(result.findings)


def test_a_broken_file_that_is_loaded_is_told(judge: Judge, corpus: Path, golden: Any) -> None:
    def load(engine: Any, source: Any) -> Any:
        try:
            return engine.load(source)
        except KdtrError:
            return engine.load((golden.config, golden.weights))

    result = _judged(judge, corpus, load)

    told = {finding.stage: finding for finding in result.findings}
    assert {file.name for file in BROKEN} == set(told)
    cut = told["KDTR file that was cut"]
    assert ("LOAD-2",) == cut.rules
    assert (
        "was loaded, although it ends in the middle of its last tensor; expected a refusal"
    ) == cut.summary


def test_other_weights_than_the_file_s_are_told(judge: Judge, corpus: Path, golden: Any) -> None:
    def load(engine: Any, source: Any) -> Any:
        if "checkpoint" in str(source) or not Path(source).is_dir():
            return engine.load(source)
        engine.load(source)
        weights = dict(golden.weights)
        weights["model.norm.weight"] = weights["model.norm.weight"][::-1]
        return engine.load((golden.config, weights))

    result = _judged(judge, corpus, load)

    first = result.findings[0]
    assert ("checkpoint", ("LOAD-1",)) == (first.stage, first.rules)
    assert first.summary.startswith(
        "was loaded, and computes otherwise than from the same tensors as arrays: stages / "
        "stepwise / chunk0: final_hidden: "
    )


def test_what_is_wrong_with_arrays_is_no_fault_of_files(judge: Judge, corpus: Path) -> None:
    gate = judge("kdtr.conformance.mutants:make_engine", corpus / "all-moe.kdtr", mutant="M077")

    (files,) = [result for result in gate.results if result.case == FILES]
    assert Verdict.BLOCKED is files.verdict
    assert files.blocked_by.endswith(" / stepwise")


def test_a_fault_of_another_case_leaves_the_files_to_be_judged(judge: Judge, corpus: Path) -> None:
    gate = judge("planted_faults:make_engine", corpus / "all-moe.kdtr", fault="position_by_index")

    (files,) = [result for result in gate.results if result.case == FILES]
    assert not gate.passed
    assert Verdict.PASS is files.verdict


def test_the_first_small_model_is_written(tiny: Path, corpus: Path) -> None:
    bundles = [GoldenBundle.open(p) for p in (tiny, corpus / "base.kdtr", corpus / "yarn.kdtr")]

    assert bundles[1] is first_small(bundles)
    assert bundles[0] is first_small(bundles[:1])
    assert None is first_small([])


def test_a_finding_is_reproduced_by_its_line(
    kdtr: Callable[..., SimpleNamespace], corpus: Path
) -> None:
    run = kdtr("gate", corpus / "all-moe.kdtr", "--engine", "host", "--case", "files")

    assert 0 == run.code
    assert "files  pass" in run.out
