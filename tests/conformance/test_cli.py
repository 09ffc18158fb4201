"""The command: exit codes, texts on standard error, and nothing half-written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_engines
import pytest
from hostile_engines import Hostile, pressing_ctrl_c

from kdtr.conformance import GoldenBundle
from kdtr.conformance.cli import main
from kdtr.contract import ModelConfig

Kdtr = Callable[..., SimpleNamespace]
CasesFile = Callable[[Any], Path]
CHECKPOINTS = Path(__file__).resolve().parents[1] / "data" / "hf-deepseek-v3"


def refused(run: SimpleNamespace, text: str) -> bool:
    """Exit code 2 and one line on standard error."""
    assert "" == run.out
    assert f"kdtr: {text}\n" == run.err
    return run.code == 2


def misused(run: SimpleNamespace, text: str) -> bool:
    """argparse's refusal: the usage, and a line."""
    assert "" == run.out
    assert run.err.startswith("usage: kdtr")
    assert run.err.endswith(f"error: {text}\n"), run.err
    return run.code == 2


def test_the_version(kdtr: Kdtr) -> None:
    run = kdtr("--version")

    assert (0, f"kdtr {version('kdtr')}\n", "") == (run.code, run.out, run.err)


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("kdtr")

    run = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)

    assert f"kdtr {version('kdtr')}\n" == run.stdout


def test_help_lists_the_verbs_and_the_format_of_cases(kdtr: Kdtr) -> None:
    assert "judge an engine against golden bundles" in kdtr("--help").out
    assert 0 == kdtr("gate", "--help").code
    assert "the current directory" in kdtr("gate", "--help").out
    assert "A cases file is a JSON list." in kdtr("golden", "--help").out


def test_no_verb(kdtr: Kdtr) -> None:
    assert misused(kdtr(), "the following arguments are required: VERB")


# gate


def test_a_gate_that_passes(kdtr: Kdtr, small: Path) -> None:
    run = kdtr("gate", small, "--engine", "host")

    assert (0, "") == (run.code, run.err)
    assert run.out.startswith("kdtr.engine ")
    assert re.search(r"\ngate passed: \d+ pass; ", run.out)


def test_a_gate_that_fails(kdtr: Kdtr, small: Path) -> None:
    engine = "planted_faults:make_engine"

    run = kdtr("gate", small, "--engine", engine, "--engine-option", "fault=root_low")

    assert (1, "") == (run.code, run.err)
    assert "gate FAILED: " in run.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["x.kdtr"], "the following arguments are required: --engine"),
        (
            ["x", "--engine", "host", "--mode", "fast"],
            "argument --mode: invalid choice: 'fast' (choose from ",
        ),
    ],
)
def test_gate_misused(kdtr: Kdtr, words: list[str], text: str) -> None:
    run = kdtr("gate", *words)

    assert (2, "") == (run.code, run.out)
    assert f"kdtr gate: error: {text}" in run.err


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--until", "round0", "--until", "chunk0"], "--until is given twice: round0, chunk0"),
        (["--engine", "host", "--engine=host"], "--engine is given 3 times: none, host, host"),
        (
            ["--engine-option", "page_size=2", "--engine-option", "page_size=3"],
            "--engine-option page_size is given twice: 2, 3",
        ),
    ],
)
def test_an_option_that_is_given_twice_is_told(
    kdtr: Kdtr, small: Path, words: list[str], note: str
) -> None:
    first = "host" if "host" not in words else "none"

    run = kdtr("gate", small, "--case", "ar", "--case", "y", "--engine", first, *words)

    assert (0, f"kdtr: note: {note}; the last one holds\n") == (run.code, run.err)


def test_verbs_of_other_rooms_tell_it_too(kdtr: Kdtr) -> None:
    run = kdtr("campaign", "--engine", "host", "--cases", "1", "--cases", "2")

    assert run.err.startswith("kdtr: note: --cases is given twice: 1, 2; the last one holds\n")
    assert "--out is missing" in run.err


def test_a_gate_without_bundles_says_what_else_there_is(kdtr: Kdtr) -> None:
    run = kdtr("gate", "--engine", "host")

    assert (2, "") == (run.code, run.out)
    assert "no bundle to judge by; give golden bundles, or --self --model SOURCE" in run.err


