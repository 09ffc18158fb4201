"""Output for people: a console that shows texts as they are, and what is under way meanwhile."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from kdtr.conformance import running
from kdtr.conformance.plain_text import printable

_LONG_S = 3  # seconds in one call of an engine, after which it is named


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Not an exit with 1, which is a verdict: the command says that it could not write."""
        raise  # the error: rich calls this within its except


def plain_console(*, stderr: bool = False) -> Console:
    """An engine's name may hold [ or :smile:."""
    return _Console(stderr=stderr, highlight=False, markup=False, emoji=False)


class Progress:
    """What is under way, on a terminal's standard error; silent elsewhere.

    A call of the engine that takes long is named, with its place and its seconds: it may hang.
    """

    def __init__(self) -> None:
        self._text = ""
        self._status = plain_console(stderr=True).status(self)

    def show(self, text: str) -> None:
        self._text = text

    def __rich__(self) -> Text:
        """Asked for whenever the line is drawn."""
        doing = running.doing()
        if doing.inside and doing.seconds() >= _LONG_S:
            return Text(printable(f"{doing.where()} for {doing.seconds()} s"))
        return Text(printable(self._text))

    def __enter__(self) -> Progress:
        self._status.start()
        sys.breakpointhook = self._break
        return self

    def __exit__(self, *_: object) -> None:
        sys.breakpointhook = sys.__breakpointhook__
        self._status.stop()

    def _break(self, *args: Any, **rest: Any) -> Any:
        """An engine's breakpoint(): the line would write over the debugger's prompt."""
        self._status.stop()
        if args or rest or "PYTHONBREAKPOINT" in os.environ:
            return sys.__breakpointhook__(*args, **rest)
        import pdb

        return pdb.Pdb().set_trace(sys._getframe(1))  # and not in this function
