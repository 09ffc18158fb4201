"""The rule ids and their sentences, read from RULES.md: one source for people and reports."""

import re
from functools import cache
from importlib import resources

_RULE = re.compile(r"^- \*\*([A-Z]+(?:-[0-9]+)?)\*\* (.+)$", re.MULTILINE)
_VERSION = re.compile(r"^rules: ([0-9]+)$", re.MULTILINE)


@cache
def rules() -> dict[str, str]:
    """Every rule id with its sentence, in the order of RULES.md."""
    found = _RULE.findall(_page())
    assert len(found) == len(dict(found)), "RULES.md defines a rule twice"
    return dict(found)


@cache
def rules_version() -> int:
    """The number under RULES.md's Version heading: it changes when a rule changes its meaning."""
    match = _VERSION.search(_page())
    assert match, "RULES.md has no version"
    return int(match.group(1))


def rule(rule_id: str) -> str:
    """The sentence of one rule.

    >>> rule("POS-1")
    'Node i is at position L + depth(i), so the root is at L.'
    """
    return rules()[rule_id]


def _page() -> str:
    return resources.files(__package__).joinpath("RULES.md").read_text(encoding="utf-8")