def test_gate_refusals(kdtr: Kdtr, small: Path, tmp_path: Path) -> None:
    host = ("--engine", "host")
    (tmp_path / "text.kdtr").write_text("not a bundle, and longer than a header: " * 9)

    assert refused(
        kdtr("gate", tmp_path / "no.kdtr", *host),
        f"BundleError: {tmp_path / 'no.kdtr'}: no such file; expected a KDTR file",
    )
    (tmp_path / "empty").mkdir()
    assert refused(
        kdtr("gate", tmp_path / "empty", *host),
        f"BundleError: {tmp_path / 'empty'} holds no *.kdtr; expected golden bundles, as `kdtr "
        "golden` writes them, or the word built-in for those that kdtr brings along",
    )
    assert kdtr("gate", tmp_path / "text.kdtr", *host).code == 2
    assert refused(
        kdtr("gate", small, *host, "--case", "z"),
        "CaseError: no case z; the bundles have y, ar, drafted, from-root",
    )
    assert refused(
        kdtr("gate", small, *host, "--until", "round7"),
        "CaseError: no case has a point 'round7'; the points are chunk0, round0, round1",
    )
    assert refused(
        kdtr("gate", small, *host, "--until", "round1", "--case", "from-root"),
        "CaseError: no selected case has a point 'round1'; the points are round0",
    )
    assert refused(
        kdtr("gate", small, *host, "--engine-option", "page_size"),
        "EngineError: --engine-option 'page_size'; expected KEY=VALUE",
    )
    assert refused(
        kdtr("gate", small, *host, "--engine-option", "page size=3"),
        "EngineError: --engine-option 'page size=3'; expected KEY=VALUE",
    )
    assert refused(
        kdtr("gate", small, *host, "--engine-option", "page_size=-1"),
        "EngineError: page_size = -1; expected at least 1",
    )
    assert kdtr("gate", small, "--engine", "hots").err.startswith(
        "kdtr: EngineError: no engine is registered as 'hots' (registered: "
    )


def test_options_are_python_literals_or_texts(kdtr: Kdtr, small: Path) -> None:
    words = ("--engine-option", "page_size=2", "--engine-option", "summation=blas", "--case", "ar")

    assert 0 == kdtr("gate", small, "--engine", "host", *words).code
    assert (
        "page_size = '2'"
        in kdtr("gate", small, "--engine", "host", "--engine-option", "page_size='2'").err
    )


MINE = """
from kdtr.conformance import load_engine


def make_engine(fault=False):
    engine = load_engine("host")
    if fault:
        engine._kernels.argmax = lambda logits: logits.argmax(-1) + 1
    return engine
"""


