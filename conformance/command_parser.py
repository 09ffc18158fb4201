"""The parser of the `kdtr` command: it remembers options that are given twice.

The last one holds, as `make campaign ARGS="--cases 100000"` has it; that is said, for in a long
line it may be a slip.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

_TWICE = "given_twice"
_KEYED = ("engine_option", "twin_option")  # KEY=VALUE, repeatable with another key


class _Store(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault(_TWICE, {})
        if option_string is not None:
            given.setdefault(self.option_strings[0], []).append(values)
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """Also of each verb: `add_subparsers` makes them of this class."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        for action in (None, "store"):
            self.register("action", action, _Store)


def notes_of(args: argparse.Namespace) -> list[str]:
    """A sentence for each option, and each engine's option, that is there more than once."""
    given: dict[str, list[object]] = dict(getattr(args, _TWICE, {}))
    for dest in _KEYED:
        option = f"--{dest.replace('_', '-')}"
        for key, value in _keyed(getattr(args, dest, ())):
            given.setdefault(f"{option} {key}", []).append(value)
    return [
        f"{option} is given {_times(values)}: {', '.join(map(str, values))}; the last one holds"
        for option, values in given.items()
        if len(values) > 1
    ]


def _keyed(texts: Iterable[str]) -> Iterable[Sequence[str]]:
    return (text.partition("=")[::2] for text in texts if "=" in text)


def _times(values: Sequence[object]) -> str:
    return "twice" if len(values) == 2 else f"{len(values)} times"
