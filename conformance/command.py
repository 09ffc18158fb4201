"""The `kdtr` command, as a shell starts it: `cli.main`, where an engine runs in this very process
as the child of a parent that outlives it.

`python -m kdtr.conformance.cli` is the same without the parent: for gdb, profilers and the like,
which want one process. Nothing heavy is imported before the fork.
"""

from __future__ import annotations

import sys

from kdtr.conformance import running
from kdtr.conformance.outlive import outlived

# The others run none, or run it in a process of its own, whose end is told by who started it:
# the client of the stdio protocol (serve-engine), the one that hands out the work (campaign).
RUN_AN_ENGINE_HERE = ("gate", "xray")


def main() -> int:
    """Run the command of sys.argv; returns the exit code."""
    code = outlived() if sys.argv[1:2] and sys.argv[1] in RUN_AN_ENGINE_HERE else None
    return _work() if code is None else code


def _work() -> int:
    from kdtr.conformance.cli import main as work

    try:
        code = work()
    except SystemExit as end:  # argparse's: after --help, or a usage error
        code = end.code if isinstance(end.code, int) else 0
    running.settle(code)
    return code
