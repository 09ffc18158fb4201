"""`kdtr adopt`: a bundle becomes part of a corpus once, recorded anew, and stays checked."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kdtr.conformance import GoldenBundle
from kdtr.conformance.case import CasePlan, Planted
from kdtr.conformance.cli import main
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.golden_adopt import adopt
from kdtr.conformance.golden_again import adopted_bundles, record_again
from kdtr.conformance.golden_corpus import SUMS, read_sums
from kdtr.contract import BundleError, CaseError
from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.property_tests.strategies import SmallModel

MODEL = SmallModel()
Y_TREE = Planted((-1, 0, 0, 2), (0, 2, 3))
CUT = Planted((-1, 0, 1), (0, 1, 2), max_emitted=2)


def record(path: Path, *rounds: Planted, alias: str = "y", chunk: tuple[int, ...] = (3, 1)) -> Path:
    plan = CasePlan(alias, "a tree", ("COMMIT-1",), rounds or (Y_TREE,), (chunk,))
    record_bundle(path, {"name": "m"}, MODEL.config, MODEL.tensors(), [plan], alignment=64)
    return path


def altered(path: Path, out: Path, name: str) -> Path:
    """The bundle with another number in the tensor."""
    with Bundle.open(path) as bundle:
        tensors = {one: np.array(bundle[one]) for one in bundle.names()}
        metadata = dict(bundle.metadata)
    tensors[name] = tensors[name] + 0.5
    write_bundle(out, tensors, metadata)
    return out


def test_a_recording_of_a_recording_is_the_same_bytes(tmp_path: Path) -> None:
    path = record(tmp_path / "a.kdtr", Y_TREE, CUT)

    record_again(path, tmp_path / "b.kdtr")

    assert path.read_bytes() == (tmp_path / "b.kdtr").read_bytes()


def test_an_adopted_bundle_is_in_the_corpus_with_its_sum(tmp_path: Path) -> None:
    path = record(tmp_path / "failed.kdtr")

    adopted = adopt(path, tmp_path / "corpus")

    written = tmp_path / "corpus" / "adopted-failed.kdtr"
    assert written == adopted.path
    assert [written] == adopted_bundles(tmp_path / "corpus")
    sha256 = hashlib.sha256(written.read_bytes()).hexdigest()
    assert {"adopted-failed.kdtr": sha256} == read_sums(tmp_path / "corpus")
    assert (("y",), (), False) == (adopted.cases, adopted.known, adopted.differs)


def test_other_sums_stay(tmp_path: Path) -> None:
    (tmp_path / SUMS).write_text("0" * 64 + "  base.kdtr\n")

    adopt(record(tmp_path / "x.kdtr"), tmp_path, "why-not")

    assert ["adopted-why-not.kdtr", "base.kdtr"] == list(read_sums(tmp_path))


def test_a_case_is_adopted_once(tmp_path: Path) -> None:
    path = record(tmp_path / "a.kdtr")
    adopt(path, tmp_path / "corpus")

    with pytest.raises(CaseError, match=r"adopted-a\.kdtr exists; give another --name"):
        adopt(path, tmp_path / "corpus")
    with pytest.raises(CaseError, match=r"every case of it is in adopted-a\.kdtr already"):
        adopt(path, tmp_path / "corpus", "b")
    assert 1 == len(adopted_bundles(tmp_path / "corpus"))


def test_only_new_cases_are_adopted(tmp_path: Path) -> None:
    plans = [
        CasePlan(alias, "a tree", ("COMMIT-1",), (Y_TREE,), (chunk,))
        for alias, chunk in (("one", (3, 1)), ("two", (3, 2)))
    ]
    both = tmp_path / "both.kdtr"
    record_bundle(both, {"name": "m"}, MODEL.config, MODEL.tensors(), plans)
    adopt(record(tmp_path / "one.kdtr", alias="one"), tmp_path / "corpus")

    adopted = adopt(both, tmp_path / "corpus")

    assert (("two",), ("one",)) == (adopted.cases, adopted.known)
    assert ["two"] == [c.inputs.alias for c in GoldenBundle.open(adopted.path).cases]


def test_expectations_are_those_of_today_and_a_difference_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = record(tmp_path / "a.kdtr")
    odd = altered(path, tmp_path / "odd.kdtr", "expect/y/round0/logits")

    assert 0 == main(["adopt", str(odd), "--into", str(tmp_path / "corpus")])

    assert path.read_bytes() == (tmp_path / "corpus" / "adopted-odd.kdtr").read_bytes()
    out = capsys.readouterr().out
    assert "the file held other bytes: its expectations are not those of this version" in out


@pytest.mark.parametrize("name", ["", "a/b", "../a", "ä", "a b"])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    path = record(tmp_path / "a.kdtr")

    with pytest.raises(CaseError, match="expected ASCII letters, digits, - and _"):
        adopt(path, tmp_path / "corpus", name)

    assert not (tmp_path / "corpus").exists()


def test_what_is_no_golden_bundle_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.kdtr").write_bytes(b"KDTR")

    assert 2 == main(["adopt", str(tmp_path / "a.kdtr"), "--into", str(tmp_path / "corpus")])

    assert "BundleError" in capsys.readouterr().err
    assert [] == list((tmp_path / "corpus").iterdir())


def test_foreign_lines_of_the_sums_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / SUMS).write_text("# a comment\n")

    with pytest.raises(BundleError, match=r"line 1: .*expected a SHA-256, two blanks and a name"):
        adopt(record(tmp_path / "a.kdtr"), tmp_path, "b")

    assert [] == adopted_bundles(tmp_path)
    assert "# a comment\n" == (tmp_path / SUMS).read_text()


def test_adoptions_at_once_lose_no_line(tmp_path: Path) -> None:
    paths = [record(tmp_path / f"{i}.kdtr", chunk=(3, i)) for i in range(4)]
    corpus = tmp_path / "corpus"

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda path: adopt(path, corpus), paths))

    assert [f"adopted-{i}.kdtr" for i in range(4)] == list(read_sums(corpus))


def test_sums_that_cannot_be_written_leave_no_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(directory: Path, sums: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kdtr.conformance.golden_adopt.write_sums", full)

    with pytest.raises(OSError, match="No space left"):
        adopt(record(tmp_path / "a.kdtr"), tmp_path / "corpus")

    assert [] == adopted_bundles(tmp_path / "corpus")


def test_a_corpus_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus").write_text("")

    with pytest.raises(BundleError, match="expected a directory"):
        adopt(record(tmp_path / "a.kdtr"), tmp_path / "corpus")