def test_an_engine_of_the_current_directory_and_the_line_that_shows_its_fault_again(
    small: Path, tmp_path: Path
) -> None:
    """From a shell whose PATH does not lead to kdtr, as after `.venv/bin/kdtr gate`."""
    (tmp_path / "my_engine.py").write_text(MINE)
    shutil.copy(small, tmp_path / "small.kdtr")
    kdtr = str(Path(sys.executable).with_name("kdtr"))
    command = [kdtr, "gate", "small.kdtr", "--case", "y", "--engine"]
    environment = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1"}

    def shown(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    honest = shown([*command, "my_engine:make_engine"])
    faulty = shown([*command, "my_engine:make_engine", "--engine-option", "fault=True"])
    lines = [line for line in faulty.stdout.splitlines() if line.startswith("  again ")]
    again = shown(["sh", "-c", lines[0].removeprefix("  again ")])

    assert (0, 1, 1) == (honest.returncode, faulty.returncode, again.returncode), again.stderr
    assert lines[0] in again.stdout


def test_ctrl_c_while_recording(
    kdtr: Kdtr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kdtr.conformance import golden

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(golden, "record_case", interrupted)

    run = kdtr("golden", "--tiny", "--out", tmp_path / "x.kdtr", "--prompt", "1", "--decode", "1")

    assert (130, "", "kdtr: interrupted\n") == (run.code, run.out, run.err)
    assert [] == [*tmp_path.iterdir()]


def test_ctrl_c_while_judging(kdtr: Kdtr, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile_engines, "NEXT", [Hostile({"verify": pressing_ctrl_c()})])

    run = kdtr("gate", small, "--engine", "hostile_engines:make_engine")

    where = "bundle.kdtr: ar / stepwise / round0: verify(), 0 s after it was called"
    assert (130, "", f"kdtr: interrupted at {where}\n") == (run.code, run.out, run.err)


# golden

TINY = ("golden", "--tiny")
PROMPT = ("--prompt", "1,2,3")
LAST = ModelConfig.tiny().vocab_size - 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--out", "x"], "one of the arguments --tiny --checkpoint --corpus is required"),
        (
            ["--tiny", "--checkpoint", "d", "--out", "x"],
            "argument --checkpoint: not allowed with argument --tiny",
        ),
        (["--tiny"], "the following arguments are required: --out"),
        (
            ["--tiny", "--out", "x", "--decode", "many"],
            "argument --decode: invalid int value: 'many'",
        ),
    ],
)
def test_golden_misused(kdtr: Kdtr, words: list[str], text: str) -> None:
    assert misused(kdtr("golden", *words), text)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--decode", "2"], "--tree and --decode need a prompt; give --prompt IDS"),
        (["--tree", "-1,0"], "--tree and --decode need a prompt; give --prompt IDS"),
        (["--prompt", "1,2"], "--prompt 1,2 has no rounds; give --tree or --decode N"),
        (
            ["--prompt", "1,2", "--decode", "-1"],
            "--decode -1; expected 1..100000 rounds",
        ),
        (
            [*PROMPT, "--tree", "-1,0", "--decode", "0"],
            "--decode 0; expected 1..100000 rounds",
        ),
        (
            ["--prompt", "1;2", "--decode", "1"],
            "--prompt '1;2'; expected integers separated by commas",
        ),
        (["--prompt", "", "--decode", "1"], "--prompt ''; expected integers separated by commas"),
        ([*PROMPT, "--tree", "-1,x"], "--tree '-1,x'; expected integers separated by commas"),
        ([*PROMPT, "--tree=-1,0:a"], "--tree 'a'; expected integers separated by commas"),
        (
            [*PROMPT, "--tree", "-1,0,0,2:0,1,3"],
            "case prompt0-trees, round0: path = (0, 1, 3) does not follow parents = (-1, 0, 0, 2) "
            "at node 3; expected root, child, grandchild, ...",
        ),
        (
            [*PROMPT, "--tree", "-1,0", "--tree", "-1,0:1"],
            "case prompt0-trees, round1: path = (1,) does not follow parents = (-1, 0) at node 1; "
            "expected root, child, grandchild, ...",
        ),
        (
            [*PROMPT, "--tree", "-1,0:0,5"],
            "case prompt0-trees, round0: path = (0, 5) does not follow parents = (-1, 0) at node "
            "5; expected root, child, grandchild, ...",
        ),
        (
            [*PROMPT, "--tree", "-1,2,0"],
            "case prompt0-trees, round0: parents[1] = 2, but a parent precedes its child; "
            "expected parents[1] = 0",
        ),
        (
            [*PROMPT, "--decode", "1534"],
            "case prompt0-ar may need 1537 slots; expected at most max_position_embeddings = 1536",
        ),
    ],
    ids=map(str, range(14)),
)
def test_golden_refusals(kdtr: Kdtr, tmp_path: Path, words: list[str], text: str) -> None:
    run = kdtr(*TINY, "--out", tmp_path / "x.kdtr", *words)

    assert refused(run, f"CaseError: {text}")
    assert [] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("token", [LAST + 1, -1, 10**20])
def test_a_prompt_outside_of_the_vocabulary(kdtr: Kdtr, tmp_path: Path, token: int) -> None:
    run = kdtr(*TINY, "--out", tmp_path / "x", f"--prompt=0,{token}", "--decode", "1")

    assert refused(run, f"CaseError: case prompt0-ar, chunk0: token {token}; expected 0..{LAST}")
    assert [] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("joined", [True, False])
