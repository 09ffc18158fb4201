"""No rule without a law or a recorded case, and no law of a rule that there is not."""

from __future__ import annotations

import re
from pathlib import Path

from kdtr.conformance.file_cases import FILE_CASES
from kdtr.contract import rules
from kdtr.kdtr_format import Bundle
from kdtr.property_tests.laws import laws

CORPUS = Path(__file__).resolve().parents[2] / "conformance" / "corpus"
_ID = re.compile(r"\b[A-Z]{3,}-\d+\b")


def of_laws() -> set[str]:
    return {rule for law in laws().values() for rule in law.rules}


def of_cases() -> set[str]:
    found: set[str] = set()
    for path in CORPUS.glob("*.kdtr"):
        with Bundle.open(path) as bundle:
            for case in bundle.metadata["cases"]:
                found.update(case["rules"])
    return found


def of_files() -> set[str]:
    """Of the case `files`, which is written anew for every run."""
    return {rule for file in FILE_CASES for rule in file.rules}


def test_every_rule_has_a_law_or_a_case() -> None:
    uncovered = sorted(set(rules()) - of_laws() - of_cases() - of_files())

    assert [] == uncovered, f"no law and no case of the corpus cites {', '.join(uncovered)}"


def test_every_rule_that_a_law_cites_exists() -> None:
    cited = {
        law.name: set(_ID.findall((law.function.__doc__ or "").partition(":")[0]))
        for law in laws().values()
    }
    unknown = {
        name: sorted(ids - set(rules())) for name, ids in cited.items() if ids - set(rules())
    }

    assert {} == unknown


def test_every_law_of_an_engine_cites_a_rule() -> None:
    assert [] == [law.name for law in laws().values() if law.subject and not law.rules]


def test_every_rule_that_a_case_cites_exists() -> None:
    assert set() == of_cases() - set(rules())
