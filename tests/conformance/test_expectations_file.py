"""What an expectations file may say; everything else is refused with file, entry and line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest

from kdtr.conformance.expectations import Expectations, Kind
from kdtr.conformance.expectations_file import ExpectationsError, read_expectations
from kdtr.conformance.mutants import MUTANTS

Read = Callable[..., Expectations]
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "docs/examples/kdtr-expectations.toml"
GOOD = """
[[expect]]
id = "a"
kind = "fails"
case = "y-*"
reason = "known"
"""
TODAY = date(2026, 11, 30)


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """read(text): the file with a head above the text, as `e.toml`."""
    monkeypatch.chdir(tmp_path)

    def read(text: str, head: str = "kdtr_expectations = 1\n") -> Expectations:
        Path("e.toml").write_text(head + text)
        return read_expectations("e.toml", today=TODAY)

    return read


def test_a_file_of_all_that_there_is(read: Read) -> None:
    found = read(
        """
max_near_ties = 4
[[expect]]
id = "limit"
kind = "not supported"
bundle = "tiny"
case = ["y-tree", "star"]
mode = "round"
reason = " later "
link = "https://example.org/1"
expires = 2027-01-31
[mustpass]
corpus = "%s"
cases = ["tiny/ar", "base/t*/stepwise"]
"""
        % ("0" * 64)
    )

    (entry,) = found.entries
    assert ("limit", Kind.NOT_SUPPORTED, "later") == (entry.id, entry.kind, entry.reason)
    assert {"bundle": ("tiny",), "case": ("y-tree", "star"), "mode": ("round",)} == entry.select
    assert ("https://example.org/1", date(2027, 1, 31)) == (entry.link, entry.expires)
    assert {"max_near_ties": 4} == found.ceilings
    assert found.must_pass is not None
    assert (("tiny", "ar", "*"), ("base", "t*", "stepwise")) == found.must_pass.cases


def test_the_example_of_the_documentation_is_one() -> None:
    found = read_expectations(EXAMPLE, today=date(2026, 1, 1))

    assert {*Kind} == {entry.kind for entry in found.entries}
    assert found.must_pass is not None


def test_the_examples_must_pass_the_corpus_that_ships() -> None:
    sums = (ROOT / "conformance/corpus/SHA256SUMS").read_bytes()
    digest = hashlib.sha256(sums).hexdigest()

    listed = read_expectations(EXAMPLE, today=date(2026, 1, 1)).must_pass
    assert listed is not None
    assert digest == listed.corpus
    page = (ROOT / "docs/expectations.md").read_text(encoding="utf-8")
    assert [digest] == re.findall(r'^corpus = "(\w+)"', page, re.M)


def entry(**changes: str) -> str:
    lines = {"id": '"a"', "kind": '"fails"', "case": '"y"', "reason": '"known"', **changes}
    return "[[expect]]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items() if value)


AT = "e.toml, entry 1 ('a') at line 2: "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (entry(why='"x"'), AT + "no key 'why'; expected id, kind, reason, link, expires, bundle"),
        (entry(reason=""), AT + "reason is missing; say why this is taken as it is"),
        (entry(reason='"  "'), AT + "reason = '  '; say why this is taken as it is"),
        (entry(id=""), "e.toml, entry 1 at line 2: id is missing; expected a text"),
        (entry(id='"a b"'), "an id is letters, digits, dots, dashes and underscores"),
        (
            entry(kind='"xfail"'),
            AT + "kind = 'xfail'; expected one of fails, raises, near tie, not supported",
        ),
        (entry(kind=""), AT + "kind is missing; expected one of fails, raises"),
        (
            entry(expires='"2027-01-31"'),
            AT + "expires = '2027-01-31'; expected a date without quotes, as 2027-03-31",
        ),
        (entry(expires="2027-01-31T10:00:00"), AT + "expires = datetime.datetime(2027, 1, 31"),
        (entry(case='""'), AT + "case = ''; expected a pattern such as \"y-*\", or a list"),
        (entry(case="[]"), AT + "case = []; expected a pattern"),
        (entry(case="3"), AT + "case = 3; expected a pattern"),
        (entry(case='["y", 3]'), AT + "case = ['y', 3]; expected a pattern"),
        (entry(case='"y[ab"'), AT + "case: pattern 'y[ab' opens a [ that it does not close"),
        (entry(mode='"stepwize"'), AT + "mode: 'stepwize' fits none; expected one of stepwise"),
        (entry(rule='"POS-99"'), AT + "rule: 'POS-99' fits none; expected one of "),
        (
            entry(stage='"postions"'),
            AT + "stage: 'postions' fits none; expected a stage of contract/stages.py or a check "
            "of a script, such as positions, cache_positions or tokens, or a pattern",
        ),
        (entry(stage='["mask", "cache_c_kw"]'), "'cache_c_kw' fits none; expected a stage of"),
        (entry(stage='"cache_c_kw"'), "such as cache_c_kv, "),
        (entry(stage='"second verfy"'), "such as second verify"),
        (entry(stage='"KDTR file without tensor"'), "such as KDTR file without a tensor"),
        (entry(stage='"zz-*"'), "stage: 'zz-*' fits none; expected a stage of contract/stages.py"),
        (entry(case=""), AT + "it selects everything; narrow it by bundle, case, mode, point"),
        (entry(case='"*"', mode='"**"'), AT + "it selects everything; narrow it by"),
        (
            entry(kind='"not supported"', stage='"mask"'),
            AT + "what is not supported has no stage; select by bundle, case or mode",
        ),
        (GOOD + GOOD, "e.toml, entry 2 ('a') at line 9: another entry has this id"),
        ("expect = 3", "e.toml: expect is no list of tables; write [[expect]] above each"),
        ("max_near_tie = 3", "e.toml: no key 'max_near_tie'; expected kdtr_expectations, max_near"),
        ("max_near_ties = -1", "e.toml: max_near_ties = -1; expected a number from 0"),
        ("max_near_ties = true", "e.toml: max_near_ties = True; expected a number from 0"),
        ("mustpass = 3", "e.toml, [mustpass]: 3; expected a table with corpus and cases"),
        ("[mustpass]\ncase = []", "e.toml, [mustpass]: no key 'case'; expected corpus or cases"),
        ("[mustpass]\ncases = ['a/b']", "e.toml, [mustpass]: corpus = None; expected the SHA-256"),
        (f"[mustpass]\ncorpus = '{'0' * 64}'", "e.toml, [mustpass]: cases = None; expected a list"),
        (
            f"[mustpass]\ncorpus = '{'0' * 64}'\ncases = ['ar']",
            'e.toml, [mustpass]: \'ar\' in cases; expected "BUNDLE/CASE" or "BUNDLE/CASE/MODE"',
        ),
        (
            f"[mustpass]\ncorpus = '{'0' * 64}'\ncases = ['a/b/c']",
            "e.toml, [mustpass]: 'a/b/c': 'c' fits none; expected one of stepwise",
        ),
        (
            f"max_near_ties = {'9' * 5000}\n",
            "e.toml: no TOML: Exceeds the limit (4300 digits) for ",
        ),
        (f"a = {'[' * 10**5}\n", "e.toml: nested too deep; expected a TOML table"),
        ("[[expect]\n", "e.toml: no TOML: Expected ']]' at the end of an array declaration (at "),
    ],
)
def test_everything_else_is_refused(read: Read, text: str, told: str) -> None:
    with pytest.raises(ExpectationsError) as refusal:
        read(text)

    assert told in str(refusal.value)


@pytest.mark.parametrize(
    "stage",
    sorted(
        {mutant.stage for mutant in MUTANTS.values()}
        | {"load", "open", "set_root", "answer", "close", "verify", "mas*", "KDTR file*"}
    ),
)
def test_every_stage_that_a_finding_may_name_is_one(read: Read, stage: str) -> None:
    """Mutants are a list of their own of where faults are seen first."""
    (entry_,) = read(entry(stage=f'"{stage}"')).entries

    assert (stage,) == entry_.select["stage"]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("", "e.toml: kdtr_expectations = None; expected 1, the version of the file's form"),
        ("kdtr_expectations = 2\n", "e.toml: kdtr_expectations = 2; expected 1"),
    ],
)
def test_another_version_is_refused(read: Read, head: str, told: str) -> None:
    with pytest.raises(ExpectationsError) as refusal:
        read(GOOD, head)

    assert told in str(refusal.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ExpectationsError, match=r"none\.toml: No such file or directory"):
        read_expectations(tmp_path / "none.toml")


def test_the_line_is_left_out_where_headers_and_entries_do_not_agree(read: Read) -> None:
    with pytest.raises(ExpectationsError) as refusal:
        read('expect = [{id = "a", kind = "fails", case = "y", reason = ""}]')

    assert str(refusal.value).startswith("e.toml, entry 1 ('a'): reason = ''; say why")