def test_a_tree_may_follow_its_option_as_a_word(kdtr: Kdtr, tmp_path: Path, joined: bool) -> None:
    """As the help writes it, though the value begins with a dash."""
    tree = ["--tree=-1,0,0,2:0,2,3"] if joined else ["--tree", "-1,0,0,2:0,2,3"]

    run = kdtr(*TINY, *PROMPT, *tree, "--out", tmp_path / "x.kdtr")

    assert 0 == run.code, run.err
    bundle = GoldenBundle.open(tmp_path / "x.kdtr")
    assert (-1, 0, 0, 2) == bundle.cases[0].inputs.rounds[0].tree.parents
    bundle.close()


def test_a_checkpoint_needs_cases(kdtr: Kdtr, checkpoints: Path, tmp_path: Path) -> None:
    run = kdtr("golden", "--checkpoint", checkpoints / "v01-qlora-g1", "--out", tmp_path / "x")

    assert refused(
        run,
        "CaseError: no cases for the checkpoint; give --prompt with --tree or --decode, or --cases",
    )


def test_no_checkpoint(kdtr: Kdtr, tmp_path: Path) -> None:
    run = kdtr("golden", "--checkpoint", tmp_path / "no", "--out", tmp_path / "x", *PROMPT)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: CheckpointError: {tmp_path / 'no'}")


# --cases


@pytest.mark.parametrize(
    ("entries", "text"),
    [
        (
            "{",
            "{path}: Expecting property name enclosed in double quotes: line 1 column 2 (char 1);"
            " expected a JSON list of cases",
        ),
        ({}, "{path}: a dict; expected a JSON list of cases"),
        ("5", "{path}: a int; expected a JSON list of cases"),
        ([5], "{path}: case 0 is 5; expected an object"),
        (
            [{"alias": "a", "rouns": []}],
            "{path}: case 0 has the unknown key rouns; expected some of alias, chunks, root, "
            "rounds, rules, why",
        ),
        ([{}], "{path}: case 0 lacks the keys alias, rounds; expected alias and rounds"),
        (
            [{"alias": 5, "root": 1, "rounds": []}],
            "{path}: case 0, alias is 5; expected a text",
        ),
        (
            [{"alias": "a", "why": ["x"], "root": 1, "rounds": []}],
            "{path}: case 0, why is ['x']; expected a text",
        ),
        (
            [{"alias": "a", "rules": ["ACC-1", "ACC-9"], "root": 1, "rounds": []}],
            "{path}: case 0, rules names 'ACC-9'; expected ids of contract/RULES.md",
        ),
        (
            [{"alias": "a", "rules": "ACC-1", "root": 1, "rounds": []}],
            "{path}: case 0, rules is 'ACC-1'; expected a list",
        ),
        (
            [{"alias": "a", "rules": [["ACC-1"]], "root": 1, "rounds": []}],
            "{path}: case 0, rules names ['ACC-1']; expected ids of contract/RULES.md",
        ),
        (
            [{"alias": "a b", "root": 1, "rounds": [{"parents": [-1]}]}],
            "{path}: case 0: alias = 'a b'; expected letters, digits and dashes",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": []}],
            "{path}: case 0: case a has no rounds; expected at least one",
        ),
        (
            [{"alias": "a", "rounds": [{"parents": [-1]}]}],
            "{path}: case 0: case a: 0 prompt chunks and root = None; expected a prompt or a root, "
            "and not both",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": 5}],
            "{path}: case 0, rounds is 5; expected a list",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [7]}],
            "{path}: case 0, round0 is 7; expected an object with parents",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"path": [0]}]}],
            "{path}: case 0, round0 is {'path': [0]}; expected an object with parents",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1], "tree": 1}]}],
            "{path}: case 0, round0 has parents, tree; expected parents with path or tokens",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1, 0], "tokens": [1]}]}],
            "{path}: case 0, round0: the tree has 1 tokens and 2 parents; expected one parent "
            "per token",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1, 0], "path": ["a"]}]}],
            "{path}: case 0, round0, path has 'a' at index 0; expected integers",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1, 0], "path": [0, 1.0]}]}],
            "{path}: case 0, round0, path has 1.0 at index 1; expected integers",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": None}]}],
            "{path}: case 0, round0, parents is None; expected a list",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1], "path": []}]}],
            "case a, round0: the path is empty; expected at least the root, node 0",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1, 0], "tokens": [2, 3]}]}],
            "case a, round0: the tree's root is token 2, the model's is 1; give that one, or "
            "plant the tree by parents and path",
        ),
        (
            [{"alias": a, "root": 1, "rounds": [{"parents": [-1]}]} for a in ("b", "b")],
            "two cases are called b; expected a name for each",
        ),
        (
            [{"alias": "a", "root": LAST + 1, "rounds": [{"parents": [-1]}]}],
            f"case a, root: token {LAST + 1}; expected 0..{LAST}",
        ),
        (
            [{"alias": "a", "root": 1, "rounds": [{"parents": [-1, 0], "tokens": [1, 999]}]}],
            f"case a, round0: token 999; expected 0..{LAST}",
        ),
    ],
    ids=map(str, range(27)),
)
def test_cases_refused(
    kdtr: Kdtr, tmp_path: Path, cases_file: CasesFile, entries: Any, text: str
) -> None:
    path = cases_file(entries)

    run = kdtr(*TINY, "--cases", path, "--out", tmp_path / "x.kdtr")

    assert refused(run, f"CaseError: {text.replace('{path}', str(path))}")
    assert [path] == [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("chunks", "text"),
    [
        ("ab", "{path}: case 0, chunks is 'ab'; expected a list"),
        ([5], "{path}: case 0, chunk0 is 5; expected a list"),
        ([[1], ["a"]], "{path}: case 0, chunk1 has 'a' at index 0; expected integers"),
        ([[1.5]], "{path}: case 0, chunk0 has 1.5 at index 0; expected integers"),
        ([[0, None]], "{path}: case 0, chunk0 has None at index 1; expected integers"),
        ([[True]], "{path}: case 0, chunk0 has True at index 0; expected integers"),
        ([[[1]]], "{path}: case 0, chunk0 has [1] at index 0; expected integers"),
        ([[-1]], f"case a, chunk0: token -1; expected 0..{LAST}"),
    ],
    ids=map(str, range(8)),
)
def test_prompts_of_no_tokens(
    kdtr: Kdtr, tmp_path: Path, cases_file: CasesFile, chunks: Any, text: str
) -> None:
    path = cases_file([{"alias": "a", "chunks": chunks, "rounds": [{"parents": [-1]}]}])

    run = kdtr(*TINY, "--cases", path, "--out", tmp_path / "x.kdtr")

    assert refused(run, f"CaseError: {text.replace('{path}', str(path))}")
    assert [path] == [*tmp_path.iterdir()]


