"""The zoo: every fault of the list is planted or waits, and the matrix says what became of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.conformance import load_engine
from kdtr.conformance.file_cases import FILE_CASES
from kdtr.conformance.mutants import BY_NAME, CLASSES, MUTANTS, WAITING, Mutant, make_engine
from kdtr.conformance.mutants.docket import Docket
from kdtr.conformance.mutants.engine_run import EngineRun
from kdtr.conformance.mutants.gaps import LOGITS_ONLY, SHOWN
from kdtr.conformance.mutants.kill_matrix import COLUMNS, living, matrix_text, summary
from kdtr.conformance.mutants.kill_run import KillRow
from kdtr.conformance.mutants.mutants_cli import shipped_corpus
from kdtr.conformance.mutants.trial import LogitsOnly, Trial, by_logits_alone, shown_whole
from kdtr.conformance.state_script import _CHECKS
from kdtr.contract import STAGE, EngineError, rules

CUDA_FAULTS = Path(__file__).resolve().parents[1] / "engine" / "gpu" / "cuda_faults.py"
MATRIX = Path(__file__).resolve().parents[2] / "docs" / "kill-matrix.md"
# The list: a class's faults in order. Numbers that are missing here are kept back there.
LIST = {
    "POS": "M001 M002 M005 M007 M008",
    "MASK": "M009 M010 M012 M014 M015 M018",
    "TREE": "M019 M021 M023 M024",
    "ACC": "M025 M027 M029 M031 M033 M034",
    "CMP": "M035 M037 M039 M041 M042 M044 M046 M047",
    "SLOT": "M049 M051 M053 M054 M056 M057 M059",
    "LIM": "M060 M062 M064 M066 M067",
    "EDGE": "M069 M071 M072 M073",
    "MLAS": "M075 M077 M079",
    "MLAR": "M080 M082 M083 M084",
    "MLAW": "M086 M088 M090 M092",
    "LSE": "M093 M095 M097 M099 M100",
    "MOEG": "M102 M104 M106 M108 M110",
    "MOEA": "M111 M113 M115 M117",
    "QNT": "M118 M120 M122 M124 M126 M128 M129 M131 M132",
    "FILE": "M133 M135 M137 M138 M140",
    "GRAPH": "M141 M143 M145 M147",
    "OVF": "M148 M150 M152",
    "NUM": "M153 M155 M157",
    "PFX": "M158 M160 M162",
}


# Declarations


def test_every_fault_of_the_list_is_a_mutant_or_waits() -> None:
    declared = {
        name: " ".join(sorted(one.number for one in (*family.mutants, *family.waiting)))
        for name, family in CLASSES.items()
    }

    assert LIST == declared
    assert 97 == len(MUTANTS) + len(WAITING)
    assert not set(MUTANTS) & set(WAITING)
    assert len(BY_NAME) == len(MUTANTS)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_declared_in_the_order_of_the_list(name: str) -> None:
    family = CLASSES[name]

    for declared in (family.mutants, family.waiting):
        numbers = [one.number for one in declared]
        assert sorted(numbers) == numbers
        assert all(re.fullmatch(rf"{name}-\d+", one.kind) for one in declared)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_mutant_says_what_it_breaks_and_where_it_is_seen(mutant: Mutant) -> None:
    assert set(mutant.rules) <= set(rules())
    checks = {check.name for check in _CHECKS} | {file.name for file in FILE_CASES}
    assert mutant.stage in {*STAGE} | checks
    assert mutant.what.endswith(".")


def test_what_is_planted_in_the_cuda_engine_has_its_name_there() -> None:
    module = ast.parse(CUDA_FAULTS.read_text(encoding="utf-8"))
    (faults,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAULTS"
    )
    assert isinstance(faults, ast.Dict)
    planted = {key.value for key in faults.keys if isinstance(key, ast.Constant)}

    in_cuda = {number: one for number, one in WAITING.items() if one.in_cuda_as}

    assert {"M099", "M148", "M150"} == set(in_cuda)
    for one in in_cuda.values():
        assert one.in_cuda_as in planted
        assert f"nothing: planted in the CUDA engine, as {one.in_cuda_as}" == one.part


def test_gaps_are_of_mutants() -> None:
    assert set(SHOWN) | set(LOGITS_ONLY) <= set(MUTANTS)


# Trials


@pytest.fixture(scope="module")
def docket(corpus: Path) -> Iterator[Docket]:
    with Docket([corpus / "base.kdtr"]) as docket:
        yield docket


def _tried(docket: Docket, mutant: Mutant, engine: Any) -> Trial:
    return shown_whole(docket, mutant, EngineRun(docket, engine))


def test_an_honest_engine_lives(docket: Docket) -> None:
    honest: Any = load_engine("host", {"page_size": 3, "split_size": 5})

    shown = _tried(docket, MUTANTS["M001"], honest)
    logits_only = by_logits_alone(docket, MUTANTS["M001"], honest)

    assert not shown.killed
    assert not logits_only.killed
    assert len(docket.entries) == shown.judged == logits_only.judged - 1  # and the x-ray set


@pytest.mark.parametrize(
    ("number", "where"),
    [
        ("M001", "base: chain / stepwise / round0"),
        ("M010", "base: stages / stepwise / round0"),
        ("M024", "base: state / script / verify of a token outside the vocabulary"),
        ("M042", "base: chain / stepwise / round0"),
        ("M047", "base: chain / stepwise / round2"),
        ("M060", "base: limits / stepwise / round1"),
        ("M113", "base: stages / stepwise / chunk0"),
        ("M133", "base: files / script / checkpoint with payloads in reverse order"),
        ("M138", "base: files / script / KDTR file with a tensor twice"),
        ("M152", "base: long / stepwise / round0"),
        ("M155", "base: state / script / second verify"),
    ],
)
def test_a_mutant_is_killed_and_named(docket: Docket, number: str, where: str) -> None:
    mutant = MUTANTS[number]

    trial = _tried(docket, mutant, make_engine(number))

    assert (where, mutant.stage) == (trial.where, trial.stage)
    assert trial.named
    assert trial.says.startswith(f"{mutant.stage}: ")


@pytest.mark.parametrize("number", ["M037", "M053", "M077"])
def test_logits_alone_name_it_by_an_explanation_or_by_the_x_rays(
    docket: Docket, number: str
) -> None:
    trial = by_logits_alone(docket, MUTANTS[number], make_engine(number))

    assert trial.killed
    assert trial.named
    assert MUTANTS[number].stage != trial.stage


def test_a_fault_that_no_case_shows_lives(docket: Docket) -> None:
    """M075 wants a model with YaRN."""
    trial = _tried(docket, MUTANTS["M075"], make_engine("no_mscale"))

    assert ("", "", False) == (trial.where, trial.stage, trial.named)
    assert trial.judged == len(docket.entries)


def test_named_is_the_stage_and_the_rule(docket: Docket) -> None:
    engine, mutant = make_engine("M010"), MUTANTS["M010"]

    elsewhere = _tried(docket, replace(mutant, stage="scores"), engine)
    otherwise = _tried(docket, replace(mutant, rules=("MOE-1",)), engine)

    assert (True, False) == (elsewhere.killed, elsewhere.named)
    assert (True, False) == (otherwise.killed, otherwise.named)


def test_logits_alone_are_no_stage_and_no_snapshot() -> None:
    info = LogitsOnly(load_engine("host")).info

    assert frozenset() == info.stages
    assert {"verify", "round", "commit"} <= info.verbs
    assert "snapshot" not in info.verbs


# The engine by name


def test_an_unknown_mutant_is_refused() -> None:
    with pytest.raises(EngineError, match=r"^no mutant M999; expected one of M001, M002, "):
        make_engine("M999")


def test_an_engine_without_kernels_is_refused() -> None:
    with pytest.raises(
        EngineError,
        match=r"^engine xray_minimal:make_engine has no kernels to wrap; "
        r"expected one of this project's, such as host$",
    ):
        make_engine("M001", "xray_minimal:make_engine")


# The matrix


def _table(text: str, first: str) -> dict[str, list[str]]:
    """The rows of the table whose header begins so, by their first cell."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("| "):
            break
        cells = [cell.replace("\\|", "|") for cell in re.split(r" (?<!\\)\| ", line[2:-2])]
        rows[cells[0]] = cells
    return rows


