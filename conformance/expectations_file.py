"""Reading an expectations file, and a refusal of what is none (docs/expectations.md).

Every refusal names the file and the entry with its line. What is not understood is never skipped:
an entry with a slip of the pen would excuse nothing, or too much.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from kdtr.conformance.drive import MODES
from kdtr.conformance.expectations import (
    CASE_FIELDS,
    CEILINGS,
    FINDING_FIELDS,
    Entry,
    Expectations,
    Kind,
    MustPass,
    Patterns,
)
from kdtr.conformance.file_cases import FILE_CASES
from kdtr.conformance.state_script import CHECK_NAMES, SCRIPT
from kdtr.conformance.xray_gate import XRAY
from kdtr.contract import STAGE, VERBS, KdtrError, rules

VERSION = 1
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SELECT = (*CASE_FIELDS, *FINDING_FIELDS)
_ENTRY_KEYS = ("id", "kind", "reason", "link", "expires", *_SELECT)
_TOP_KEYS = ("kdtr_expectations", *CEILINGS, "mustpass", "expect")
# What a finding calls its stage: one of the contract's, or what was asked when it went wrong.
_ASKED = (*VERBS, "load", "open", "answer", "close")
_STAGES = (*STAGE, *_ASKED, *CHECK_NAMES, *(file.name for file in FILE_CASES))
_MODES = (*(mode.name for mode in MODES), SCRIPT, XRAY, "load", "close")


class ExpectationsError(KdtrError):
    """An expectations file that cannot be read as one."""


def read_expectations(path: str | os.PathLike[str], *, today: date | None = None) -> Expectations:
    """Raises ExpectationsError. `today` is the day in UTC, unless told otherwise."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise ExpectationsError(f"{name}: {error.strerror or error}") from None
    except RecursionError:
        raise ExpectationsError(f"{name}: nested too deep; expected a TOML table") from None
    except ValueError as error:  # not UTF-8, not TOML, or an integer of more than 4300 digits
        raise ExpectationsError(f"{name}: no TOML: {error}") from None
    _known(name, found, _TOP_KEYS)
    if found.get("kdtr_expectations") != VERSION:
        raise ExpectationsError(
            f"{name}: kdtr_expectations = {found.get('kdtr_expectations')!r}; expected "
            f"{VERSION}, the version of the file's form"
        )
    ceilings = {key: _ceiling(name, key, found[key]) for key in CEILINGS if key in found}
    return Expectations(
        name,
        datetime.now(UTC).date() if today is None else today,
        _entries(name, found.get("expect", []), _lines(text)),
        _must_pass(f"{name}, [mustpass]", found["mustpass"]) if "mustpass" in found else None,
        ceilings,
    )


def _lines(text: str) -> list[int]:
    """Of the entries' headers, in order."""
    header = re.compile(r"\s*\[\[\s*expect\s*\]\]")
    return [n for n, line in enumerate(text.splitlines(), start=1) if header.match(line)]


