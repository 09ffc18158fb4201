"""Files are written whole or not at all, and what could not be written is refused before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdtr.conformance.report_files import whole_files
from kdtr.conformance.report_files.whole_files import check_targets, write_whole
from kdtr.contract import CaseError


def refusal(targets: dict[str, Path], inputs: list[str] | None = None) -> str:
    with pytest.raises(CaseError) as caught:
        check_targets(targets, inputs or [])
    return str(caught.value)


def test_what_could_not_be_written_is_refused_by_name(tmp_path: Path) -> None:
    page, bundle = tmp_path / "r.html", tmp_path / "b.kdtr"
    bundle.touch()
    (tmp_path / "folder").mkdir()

    assert f"--html {tmp_path / 'folder'} is a directory; expected the file to write" == refusal(
        {"--html": tmp_path / "folder"}
    )
    assert f"--html {bundle} is a bundle to read; expected another file" == refusal(
        {"--html": bundle}, [str(tmp_path / "folder" / ".." / "b.kdtr")]
    )
    assert f"--junit {page} is the file of --html too; expected one file for each" == refusal(
        {"--html": page, "--junit": page}
    )
    missing = tmp_path / "no" / "r.html"
    assert f"--html {missing}: no directory {missing.parent}; make it first" == refusal(
        {"--html": missing}
    )
    assert f"--html {os.devnull} is no regular file; expected a file to write" == refusal(
        {"--html": Path(os.devnull)}
    )
    assert {"folder", "b.kdtr"} == {path.name for path in tmp_path.iterdir()}


def test_a_directory_that_refuses_files_is_told_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)

    assert (
        f"--html {tmp_path / 'r.html'}: Read-only file system; expected a place to write to"
        == refusal({"--html": tmp_path / "r.html"})
    )


def test_a_check_leaves_nothing_and_keeps_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("earlier")

    check_targets({"--html": tmp_path / "r.html", "--junit": tmp_path / "r.xml"}, [])

    assert ["r.html"] == [path.name for path in tmp_path.iterdir()]
    assert "earlier" == (tmp_path / "r.html").read_text()


def test_all_files_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one meets a full disk: the first keeps what it was, and nothing else is left."""
    first, second = tmp_path / "r.html", tmp_path / "r.xml"
    first.write_text("earlier")
    synced: list[int] = []

    def full(number: int) -> None:
        synced.append(number)
        if len(synced) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, "fsync", full)

    with pytest.raises(CaseError, match=r"--junit .*r\.xml: No space left on device; expected"):
        write_whole({"--html": (first, b"new"), "--junit": (second, b"new")})

    assert ["r.html"] == [path.name for path in tmp_path.iterdir()]
    assert "earlier" == first.read_text()


def test_files_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("earlier")

    write_whole({"--html": (tmp_path / "r.html", b"new"), "--junit": (tmp_path / "x", b"too")})

    assert {"r.html": b"new", "x": b"too"} == {p.name: p.read_bytes() for p in tmp_path.iterdir()}
