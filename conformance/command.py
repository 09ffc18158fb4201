"""The `kdtr` command, as a shell starts it: `cli.main` in a process that its parent outlives.

`python -m kdtr.conformance.cli` is the same without the parent: for gdb, profilers and the like,
which want one process. Nothing heavy is imported before the fork.
"""

from __future__ import annotations

import sys

from kdtr.conformance import running
from kdtr.conformance.outlive import outlived

# An engine's own process: who started it, the client of the stdio protocol, tells how it ended.
_WATCHED_ALREADY = "serve-engine"


def main() -> int:
    """Run the command of sys.argv; returns the exit code."""
    code = None if sys.argv[1:2] == [_WATCHED_ALREADY] else outlived()
    return _work() if code is None else code


def _work() -> int:
    from kdtr.conformance.cli import main as work

    try:
        code = work()
    except SystemExit as end:  # argparse's: after --help, or a usage error
        code = end.code if isinstance(end.code, int) else 0
    running.settle(code)
    return code
