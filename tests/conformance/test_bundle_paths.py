"""Bundles by file, by folder, and the corpus that kdtr brings along."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kdtr.conformance.bundle_paths import bundle_paths, by_name
from kdtr.contract import BundleError, CaseError


def test_a_file_is_taken_as_it_is_and_a_folder_by_name(tmp_path: Path) -> None:
    for name in ("b.kdtr", "a.kdtr", "SHA256SUMS"):
        (tmp_path / name).touch()

    found = bundle_paths(["no/such.kdtr", str(tmp_path)])

    assert ["no/such.kdtr", str(tmp_path / "a.kdtr"), str(tmp_path / "b.kdtr")] == found


def test_the_corpus_that_comes_with_kdtr(corpus: Path) -> None:
    expected = sorted(path.name for path in corpus.glob("*.kdtr"))

    assert expected == [Path(path).name for path in bundle_paths(["built-in"])]


def test_a_folder_of_the_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "built-in").mkdir()
    (tmp_path / "built-in" / "mine.kdtr").touch()

    assert ["built-in/mine.kdtr"] == bundle_paths(["built-in"])


def test_a_folder_without_bundles_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError) as refusal:
        bundle_paths([str(tmp_path)])

    assert str(refusal.value) == (
        f"{tmp_path} holds no *.kdtr; expected golden bundles, as `kdtr golden` writes them, or "
        "the word built-in for those that kdtr brings along"
    )


def test_an_empty_name_is_not_the_current_folder() -> None:
    """`kdtr gate "$CORPUS"`, where the variable is not set."""
    with pytest.raises(
        BundleError, match=r"^an empty name for a golden bundle; expected a file, or a folder$"
    ):
        bundle_paths([""])


def test_a_word_that_is_no_file_is_told_which_words_there_are() -> None:
    with pytest.raises(
        BundleError,
        match=r"^buildin: no such file or folder; expected golden bundles \(\*\.kdtr\), a folder "
        "of them, or the word built-in for those that kdtr brings along$",
    ):
        bundle_paths(["buildin"])


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    here, there = tmp_path / "a" / "x.kdtr", tmp_path / "b" / "x.kdtr"

    assert {"x.kdtr": here} == by_name([here, str(here)])
    with pytest.raises(
        CaseError,
        match=rf"^{re.escape(str(here))} and {re.escape(str(there))} have one name, by which cases "
        "are known here; give one of them$",
    ):
        by_name([here, there])
