"""Cases as JSON: what `kdtr golden --cases` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kdtr.conformance.case import CasePlan, Planted, RoundPlan
from kdtr.contract import CaseError, DraftTree, KdtrError, rules

CASES_FORM = """\
A cases file is a JSON list. Each case is an object:
  "alias"   its name: letters, digits and dashes
  "why"     what it is for, one line (optional)
  "rules"   ids of rules that it holds, of contract/RULES.md (optional)
  "chunks"  the prompt in pieces, lists of token ids; or "root", a token id, without a prompt
  "rounds"  a list; each round one of
            {"parents": [-1, 0, 0, 2], "path": [0, 2, 3]}   plants the path that is accepted:
                                                            the recorder fills in tokens
            {"parents": [-1, 0, 0, 2]}                      the same, and accepts the root only
            {"parents": [-1, 0], "tokens": [5, 7]}          gives the tree
"""


def read_cases(path: Path) -> tuple[CasePlan, ...]:
    """The cases of a file; CaseError names the file, the case and what in it is refused."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, a device read on
            raise CaseError(f"{path} is no plain file; expected a JSON list of cases")
        entries = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise CaseError(f"{path} is nested too deep; expected a JSON list of cases") from None
    except OSError as error:
        raise CaseError(f"{path}: {error.strerror}; expected a JSON list of cases") from error
    except ValueError as error:
        raise CaseError(f"{path}: {error}; expected a JSON list of cases") from error
    if not isinstance(entries, list):
        raise CaseError(f"{path}: a {type(entries).__name__}; expected a JSON list of cases")
    return tuple(_case(f"{path}: case {i}", entry) for i, entry in enumerate(entries))


def _case(where: str, entry: Any) -> CasePlan:
    if not isinstance(entry, dict):
        raise CaseError(f"{where} is {entry!r}; expected an object")
    known = {"alias", "why", "rules", "chunks", "root", "rounds"}
    unknown, missing = sorted(set(entry) - known), sorted({"alias", "rounds"} - set(entry))
    if unknown:
        raise CaseError(
            f"{where} has the unknown {_keys(unknown)}; expected some of {', '.join(sorted(known))}"
        )
    if missing:
        raise CaseError(f"{where} lacks the {_keys(missing)}; expected alias and rounds")
    root = entry.get("root")
    if root is not None and type(root) is not int:
        raise CaseError(f"{where}, root is {root!r}; expected a token id")
    chunks = _list(f"{where}, chunks", entry.get("chunks", []))
    rounds = _list(f"{where}, rounds", entry["rounds"])
    fields: dict[str, Any] = {
        "alias": _text(f"{where}, alias", entry["alias"]),
        "why": _text(f"{where}, why", entry.get("why", "")),
        "rules": _rules(f"{where}, rules", entry.get("rules", [])),
        "chunks": tuple(_ids(f"{where}, chunk{i}", chunk) for i, chunk in enumerate(chunks)),
        "root": root,
        "rounds": tuple(_round(f"{where}, round{i}", one) for i, one in enumerate(rounds)),
    }
    try:
        return CasePlan(**fields)
    except KdtrError as error:
        raise CaseError(f"{where}: {error}") from error


def _round(where: str, entry: Any) -> RoundPlan:
    if not isinstance(entry, dict) or "parents" not in entry:
        raise CaseError(f"{where} is {entry!r}; expected an object with parents")
    if not set(entry) <= {"parents", "path"} and set(entry) != {"parents", "tokens"}:
        raise CaseError(
            f"{where} has {', '.join(sorted(entry))}; expected parents with path or tokens"
        )
    fields: dict[str, Any] = {key: _ids(f"{where}, {key}", ids) for key, ids in entry.items()}
    if "tokens" not in fields:
        return Planted(**fields)
    try:
        return DraftTree(**fields)
    except KdtrError as error:
        raise CaseError(f"{where}: {error}") from error


def _keys(keys: list[str]) -> str:
    return f"key{'' if len(keys) == 1 else 's'} {', '.join(keys)}"


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise CaseError(f"{where} is {value!r}; expected a list")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise CaseError(f"{where} is {value!r}; expected a text")
    return value


def _ids(where: str, value: Any) -> tuple[int, ...]:
    """Token ids or nodes; true is no number."""
    for i, one in enumerate(_list(where, value)):
        if type(one) is not int:
            raise CaseError(f"{where} has {one!r} at index {i}; expected integers")
    return tuple(value)


def _rules(where: str, value: Any) -> tuple[str, ...]:
    for rule_id in _list(where, value):
        if not isinstance(rule_id, str) or rule_id not in rules():
            raise CaseError(f"{where} names {rule_id!r}; expected ids of contract/RULES.md")
    return tuple(value)
