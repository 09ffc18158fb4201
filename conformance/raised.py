"""What an engine raises: which of it is caught, and how it reads in a finding."""

from __future__ import annotations

import traceback
from pathlib import Path

from kdtr.conformance.plain_text import name_text, printable, printable_lines
from kdtr.contract import EngineError

# sys.exit(0) inside an engine must not end the judge as if it had passed; Ctrl-C must end it.
RAISED = (Exception, SystemExit)


class Escaped(Exception):
    """Of what an engine raised beside these, as GeneratorExit: caught as they are, and told as it
    was. Its cause is what was raised (engine_call.py)."""


_LONGEST = 2000  # characters of an engine's text: a finding is read by people
REFUSAL = 5 * _LONGEST  # of a refusal, which may list names
_OWN = Path(__file__).parent


def shortened(text: str, most: int = _LONGEST) -> str:
    """The text, or its beginning."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def words(error: BaseException, most: int = _LONGEST) -> str:
    """The error's text, as it may be printed: cut, and nothing in it but lines of text.

    It is the engine's, and reading it may raise too.
    """
    try:
        text = str(_raised(error))
    except RAISED:
        text = "(its text cannot be read)"
    return "\n".join(printable_lines([shortened(text, most)]))


def told(error: BaseException, most: int = _LONGEST) -> str:
    """The error's type and its words."""
    return f"{name_text(type(_raised(error)).__name__)}: {words(error, most)}"


def line_of(error: BaseException) -> str:
    """Its words where one line is wanted: a line break is escaped too."""
    return printable(words(error))


def in_words(error: BaseException) -> str:
    """As a finding says it: what the engine raised and where, or the judge's word on an answer."""
    if is_own(error):
        return words(error)
    place = origin(error)
    return f"the engine raised {told(error)}" + (f" (at {place})" if place else "")


def is_own(error: BaseException) -> bool:
    """Whether it is the judge that found fault with an answer."""
    return isinstance(error, EngineError) and not origin(error)


def origin(error: BaseException) -> str:
    """file:line of the innermost frame that is not the judge's; "" where there is none."""
    frames = traceback.extract_tb(_raised(error).__traceback__)
    foreign = [frame for frame in frames if Path(frame.filename).parent != _OWN]
    return f"{Path(foreign[-1].filename).name}:{foreign[-1].lineno}" if foreign else ""


def _raised(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, Escaped) else error
