"""Engines by files: the questions hold no answer, and the judge is the gate's own."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kdtr.conformance import GateResult, GoldenBundle, Verdict, load_engine
from kdtr.conformance.gate import Selection
from kdtr.conformance.offline_cli import judge_answers
from kdtr.conformance.offline_engine import ReplayEngine
from kdtr.conformance.offline_questions import questions_id, write_questions
from kdtr.contract import BundleError
from kdtr.kdtr_format import Bundle, open_model, write_bundle
from kdtr.kdtr_format.metadata import encode_metadata

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs/examples/python"))
from answer_questions import answer  # type: ignore[import-not-found]

Arrays = dict[str, np.ndarray]
Kdtr = Callable[..., SimpleNamespace]


def asked(golden: Path, folder: Path) -> Path:
    """The questions of a golden bundle."""
    bundle = GoldenBundle.open(golden)
    write_questions(bundle, folder / "questions.kdtr")
    bundle.close()
    return folder / "questions.kdtr"


def answered(golden: Path, folder: Path, engine: Any = None) -> Path:
    """The answers of an engine, the host engine unless said."""
    answer(asked(golden, folder), folder / "answers.kdtr", engine or load_engine("host"))
    return folder / "answers.kdtr"


def judged(answers: Path, golden: Path, *cases: str) -> GateResult:
    bundle = GoldenBundle.open(golden)
    engine = ReplayEngine(answers, bundle)
    bundle.close()
    return judge_answers(engine, golden, Selection(frozenset(cases)), lambda _: None)


@pytest.fixture(scope="module")
def honest(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the host engine, to the questions of `small`."""
    return answered(small, tmp_path_factory.mktemp("honest"))


@pytest.fixture
def changed(honest: Path, tmp_path: Path) -> Callable[..., Path]:
    """changed(arrays -> None, metadata -> None): the honest answers after that."""

    def changed(
        change: Callable[[Arrays], object], about: Callable[[Any], object] = lambda _: None
    ) -> Path:
        with Bundle.open(honest) as bundle:
            arrays = {name: np.array(bundle[name]) for name in bundle.names()}
            metadata = dict(bundle.metadata)
        change(arrays)
        about(metadata)
        write_bundle(tmp_path / "answers.kdtr", arrays, metadata)
        return tmp_path / "answers.kdtr"

    return changed


def verdicts(result: GateResult) -> dict[str, str]:
    return {one.case: one.verdict.name for one in result.results}


# Questions


def test_questions_hold_no_answer(small: Path, tmp_path: Path) -> None:
    questions = asked(small, tmp_path)

    with Bundle.open(small) as golden, Bundle.open(questions) as bundle:
        kinds = {name.partition("/")[0] for name in bundle.names()}
        assert {"config", "weights", "input", "questions"} == kinds
        assert [*golden.view("input/").names()] == [*bundle.view("input/").names()]
        assert {"kind", "model", "cases"} == set(bundle.metadata)
        assert {"alias", "id"} == {key for case in bundle.metadata["cases"] for key in case}
        content = questions.read_bytes()
        for name in golden.view("expect/").names():
            array = np.array(golden[name])
            assert array.nbytes < 64 or array.dtype.kind in "bi" or array.tobytes() not in content


def test_questions_are_a_model(small: Path, tmp_path: Path) -> None:
    opened = open_model(asked(small, tmp_path))

    golden = open_model(small)
    assert golden.config == opened.config
    assert set(golden.tensors) == set(opened.tensors)


def test_the_id_changes_with_the_model_and_with_what_is_asked(
    small: Path, record: Callable[..., Path], small_model: SimpleNamespace
) -> None:
    other_config = replace(small_model.config, rope_theta=501.0)
    fewer = small_model.plans[:1]

    ids = []
    for path in (small, record(small_model.plans, other_config), record(fewer)):
        bundle = GoldenBundle.open(path)
        ids.append(questions_id(bundle).tobytes())
        bundle.close()

    assert len(set(ids)) == 3


def test_questions_do_not_overwrite_their_bundle(small: Path) -> None:
    bundle = GoldenBundle.open(small)
    before = small.read_bytes()

    with pytest.raises(BundleError, match="is the golden bundle; give --out another name"):
        write_questions(bundle, small)
    bundle.close()
    assert before == small.read_bytes()


# Judged as the gate judges


def test_an_honest_engine_passes_and_shows_all_that_round_shows(
    honest: Path, small: Path, judge: Callable[..., GateResult]
) -> None:
    result = judged(honest, small)

    assert result.passed
    assert {"PASS"} == set(verdicts(result).values())
    live = judge("host", small, modes=["round"])
    for here, there in zip(result.results, live.results, strict=True):
        built = [one for one in here.compared if one.stage.startswith("build_")]
        assert there.compared == [one for one in here.compared if one not in built]
        assert bool(built) == (here.case == "drafted")