@pytest.fixture(scope="module")
def matrix() -> dict[str, list[str]]:
    """The rows of docs/kill-matrix.md; if it is behind, run `make mutants`."""
    return _table(MATRIX.read_text(encoding="utf-8"), "| mutant | class | fault | breaks | ")


def test_the_matrix_has_every_mutant_as_declared(matrix: dict[str, list[str]]) -> None:
    expected = {
        number: [number, one.kind, one.what, one.rules[0], one.stage]
        for number, one in MUTANTS.items()
    }

    assert expected == {number: cells[:5] for number, cells in matrix.items()}
    assert {len(COLUMNS)} == {len(cells) for cells in matrix.values()}


def test_the_matrix_has_all_that_waits() -> None:
    waiting = _table(MATRIX.read_text(encoding="utf-8"), "| mutant | class | fault | waits for |")

    assert waiting == {
        number: [number, one.kind, one.what, one.part] for number, one in WAITING.items()
    }


def test_in_the_matrix_nothing_lives_and_what_is_not_named_has_a_reason(
    matrix: dict[str, list[str]],
) -> None:
    for column, gaps in ((5, SHOWN), (7, LOGITS_ONLY)):
        became = {number: cells[column] for number, cells in matrix.items()}
        assert {"named", "killed"} >= set(became.values())
        assert set(gaps) == {number for number, word in became.items() if word != "named"}


