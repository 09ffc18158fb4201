"""Around everything that runs an engine's code: `with EngineCall("verify()"):`.

It is noted for whoever must tell what was running (running.py).
"""

from __future__ import annotations

from types import TracebackType

from kdtr.conformance import running


class EngineCall:
    """
    what  runs, as it is told: "verify()", "the factory"
    """

    __slots__ = ("_before", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._before = running.enter(self._what)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        running.leave(self._before)