@pytest.mark.parametrize("fault", ["no_compaction", "sibling_visible", "length_grows_by_tree"])
def test_the_findings_of_a_faulty_engine_are_those_of_the_gate(
    tiny: Path, tmp_path: Path, judge: Callable[..., GateResult], fault: str
) -> None:
    name = "planted_faults:make_engine"
    live = judge(name, tiny, "y-tree", modes=["round"], fault=fault)

    answers = answered(tiny, tmp_path, load_engine(name, {"fault": fault}))
    result = judged(answers, tiny, "y-tree")

    (expected,) = live.findings
    (found,) = result.findings
    place = replace(expected.place, mode="offline")
    assert replace(expected, place=place, reproduce="", blame="") == replace(
        found, reproduce="", blame=""
    )


def test_a_near_tie_ends_its_case_and_is_no_failure(corpus: Path, tmp_path: Path) -> None:
    """The engine took another token: the golden script asks nothing that it can answer."""
    golden = corpus / "near-ties.kdtr"

    result = judged(answered(golden, tmp_path), golden)

    assert result.passed
    assert {"ar": "PASS", "trees": "NEAR_TIE"} == verdicts(result)


# What is missing


def test_cases_without_answers_are_not_shown(changed: Callable[..., Path], small: Path) -> None:
    def without_y(arrays: Arrays) -> None:
        for name in [name for name in arrays if name.startswith("answer/y/")]:
            del arrays[name]

    result = judged(changed(without_y), small)

    assert "UNSUPPORTED" == verdicts(result)["y"]
    assert result.passed
    (y,) = [one for one in result.results if one.case == "y"]
    assert {"answers"} == y.unshown


def test_no_answers_at_all_do_not_pass(changed: Callable[..., Path], small: Path) -> None:
    def nothing(arrays: Arrays) -> None:
        for name in [name for name in arrays if name != "questions/id"]:
            del arrays[name]

    result = judged(changed(nothing), small)

    assert not result.passed
    assert "nothing was compared" == result.shortfall


def test_stages_that_are_not_declared_are_not_shown(
    changed: Callable[..., Path], small: Path
) -> None:
    keep = {"path", "bonus", "emitted", "root", "committed_len", "id"}

    def decisions(arrays: Arrays) -> None:
        for name in [name for name in arrays if name.rpartition("/")[2] not in keep]:
            del arrays[name]

    def declared(metadata: Any) -> None:
        metadata["engine"] = {**metadata["engine"], "stages": [], "verbs": []}

    result = judged(changed(decisions, declared), small)

    assert result.passed
    assert {"mask", "logits", "cache_c_kv", "targets"} <= result.results[0].unshown


def _without(*names: str) -> Callable[[Arrays], None]:
    def without(arrays: Arrays) -> None:
        for name in names:
            del arrays[name]

    return without


def _stopped(arrays: Arrays) -> None:
    for name in [name for name in arrays if name.startswith("answer/y/round1/")]:
        del arrays[name]


def _said(arrays: Arrays) -> None:
    _stopped(arrays)
    arrays["answer/y/round1/error"] = np.frombuffer(b"no memory for 4 rows", np.uint8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            _stopped,
            "the answers hold nothing of round1, and no `error` that says why; expected every "
            "point up to the engine's first decision that differs",
        ),
        (_said, "the engine stopped at round1: no memory for 4 rows"),
        (
            _without("answer/y/round1/path", "answer/y/round1/root"),
            "the answers of round1 lack path, root; expected them at every point",
        ),
        (
            _without("answer/y/round1/mask"),
            "the engine declares the stage mask, but did not show it",
        ),
        (
            _without("answer/y/round1/cache_k_pe"),
            "the answers lack cache_k_pe; expected it where its verb is declared",
        ),
    ],
    ids=["stopped", "said", "decisions", "stage", "cache"],
)
def test_a_point_without_its_answers_is_an_error(
    changed: Callable[..., Path], small: Path, change: Callable[[Arrays], None], text: str
) -> None:
    result = judged(changed(change), small)

    (finding,) = result.findings
    assert ("y", "round1", Verdict.ERROR) == (
        finding.place.case,
        finding.place.point,
        finding.verdict,
    )
    assert text == finding.summary
    assert {"PASS"} == {v for case, v in verdicts(result).items() if case != "y"}


# What lies


def _set(name: str, value: Any) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__setitem__(f"answer/y/round0/{name}", np.asarray(value))


def _nan(arrays: Arrays) -> None:
    arrays["answer/y/round0/logits"][2, 5] = np.nan


