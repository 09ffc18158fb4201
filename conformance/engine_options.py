"""Options of an engine as they are written on a command line: KEY=VALUE."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

from kdtr.contract import EngineError


def engine_options(flag: str, texts: Iterable[str]) -> dict[str, Any]:
    """Keywords of the factory, from repeated `flag KEY=VALUE`; EngineError for another form."""
    return dict(engine_option(flag, text) for text in texts)


def engine_option(flag: str, text: str) -> tuple[str, Any]:
    """A keyword and its value: a Python literal, or the text itself.

    >>> engine_option("--engine-option", "page_size=3"), engine_option("--engine-option", "on=gpu")
    (('page_size', 3), ('on', 'gpu'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise EngineError(f"{flag} {text!r}; expected KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return key, value


def option_words(options: Mapping[str, Any]) -> list[str]:
    """The options as words of a command line, which `engine_options` reads back.

    >>> option_words({"page_size": 3, "on": "gpu", "name": "7"})
    ['--engine-option', 'page_size=3', '--engine-option', 'on=gpu', '--engine-option', "name='7'"]
    """
    return [
        word
        for key, value in options.items()
        for word in ("--engine-option", f"{key}={_written(value)}")
    ]


def _written(value: Any) -> str:
    """A text that looks like a literal needs its quotes."""
    if isinstance(value, str):
        try:
            ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return value
    return repr(value)
