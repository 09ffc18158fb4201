"""The rules: unique, complete sentences, and the ones that the code cites exist."""

import re
from pathlib import Path

import pytest

import kdtr.contract
from kdtr.contract import rule, rules, rules_version

ROOM = Path(kdtr.contract.__file__).parent
PAGE = (ROOM / "RULES.md").read_text(encoding="utf-8")
# An id in running text: of a family that RULES.md has, so that SM-90 or UTF-8 is none.
FAMILIES = sorted({rule_id.split("-")[0] for rule_id in rules()} - {"LOSSLESS"})
CITED = re.compile(rf"\b(?:{'|'.join(FAMILIES)})-\d+\b")


def test_every_rule_of_the_page_is_found_once():
    bullets = re.findall(r"^- \*\*(.+?)\*\*", PAGE, re.MULTILINE)

    assert bullets == list(rules())
    assert len(set(bullets)) == len(bullets)
    assert 47 == len(bullets)


def test_no_two_rules_say_the_same():
    assert len(set(rules().values())) == len(rules())


@pytest.mark.parametrize("rule_id", rules())
def test_a_rule_is_one_sentence(rule_id):
    sentence = rule(rule_id)

    assert sentence == sentence.strip()
    assert sentence.endswith(".")
    assert not sentence.endswith("..")


def test_ids_count_up_within_their_family():
    for family in FAMILIES:
        numbers = [int(i.split("-")[1]) for i in rules() if i.split("-")[0] == family]

        assert list(range(1, len(numbers) + 1)) == numbers, family


def test_the_version_is_that_of_the_page():
    assert "rules: 1" in PAGE.splitlines()
    assert 1 == rules_version()


def test_an_unknown_rule_is_a_key_error():
    with pytest.raises(KeyError):
        rule("MASK-9")


@pytest.mark.parametrize("room", ["contract", "reference"])
def test_every_rule_that_the_code_cites_exists(room):
    files = sorted((ROOM.parent / room).glob("*.py"))
    cited = {id_ for file in files for id_ in CITED.findall(file.read_text(encoding="utf-8"))}

    assert cited
    assert set() == cited - set(rules())