def _short(arrays: Arrays) -> None:
    arrays["answer/y/round0/logits"] = arrays["answer/y/round0/logits"][:-1]


def _nothing(_: object) -> None:
    pass


def _without_walk(metadata: Any) -> None:
    """Answers are held to their form where they are no stages, which are compared as they are."""
    for stage in ("path", "bonus"):
        metadata["engine"]["stages"].remove(stage)


@pytest.mark.parametrize(
    ("change", "verdict", "stage", "text"),
    [
        (_nan, "FAIL", "logits", "1 of 148 differ in being finite"),
        (_short, "FAIL", "logits", "[3, 37]"),
        (_set("mask", np.ones((4, 10))), "ERROR", "mask", "mask is float64; expected bool, or"),
        (_set("slots", np.ones(4, bool)), "ERROR", "slots", "slots is bool; expected integers"),
        (_set("path", [0, 1]), "FAIL", "path", "[0, 1]"),
        (_set("path", [0.0, 2.0]), "ERROR", "answer", "path is float64 [2]; expected integers [n]"),
        (_set("path", [0, 2, 1]), "ERROR", "answer", "path and bonus are no acceptance: path[2]"),
        (_set("bonus", [3]), "ERROR", "answer", "bonus is int64 [1]; expected one integer, []"),
        (_set("root", True), "ERROR", "answer", "root is bool []; expected one integer, []"),
        (_set("cache_c_kv", np.ones((2, 3))), "ERROR", "answer", "expected [l, t, c]"),
        (_set("layer9/scores", np.ones(3)), "ERROR", "answer", "scores at layer 9; expected 0..1"),
    ],
    ids=[
        "nan",
        "rows",
        "mask",
        "slots",
        "path",
        "floats",
        "back",
        "list",
        "flag",
        "cache",
        "layer",
    ],
)
def test_a_value_that_lies_is_a_verdict_on_its_case(
    changed: Callable[..., Path],
    small: Path,
    change: Callable[[Arrays], None],
    verdict: str,
    stage: str,
    text: str,
) -> None:
    result = judged(changed(change, _without_walk if verdict == "ERROR" else _nothing), small)

    (finding,) = result.findings
    assert ("y", verdict, stage) == (finding.place.case, finding.verdict.name, finding.stage)
    assert text in " ".join([finding.summary, finding.expected, finding.actual])
    assert {"PASS"} == {v for case, v in verdicts(result).items() if case != "y"}


def _renamed(old: str, new: str) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__setitem__(new, arrays.pop(old))


@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        (
            _renamed("answer/y/round0/mask", "answer/y/round0/maks"),
            _nothing,
            "answer/y/round0/maks: 'maks' is no stage (contract/stages.py)",
        ),
        (
            _renamed("answer/y/round0/mask", "answer/y/round7/mask"),
            _nothing,
            "'answer/y/round7/mask' answers no question",
        ),
        (
            _renamed("answer/y/round0/mask", "answer/z/round0/mask"),
            _nothing,
            "'answer/z/round0/mask' answers no question",
        ),
        (
            _set("untouched", [True]),
            _nothing,
            "answer/y/round0/untouched is found by the judge, from snapshots; leave it out",
        ),
        (
            _nothing,
            lambda metadata: metadata["engine"]["stages"].remove("mask"),
            "mask is there, but 'mask' is not in the engine's stages; add it",
        ),
        (
            _nothing,
            lambda metadata: metadata["engine"]["verbs"].remove("build"),
            "is there, but 'build' is not in the engine's verbs; add it",
        ),
        (_nothing, lambda metadata: metadata.pop("engine"), "engine = None in the metadata"),
        (_nothing, lambda metadata: metadata.update(kind="golden"), "kind = 'golden' in the meta"),
        (
            _nothing,
            lambda metadata: metadata["engine"]["profile"].pop("logits"),
            "engine in the metadata: the reply's profile lacks logits; expected a text",
        ),
        (
            _nothing,
            lambda metadata: metadata["engine"]["stages"].append("maks"),
            "engine in the metadata: 'maks' in stages is no stage",
        ),
        (_without("questions/id"), _nothing, "questions/id is missing; copy the tensor"),
        (
            lambda arrays: arrays.update({"questions/id": np.zeros(32, np.uint8)}),
            _nothing,
            "these are answers to other questions",
        ),
        (
            lambda arrays: arrays.update({"answer/y/round0/error": np.zeros(3)}),
            _nothing,
            "answer/y/round0/error is float64 [3]; expected UTF-8, u8 [n]",
        ),
    ],
    ids=range(13),
)
def test_a_file_of_another_form_is_refused(
    kdtr: Kdtr, changed: Callable[..., Path], small: Path, change: Any, about: Any, text: str
) -> None:
    answers = changed(change, about)

    run = kdtr("judge", answers, "--against", small)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: EngineError: {answers}: ")
    assert text in run.err


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _twice(content: bytes) -> bytes:
    """The second entry under the first one's name, with fitting checksums left to the reader."""
    return content[:320] + content[128:320] + content[512:]