@pytest.mark.parametrize("root", ["x", 1.5, -1, LAST + 1, [1]])
def test_roots_of_no_token(kdtr: Kdtr, tmp_path: Path, cases_file: CasesFile, root: Any) -> None:
    path = cases_file([{"alias": "a", "root": root, "rounds": [{"parents": [-1]}]}])

    run = kdtr(*TINY, "--cases", path, "--out", tmp_path / "x.kdtr")

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith("kdtr: ")
    assert 1 == run.err.count("\n")


def test_no_cases_file(kdtr: Kdtr, tmp_path: Path) -> None:
    path = tmp_path / "no.json"

    run = kdtr(*TINY, "--cases", path, "--out", tmp_path / "x.kdtr")

    assert refused(
        run,
        f"CaseError: {path}: No such file or directory; expected a JSON list of cases",
    )


def test_cases_beside_a_prompt(kdtr: Kdtr, tmp_path: Path, cases_file: CasesFile) -> None:
    path = cases_file(
        [
            {
                "alias": "mine",
                "why": "because",
                "rules": ["ACC-1"],
                "chunks": [[1, 2], [3]],
                "rounds": [{"parents": [-1, 0, 0], "path": [0, 2]}, {"parents": [-1, 0]}],
            }
        ]
    )

    run = kdtr(*TINY, "--cases", path, *PROMPT, "--decode", "1", "--out", tmp_path / "x.kdtr")

    assert 0 == run.code, run.err
    bundle = GoldenBundle.open(tmp_path / "x.kdtr")
    mine, ar = (case.inputs for case in bundle.cases)
    assert ("mine", "because", ("ACC-1",)) == (mine.alias, mine.why, mine.rules)
    assert ((1, 2), (3,)) == mine.chunks
    assert "mine: 2 chunks, 2 rounds, 3 tokens accepted\n" in run.err
    assert "prompt0-ar" == ar.alias
    bundle.close()


