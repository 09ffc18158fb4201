"""`kdtr campaign` on the command line: what it takes, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kdtr.conformance.cli import main
from kdtr.property_tests import campaign_cli

Capture = pytest.CaptureFixture[str]


def test_the_command_finds_the_verbs_by_their_entry_points(capsys: Capture) -> None:
    assert {"campaign", "campaign-report"} <= entry_points(group="kdtr.verbs").names
    with pytest.raises(SystemExit):
        main(["--help"])

    told = capsys.readouterr().out
    assert "hold an engine to the laws" in told
    assert "sum up what a campaign" in told


def test_the_verbs_alone_import_nothing_that_is_not_always_installed() -> None:
    """In a process of its own: here everything has been imported."""
    code = (
        "import sys; sys.argv = ['kdtr', '--version']\n"
        "from kdtr.conformance.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'hypothesis', 'pytest', 'pyarrow', 'ray', 'kdtr.property_tests.laws'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )

    told = subprocess.check_output([sys.executable, "-c", code], text=True)

    assert "[]" == told.splitlines()[-1]


@pytest.mark.parametrize("verb", ["campaign --engine reference --out X", "campaign-report X"])
def test_without_the_extra_the_verbs_name_it(
    verb: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"hypothesis", "pyarrow"}
    monkeypatch.setattr(
        campaign_cli, "find_spec", lambda name: None if name in absent else object()
    )

    assert 2 == main(verb.split())

    name = verb.split()[0]
    assert (
        f"kdtr: UnsupportedError: kdtr {name} needs hypothesis, pyarrow; install the extra: "
        "pip install 'kdtr[campaign]'\n" == capsys.readouterr().err
    )


def test_without_ray_the_option_names_its_extra(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)

    assert 2 == main(["campaign", "--engine", "reference", "--ray", "--out", str(tmp_path)])

    told = capsys.readouterr().err
    assert "UnsupportedError: --ray needs Ray" in told
    assert "install the extra: pip install 'kdtr[ray]'" in told


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "--out is missing; expected the directory for the results"),
        ("--out X --gpus-per-worker 1", "--gpus-per-worker is Ray's to give out; add --ray"),
        ("--out X --law no_law", "--law no_law: no such law; expected one of "),
        (
            "--out X --law cache_layouts_are_indistinguishable",
            "it takes two engines that nobody may tell apart: add --twin-option",
        ),
        ("--out X --law commit_moves_close_the_gaps", "it speaks of no engine; expected one of"),
        ("--unit-id no_law-00000", "--unit-id no_law-00000: no law no_law in this campaign"),
        ("--out X --engine-option 3", "--engine-option '3'; expected KEY=VALUE"),
    ],
)
def test_what_cannot_be_run_is_refused(
    words: str, text: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert 2 == main(["campaign", "--engine", "reference", *words.split()])

    assert text in capsys.readouterr().err
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--cases 0", "0; expected at least 1"),
        ("--unit-timeout 0", "0; expected more than 0 seconds"),
        ("--gpus-per-worker -1", "-1; expected 0 or more"),
        ("--workers two", "invalid _positive value: 'two'"),
    ],
)
def test_numbers_are_checked(words: str, text: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["campaign", "--engine", "reference", *words.split()])

    assert text in capsys.readouterr().err


def test_the_laws_of_twins_are_in_when_the_twin_is_named() -> None:
    from kdtr.property_tests.campaign_run import Request, law_names

    alone = law_names(Request("reference"))
    paired = law_names(Request("reference", twin_options=(("cache", "scratch"),)))

    assert {"cache_layouts_are_indistinguishable"} == set(paired) - set(alone)
    assert "commit_moves_close_the_gaps" not in paired
