"""The laws of this package by name, and how each of their examples is watched.

A law is a test function of a module `test_*_laws` or of the state machine: its docstring begins
with the rules that it holds an engine to. pytest runs laws one engine after another; a campaign
runs them by name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
from hypothesis import reproduce_failure
from hypothesis.core import decode_failure
from hypothesis.errors import InvalidArgument

import kdtr.property_tests
from kdtr.contract import rules
from kdtr.property_tests.watch import Sink, watching

_RULE = re.compile("|".join(sorted((re.escape(rule) for rule in rules()), key=len, reverse=True)))
_RANGE = re.compile(r"([A-Z]+)-(\d+) to \1-(\d+)")


@dataclass(frozen=True, slots=True)
class Law:
    """A law by name.

    name      of its function without `test_`
    rules     the ids at the head of its docstring
    subject   what it is given: "engine", "twins" (two that nobody may tell apart), or "" for a
              law that speaks of no engine
    function  as pytest calls it
    """

    name: str
    rules: tuple[str, ...]
    subject: str
    function: Callable[..., None]


@functools.cache
def laws() -> dict[str, Law]:
    """Every law, by name, in the order of modules and of lines."""
    found: dict[str, Law] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(kdtr.property_tests.__path__)):
        if not module.startswith("test_"):
            continue
        loaded = importlib.import_module(f"kdtr.property_tests.{module}")
        for name, function in vars(loaded).items():
            if name.startswith("test_") and function.__module__ == loaded.__name__:
                law = _law(name, function)
                assert law.name not in found, f"two laws are called {law.name}"
                found[law.name] = law
    return found


def _law(name: str, function: Callable[..., None]) -> Law:
    needs = inspect.signature(_body(function)).parameters
    subject = next((one for one in ("engine", "twins") if one in needs), "")
    return Law(name.removeprefix("test_"), rules_of(function), subject, function)


def rules_of(function: Callable[..., None]) -> tuple[str, ...]:
    """The ids before the colon of the docstring; `ACC-1 to ACC-3` is three.

    >>> def test_walk() -> None:
    ...     '''ACC-1 to ACC-3, LOSSLESS: the walk.'''
    >>> rules_of(test_walk)
    ('ACC-1', 'ACC-2', 'ACC-3', 'LOSSLESS')
    """
    head = (function.__doc__ or "").partition(":")[0]

    def spelled(match: re.Match[str]) -> str:
        family, first, last = match[1], int(match[2]), int(match[3])
        return ", ".join(f"{family}-{i}" for i in range(first, last + 1))

    return tuple(dict.fromkeys(_RULE.findall(_RANGE.sub(spelled, head))))


def _body(function: Callable[..., None]) -> Any:
    """The function that Hypothesis calls with drawn values, or the function itself."""
    handle = getattr(function, "hypothesis", None)
    return function if handle is None else handle.inner_test


def watch_examples(name: str, function: Callable[..., None], sink: Sink) -> None:
    """From now on every example of the law goes to the sink when it ends.

    Uses `hypothesis.inner_test`, which Hypothesis offers for wrapping. The state machine is no
    such test: it watches its own examples, and takes the sink as an attribute.
    """
    handle = getattr(function, "hypothesis", None)
    if handle is None:
        function.sink = sink  # type: ignore[attr-defined]
        return
    body = getattr(handle.inner_test, "unwatched", handle.inner_test)

    @functools.wraps(body)
    def watched(*args: Any, **kwargs: Any) -> None:
        with watching(name, sink) as example:
            body(*args, **kwargs)
            example.aim()

    watched.unwatched = body  # type: ignore[attr-defined]
    handle.inner_test = watched


def only_example(function: Callable[..., None], blob: str) -> None:
    """Run the law on one example alone: what Hypothesis printed when it failed.

    Raises ValueError for a text that is none.
    """
    try:
        decode_failure(blob.encode("ascii"))
    except (InvalidArgument, UnicodeEncodeError) as error:
        raise ValueError(
            f"{error}; expected the text behind --kdtr-example that a failure printed, whole"
        ) from error
    reproduce_failure(hypothesis.__version__, blob.encode("ascii"))(function)
