"""Ctrl-C, told from a KeyboardInterrupt that an engine raises by itself; and where it came in."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kdtr.conformance import running

_listening = False
_came_in: running.Doing | None = None


@contextmanager
def user_interrupts() -> Iterator[None]:
    """Listen for Ctrl-C while this lasts. Elsewhere every KeyboardInterrupt is the user's."""
    global _listening, _came_in
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # somebody else listens, or it is ignored
        yield
        return
    with suppress(ValueError):  # no main thread: there nobody hears of Ctrl-C either
        signal.signal(signal.SIGINT, _interrupt)
        _listening, _came_in = True, None
    try:
        yield
    finally:
        if _listening:
            signal.signal(signal.SIGINT, before)
            _listening = False


def is_of_the_user(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) and (not _listening or _came_in is not None)


def where_interrupted() -> str:
    """ " at base.kdtr: y / stepwise / round0: verify(), 12 s after it was called", as far as it
    is known."""
    return "" if _came_in is None else _came_in.told()


def _interrupt(*_: object) -> None:
    global _came_in
    _came_in = running.doing()
    raise KeyboardInterrupt
