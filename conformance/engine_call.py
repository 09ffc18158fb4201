"""Around everything that runs an engine's code: `with EngineCall("verify()"):`.

It is noted for whoever must tell what was running (running.py). What the engine raises leaves as an
Exception, whatever it is, but for the user's Ctrl-C. A standard stream that it closes is there
again.
"""

from __future__ import annotations

from types import TracebackType

from kdtr.conformance import running, standard_streams
from kdtr.conformance.raised import RAISED, Escaped
from kdtr.conformance.user_interrupts import is_of_the_user
from kdtr.contract import EngineError


class EngineCall:
    """Raises Escaped for what is no Exception, as GeneratorExit; EngineError for a stream that
    was closed.

    what  runs, as it is told: "verify()", "the factory"
    """

    __slots__ = ("_before", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before: running.Call = running.enter(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        running.leave(self._before)
        # A copy that is made for a trace runs within a verb, which is to be named.
        closed = [] if self._before[1] else standard_streams.reopen()
        if error is not None and not isinstance(error, RAISED) and not is_of_the_user(error):
            raise Escaped(type(error).__name__) from error
        if error is None and closed:
            raise EngineError(
                f"{self._what} closed {' and '.join(closed)}; expected that an engine leaves it "
                "open: the verdict is written there"
            )
