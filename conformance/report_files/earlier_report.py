"""What may be written over: an earlier report of the same kind, and nothing else that is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kdtr.contract import CaseError

# Within the first or the last bytes of each report, and hardly of anything else.
MARKS = {
    "html": b'<meta name="generator" content="kdtr">',
    "markdown": b"\n- versions: rules ",
    "junit": b'<testsuites name="kdtr gate"',
    "jsonl": b'{"kind": "run", "schema": ',
    "parquet": b"kdtr.header",
}
_LOOK = 1 << 20  # bytes, at either end


def check_earlier(files: Mapping[str, Path]) -> None:
    """Raises CaseError for a file that holds something else. An empty one holds nothing.

    files  by kind of report, as "html"
    """
    for kind, path in files.items():
        if path.is_file() and path.stat().st_size and not _is_report(kind, path):
            raise CaseError(
                f"--{kind} {path} is there already and is no report of `kdtr --{kind}`; expected a "
                "new file, or an earlier report to write over"
            )


def _is_report(kind: str, path: Path) -> bool:
    with path.open("rb") as file:
        first = file.read(_LOOK)
        file.seek(max(0, path.stat().st_size - _LOOK))
        return MARKS[kind] in first or MARKS[kind] in file.read()
