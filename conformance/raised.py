"""What an engine raises: which of it is caught, and how it reads in a finding."""

from __future__ import annotations

import traceback
from pathlib import Path

# sys.exit(0) inside an engine must not end the judge as if it had passed; Ctrl-C must end it.
RAISED = (Exception, SystemExit)


class Escaped(Exception):
    """Of what an engine raised beside these, as GeneratorExit: caught as they are, and told as it
    was. Its cause is what was raised (engine_call.py)."""


_LONGEST = 2000  # characters of an engine's text: a finding is read by people
_OWN = Path(__file__).parent


def shortened(text: str) -> str:
    """The text, or its beginning."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"


def told(error: BaseException) -> str:
    """The error's type and text; the text is the engine's, and reading it may raise too."""
    error = _raised(error)
    try:
        text = str(error)
    except RAISED:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {shortened(text)}"


def origin(error: BaseException) -> str:
    """file:line of the innermost frame that is not the judge's; "" where there is none."""
    frames = traceback.extract_tb(_raised(error).__traceback__)
    foreign = [frame for frame in frames if Path(frame.filename).parent != _OWN]
    return f"{Path(foreign[-1].filename).name}:{foreign[-1].lineno}" if foreign else ""


def _raised(error: BaseException) -> BaseException:
    return error.__cause__ or error if isinstance(error, Escaped) else error