def test_the_matrix_counts_its_rows(matrix: dict[str, list[str]]) -> None:
    (counts,) = re.findall(r"^(\d+) mutants; all stages: .*$", MATRIX.read_text(), re.MULTILINE)

    assert len(matrix) == int(counts)


def test_a_matrix_says_what_lives_and_what_is_killed_for_another_thing() -> None:
    mutant = replace(MUTANTS["M084"], number="M084")
    other = Trial(3, "b: ar / round / round1", "logits", ("FWD-4",), "logits: differ")
    rows = [KillRow(mutant, Trial(9), other)]

    text = matrix_text(rows, [])

    assert ["M084"] == living(rows)
    assert (
        "1 mutants; all stages: 0 killed, 0 named; logits alone: 1 killed, 0 named.\n"
        "0 faults wait for a part."
    ) == summary(rows, [])
    assert (
        "| M084 | MLAR-5 | The columns are taken as [k_pe \\| c_kv]. | MLA-2 | c_kv | **lives** |  "
        "| killed | b: ar / round / round1 |"
    ) in text
    assert "- M084 `columns_swapped`: none" in text
    assert "- M084, all stages: it lives: no reason is known" in text
    assert ("- M084, logits alone: seen at logits, of MLA-2 at c_kv: no reason is known") in text


# The command


def test_the_command_says_what_became_of_a_mutant(
    kdtr: Callable[..., SimpleNamespace], corpus: Path
) -> None:
    run = kdtr("mutants", corpus / "base.kdtr", "--mutant", "M010", "--workers", "1")

    assert 0 == run.code
    assert "1 mutants; all stages: 1 killed, 1 named; logits alone: 1 killed, 1 named." in run.out
    assert "M010  prefix_invisible  (masks; MASK-2 in the list of faults)" in run.out
    assert "  wanted    seen first at mask, MASK-1 cited" in run.out
    assert "  all stages shown: killed and named" in run.out
    assert "  says      mask: 4 of 5 differ" in run.out


def test_the_command_fails_where_one_lives(
    kdtr: Callable[..., SimpleNamespace], corpus: Path
) -> None:
    run = kdtr("mutants", corpus / "base.kdtr", "--mutant", "M075", "--workers", "1")

    assert 1 == run.code
    assert "FAILED: M075 lives" in run.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mutant", "M001", "--mutant", "M999"), "no mutant M999; expected some of M001, "),
        (("--mutant", "M007"), "no mutant M007; M007 waits for batch; expected some of M001, "),
        (("--class", "POS", "--out", "m.md"), "--out writes the whole matrix; leave --class and "),
        (("--workers", "0"), "--workers 0; expected at least 1"),
    ],
)
def test_a_request_is_refused(
    kdtr: Callable[..., SimpleNamespace], words: tuple[str, ...], said: str
) -> None:
    run = kdtr("mutants", *words)

    assert 2 == run.code
    assert f"kdtr: CaseError: {said}" in run.err


def test_without_a_bundle_the_corpus_is_judged(corpus: Path) -> None:
    assert shipped_corpus() == sorted(str(path) for path in corpus.glob("*.kdtr"))
