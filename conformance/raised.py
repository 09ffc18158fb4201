"""What an engine raises: which of it is caught, and how it reads in a finding."""

from __future__ import annotations

import traceback
from pathlib import Path

from kdtr.contract import EngineError

# sys.exit(0) inside an engine must not end the judge as if it had passed; Ctrl-C must end it.
RAISED = (Exception, SystemExit)

_LONGEST = 2000  # characters of an engine's text: a finding is read by people
_OWN = Path(__file__).parent


def shortened(text: str) -> str:
    """The text, or its beginning."""
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"


def told(error: BaseException) -> str:
    """The error's type and text; the text is the engine's, and reading it may raise too."""
    try:
        text = str(error)
    except RAISED:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {shortened(text)}"


def in_words(error: BaseException) -> str:
    """As a finding says it: what the engine raised and where, or the judge's word on an answer."""
    if is_own(error):
        return shortened(str(error))
    place = origin(error)
    return f"the engine raised {told(error)}" + (f" (at {place})" if place else "")


def is_own(error: BaseException) -> bool:
    """Whether it is the judge that found fault with an answer."""
    return isinstance(error, EngineError) and not origin(error)


def origin(error: BaseException) -> str:
    """file:line of the innermost frame that is not the judge's; "" where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if Path(frame.filename).parent != _OWN]
    return f"{Path(foreign[-1].filename).name}:{foreign[-1].lineno}" if foreign else ""
