"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """A predicate: "exited with code 3", "was ended by signal 11 (SIGSEGV)".

    code  as subprocess and os.waitstatus_to_exitcode have it: of a signal it is negative
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unnamed"
    return f"was ended by signal {-code} ({name})"
