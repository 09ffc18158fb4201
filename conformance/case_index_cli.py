"""`kdtr index`: golden bundles as a Parquet table."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdtr.conformance.case_index import write_index


def add_index_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE", help="golden bundles (.kdtr)")
    parser.add_argument("--out", required=True, metavar="FILE", help="the Parquet file to write")


def index_command(args: argparse.Namespace) -> int:
    """Write the index; returns the exit code."""
    rows = write_index(args.bundles, Path(args.out))
    n = len(args.bundles)
    print(f"{rows} rows of {n} bundle{'' if n == 1 else 's'} in {args.out}")
    return 0