def _flipped(content: bytes) -> bytes:
    """One bit of the last tensor is another."""
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_cut, "the file was cut or edited"),
        (_flipped, "the file was cut or edited"),
        (_twice, "the file was cut or edited"),
        (lambda _: b"", "the file is empty; expected a KDTR file"),
        (lambda _: b"{}", "not a KDTR file: it looks like JSON; expected it to start with"),
    ],
    ids=["cut", "flipped", "twice", "empty", "json"],
)
def test_a_file_that_cannot_be_read_is_refused(
    kdtr: Kdtr,
    honest: Path,
    small: Path,
    tmp_path: Path,
    spoil: Callable[[bytes], bytes],
    text: str,
) -> None:
    answers = tmp_path / "answers.kdtr"
    answers.write_bytes(spoil(honest.read_bytes()))

    run = kdtr("judge", answers, "--against", small)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: BundleError: {answers}: ")
    assert text in run.err
    assert run.err.endswith(
        "; expected what the engine wrote: copy the file again, whole, or let the engine answer "
        "the questions again\n"
    )
    assert 1 == run.err.count("answers.kdtr")


def test_what_is_no_file_of_answers_says_where_it_belongs(
    kdtr: Kdtr, small: Path, tmp_path: Path
) -> None:
    questions = asked(small, tmp_path)

    golden = kdtr("judge", small, "--against", small)
    unanswered = kdtr("judge", questions, "--against", small)
    folder = kdtr("judge", tmp_path, "--against", small)

    assert (2, 2, 2) == (golden.code, unanswered.code, folder.code)
    assert (
        f"{small}: kind = 'golden' in the metadata; expected 'answers'; give it as --against, and "
        "here the file that the engine wrote"
    ) in golden.err
    assert (
        f"{questions}: kind = 'questions' in the metadata; expected 'answers'; these are the "
        "questions: let the engine answer them"
    ) in unanswered.err
    assert f"{tmp_path}: is a directory; expected a KDTR file; expected what" in folder.err


# The page

PAGE = Path(__file__).resolve().parents[2] / "docs/offline.md"


def test_the_example_of_the_page_is_right(corpus: Path) -> None:
    lines = re.findall(r"^(input|answer)/(\S+) +(\S.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(lines) == 13

    with Bundle.open(corpus / "base.kdtr") as golden:
        for kind, name, value in lines:
            truth = golden[f"{'input' if kind == 'input' else 'expect'}/{name}"]
            assert json.loads(value) == truth.tolist(), name


def test_the_metadata_of_the_page_is_canonical_and_whole(
    changed: Callable[..., Path], small: Path
) -> None:
    (line,) = re.findall(r'^\{"engine":.*$', PAGE.read_text(), re.MULTILINE)
    metadata = json.loads(line)
    keep = {"logits", "mask", "positions", "targets", "path", "bonus", "emitted", "root", "id"}

    def fewer(arrays: Arrays) -> None:
        for name in [*arrays]:
            end = name.rpartition("/")[2]
            if end not in keep and end != "committed_len" and not end.startswith("cache_"):
                del arrays[name]

    assert line.encode() == encode_metadata(metadata)
    assert judged(changed(fewer, lambda about: about.update(metadata)), small).passed


# The commands


def test_the_commands(
    kdtr: Callable[..., SimpleNamespace], changed: Callable[..., Path], small: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "q.kdtr"

    wrote = kdtr("questions", small, "--out", questions)
    passed = kdtr("judge", changed(_nothing), "--against", small)
    failed = kdtr("judge", changed(_nan), "--against", small)
    again = kdtr("judge", changed(_nan), "--against", small, "--case", "ar")
    missing = kdtr("judge", tmp_path / "none.kdtr", "--against", small)
    swapped = kdtr("judge", small, "--against", questions)

    assert (0, f"{questions}: 4 cases, 9 points\n") == (wrote.code, wrote.out)
    assert (0, 1, 0, 2, 2) == (passed.code, failed.code, again.code, missing.code, swapped.code)
    assert "\npart of the answers passed: " in again.out
    assert "\nanswers passed: 4 pass" in passed.out
    line = f"kdtr judge {tmp_path / 'answers.kdtr'} --against {small} --case y --until round0"
    assert line in failed.out
    assert "none.kdtr: no such file; expected what the engine wrote" in missing.err
    assert "kind = 'questions'; expected a golden bundle" in swapped.err
