"""`kdtr serve-engine`: an engine in Python at the other end of the stdio protocol."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from kdtr.conformance.engine_loader import load_engine
from kdtr.conformance.noted_engine import noted
from kdtr.conformance.stdio_server import serve

SERVE_HELP = """\
Requests are read from standard input and replies written to standard output, as
docs/stdio-protocol.md says; what the engine prints goes to standard error. For example:

  kdtr gate BUNDLE --engine "stdio:kdtr serve-engine --engine host"
"""


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = SERVE_HELP
    parser.add_argument(
        "--engine", required=True, metavar="NAME", help="as for `kdtr gate`, but not stdio:"
    )
    parser.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword of the factory, as a Python literal or text; repeat for more",
    )


def serve_command(name: str, options: Mapping[str, Any]) -> int:
    """Serve until standard input ends; returns the exit code."""
    with _own_streams() as (requests, replies):
        serve(lambda: noted(load_engine(name, options)), requests, replies)
    return 0


@contextmanager
def _own_streams() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Standard input and output for the protocol alone.

    Whoever else writes to descriptor 1, a C library too, reaches standard error, and whoever reads
    from descriptor 0 finds its end.
    """
    sys.stdout.flush()
    with open(os.dup(0), "rb") as requests, open(os.dup(1), "wb") as replies:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        before, sys.stdout = sys.stdout, sys.stderr
        try:
            yield requests, replies
        finally:
            sys.stdout = before