def _entries(name: str, tables: object, lines: list[int]) -> tuple[Entry, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ExpectationsError(f"{name}: expect is no list of tables; write [[expect]] above each")
    entries: dict[str, Entry] = {}
    for number, table in enumerate(tables, start=1):
        at = f"{name}, entry {number}"
        if "id" in table:
            at += f" ({table['id']!r})"
        if len(lines) == len(tables):
            at += f" at line {lines[number - 1]}"
        entry = _entry(at, table)
        if entry.id in entries:
            raise ExpectationsError(f"{at}: another entry has this id; expected one of its own")
        entries[entry.id] = entry
    return tuple(entries.values())


def _entry(at: str, table: Mapping[str, Any]) -> Entry:
    _known(at, table, _ENTRY_KEYS)
    identity = _text(at, table, "id")
    if not _ID.fullmatch(identity):
        raise ExpectationsError(f"{at}: an id is letters, digits, dots, dashes and underscores")
    return Entry(
        identity,
        _kind(at, table),
        _text(at, table, "reason", "say why this is taken as it is, for the reader of the report"),
        _select(at, table),
        _text(at, table, "link") if "link" in table else "",
        _expires(at, table["expires"]) if "expires" in table else None,
    )


def _kind(at: str, table: Mapping[str, Any]) -> Kind:
    kinds = {kind.value: kind for kind in Kind}
    kind = _text(at, table, "kind", f"expected one of {', '.join(kinds)}")
    if kind not in kinds:
        raise ExpectationsError(f"{at}: kind = {kind!r}; expected one of {', '.join(kinds)}")
    return kinds[kind]


def _select(at: str, table: Mapping[str, Any]) -> dict[str, Patterns]:
    select = {name: _patterns(f"{at}: {name}", table[name]) for name in _SELECT if name in table}
    _among(f"{at}: mode", select.get("mode", ()), _MODES)
    _near(f"{at}: stage", select.get("stage", ()), _STAGES)
    _among(f"{at}: rule", select.get("rule", ()), tuple(rules()))
    if table["kind"] == Kind.NOT_SUPPORTED.value:
        extra = [name for name in FINDING_FIELDS if name in select]
        if extra:
            raise ExpectationsError(
                f"{at}: what is not supported has no {extra[0]}; select by {_listed(CASE_FIELDS)}"
            )
    if all(any(set(one) <= {"*"} for one in patterns) for patterns in select.values()):
        raise ExpectationsError(
            f'{at}: it selects everything; narrow it by {_listed(_SELECT)}, such as case = "y-tree"'
        )
    return select


def _patterns(at: str, value: object) -> Patterns:
    values = value if isinstance(value, list) else [value]
    texts = tuple(one for one in values if isinstance(one, str) and one)
    if not texts or len(texts) != len(values):
        raise ExpectationsError(f'{at} = {value!r}; expected a pattern such as "y-*", or a list')
    for one in texts:
        _check_pattern(at, one)
    return texts


def _check_pattern(at: str, pattern: str) -> None:
    rest = re.sub(r"\[!?\]?[^\]]*\]", "", pattern)
    if "[" in rest:
        raise ExpectationsError(
            f"{at}: pattern {pattern!r} opens a [ that it does not close; close it, or write [[] "
            "for the sign itself"
        )


def _among(at: str, patterns: Patterns, known: tuple[str, ...]) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(one, pattern) for one in known):
            raise ExpectationsError(
                f"{at}: {pattern!r} fits none; expected one of {', '.join(known)}, or a pattern"
            )


def _near(at: str, patterns: Patterns, known: tuple[str, ...]) -> None:
    """As `_among`, where the known names are too many to be listed."""
    for pattern in patterns:
        if not any(fnmatchcase(one, pattern) for one in known):
            close = get_close_matches(pattern, known, n=3, cutoff=0.5)
            nearest = f", such as {_listed(tuple(close))}" if close else ""
            raise ExpectationsError(
                f"{at}: {pattern!r} fits none; expected a stage of contract/stages.py or a check "
                f"of a script{nearest}, or a pattern"
            )


def _expires(at: str, value: object) -> date:
    if not isinstance(value, date) or isinstance(value, datetime):
        raise ExpectationsError(
            f"{at}: expires = {value!r}; expected a date without quotes, as 2027-03-31"
        )
    return value


def _must_pass(at: str, table: object) -> MustPass:
    if not isinstance(table, dict):
        raise ExpectationsError(f"{at}: {table!r}; expected a table with corpus and cases")
    _known(at, table, ("corpus", "cases"))
    corpus, cases = table.get("corpus"), table.get("cases")
    if not isinstance(corpus, str) or not _DIGEST.fullmatch(corpus):
        raise ExpectationsError(
            f"{at}: corpus = {corpus!r}; expected the SHA-256 of the corpus' SHA256SUMS, which "
            "`sha256sum SHA256SUMS` prints"
        )
    if not isinstance(cases, list) or not cases:
        raise ExpectationsError(f'{at}: cases = {cases!r}; expected a list of "BUNDLE/CASE"')
    return MustPass(corpus, tuple(_must_pass_case(at, case) for case in cases))


def _must_pass_case(at: str, case: object) -> tuple[str, str, str]:
    parts = case.split("/") if isinstance(case, str) else []
    if len(parts) not in (2, 3) or not all(parts):
        raise ExpectationsError(
            f'{at}: {case!r} in cases; expected "BUNDLE/CASE" or "BUNDLE/CASE/MODE"'
        )
    for part in parts:
        _check_pattern(at, part)
    bundle, name, mode = (*parts, "*")[:3]
    _among(f"{at}: {case!r}", (mode,), _MODES)
    return bundle, name, mode


def _ceiling(name: str, key: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ExpectationsError(f"{name}: {key} = {value!r}; expected a number from 0")
    return value


def _known(at: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    unknown = [key for key in table if key not in known]
    if unknown:
        raise ExpectationsError(f"{at}: no key {unknown[0]!r}; expected {_listed(tuple(known))}")


def _text(at: str, table: Mapping[str, Any], key: str, what: str = "expected a text") -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        is_there = f"{key} = {value!r}" if key in table else f"{key} is missing"
        raise ExpectationsError(f"{at}: {is_there}; {what}")
    return value.strip()


def _listed(names: tuple[str, ...]) -> str:
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
