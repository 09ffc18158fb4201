"""A first expectations file from a run that failed: an entry per fault, without its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from kdtr.conformance.expectations import Kind
from kdtr.conformance.expectations_file import ExpectationsError
from kdtr.conformance.finding import Finding, Verdict
from kdtr.conformance.finding_groups import Group, grouped
from kdtr.conformance.plain_text import printable
from kdtr.conformance.xray_gate import XRAY

_HEAD = (
    "# What this engine is known to do wrong. The reasons are yours to give: an entry without one",
    "# is refused. Narrow what an entry selects, or remove it and mend the engine.",
    "kdtr_expectations = 1",
)


def draft(findings: Iterable[Finding]) -> str:
    """The file's text: every finding that is bad is selected by an entry, and nothing else is."""
    lines = [*_HEAD]
    bad = [finding for finding in findings if finding.verdict.is_bad]
    for number, group in enumerate(grouped(bad), start=1):
        lines += ["", *_entry(number, group)]
    return "\n".join(lines) + "\n"


def new_draft(path: str | None) -> Path | None:
    """Where to write. Raises ExpectationsError for a file that is there, before anything runs."""
    if path is None:
        return None
    if Path(path).exists():
        raise ExpectationsError(f"{path} is there already; name a new file for the draft")
    return Path(path).absolute()  # an engine may change the directory


def _entry(number: int, group: Group) -> Iterator[str]:
    first = group.first
    yield f"# {first.what_lines(80)[0][:200]}".translate({ord("\n"): " "})
    for hint in first.looks_like[:1]:
        yield f"# looks like {printable(hint)}"
    yield "[[expect]]"
    yield f"id = {_text(f'{number}-{_word(first.stage)}')}"
    kind = Kind.RAISES if first.verdict is Verdict.ERROR else Kind.FAILS
    yield f"kind = {_text(kind.value)}"
    places = [finding.place for finding in group.findings]
    yield f"bundle = {_texts(Path(place.bundle).name for place in places)}"
    yield f"case = {_texts(place.case for place in places)}"
    # An x-ray's place names a session; its mode, as that of its result, is x-ray.
    modes = (XRAY if place.bundle == XRAY else place.mode for place in places)
    yield f"mode = {_texts(modes)}"
    yield f"stage = {_texts(finding.stage for finding in group.findings)}"
    yield 'reason = ""'


def _word(stage: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in stage).strip("-")


def _texts(values: Iterable[str]) -> str:
    """A list of patterns that fit these texts alone."""
    patterns = (value.replace("[", "[[]") for value in dict.fromkeys(values))
    return f"[{', '.join(_text(pattern) for pattern in patterns)}]"


def _text(value: str) -> str:
    """A TOML string; JSON's escapes are TOML's too."""
    return json.dumps(value)