# --out

QUICK = (*TINY, "--prompt", "1,2", "--decode", "1")


def test_the_folder_is_made(kdtr: Kdtr, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "x.kdtr"

    run = kdtr(*QUICK, "--out", out)

    assert 0 == run.code
    assert run.out.endswith(f"  {out}\n")
    assert run.err.startswith("prompt0-ar: 1 chunk, 1 round, 1 token accepted\nrecorded in ")
    assert [out] == [*out.parent.iterdir()]


def test_out_is_a_directory(kdtr: Kdtr, tmp_path: Path) -> None:
    assert refused(
        kdtr(*QUICK, "--out", tmp_path),
        f"CaseError: --out {tmp_path} is a directory; expected the file to write",
    )


def test_out_is_below_a_file(kdtr: Kdtr, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "x.kdtr"

    run = kdtr(*QUICK, "--out", out)

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith(f"kdtr: CaseError: --out: {out.parent}: ")
    assert run.err.endswith("; expected a place to write to\n")
    assert 1 == run.err.count(str(out.parent))


def test_out_cannot_be_written(kdtr: Kdtr) -> None:
    """No user can write into /proc, root included."""
    run = kdtr(*QUICK, "--out", "/proc/kdtr-test.kdtr")

    assert (2, "") == (run.code, run.out)
    assert run.err.startswith("kdtr: BundleError: /proc/kdtr-test.kdtr: cannot be written: ")


def test_a_failure_leaves_the_earlier_bundle(
    kdtr: Kdtr, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.kdtr"
    out.write_bytes(b"earlier")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    run = kdtr(*QUICK, "--out", out)

    assert refused(run, f"BundleError: {out}: cannot be written: No space left on device")
    assert b"earlier" == out.read_bytes()
    assert [out] == [*tmp_path.iterdir()]


def test_the_words_come_from_the_command_line_by_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kdtr", "gate", "no.kdtr", "--engine", "host"])

    assert 2 == main()
    assert "no.kdtr: no such file" in capsys.readouterr().err


def test_what_cannot_be_read_is_no_fault_of_the_output(
    kdtr: Kdtr, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("kdtr.conformance.gate.GoldenBundle.open", failing)

    run = kdtr("gate", small, "--engine", "host")

    assert refused(run, "OSError: [Errno 5] Input/output error")


def test_a_bundle_without_permission_is_named(
    kdtr: Kdtr, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("kdtr.conformance.gate.GoldenBundle.open", denied)

    run = kdtr("gate", small, "--engine", "host")

    assert refused(run, f"PermissionError: [Errno 13] Permission denied: '{small}'")


def test_an_output_that_cannot_be_written_is_said_so(small: Path) -> None:
    command = Path(sys.executable).with_name("kdtr")

    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [command, "inspect", small], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )

    assert 2 == run.returncode
    assert "kdtr: cannot write the output: No space left on device\n" == run.stderr


@pytest.mark.parametrize("name", ["config.json", "weights.safetensors"])
def test_golden_does_not_replace_what_it_reads(kdtr: Kdtr, tmp_path: Path, name: str) -> None:
    source = CHECKPOINTS / "v12-qlora-g2-wide"
    held = (source / name).read_bytes()
    copy = tmp_path / "checkpoint"
    shutil.copytree(source, copy)

    run = kdtr(
        *("golden", "--checkpoint", copy, "--prompt", "1,2", "--decode", "1"),
        *("--out", copy / name),
    )

    assert 2 == run.code
    assert f"is {copy / name}, which is read; expected another file" in run.err
    assert held == (copy / name).read_bytes()


def test_golden_replaces_no_link_and_no_device(kdtr: Kdtr, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "pipe")

    for name in ("link", "pipe"):
        run = kdtr("golden", "--tiny", "--out", tmp_path / name)

        assert (2, f"kdtr: CaseError: --out {tmp_path / name} is no plain file; ") == (
            run.code,
            run.err.partition("expected")[0],
        )


def test_cases_from_a_pipe_are_refused(kdtr: Kdtr, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    run = kdtr("golden", "--tiny", "--cases", tmp_path / "pipe", "--out", tmp_path / "x")

    assert 2 == run.code
    assert "pipe is no plain file; expected a JSON list of cases" in run.err
