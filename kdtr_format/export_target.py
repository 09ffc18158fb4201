"""Where an export goes: a sibling is written and then renamed, so that nothing is half-written.

What is there already is replaced only if it is of the same kind, a checkpoint by a checkpoint and
GGUF by GGUF: everything else might be somebody's only copy.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kdtr.contract import CheckpointError
from kdtr.kdtr_format.checkpoint import CONFIG, INDEX

_OF_A_CHECKPOINT = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_GGUF_MAGIC = b"GGUF"
_SHOWN = 5  # names in one message


@contextmanager
def replaced_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A sibling's path; what was written there becomes `path` on success, vanishes on failure."""
    target = _resolved(path)
    if target.is_dir():
        raise CheckpointError(f"{target} is a directory; expected the path of a file")
    if target.exists() and not _is_gguf(target):
        raise CheckpointError(
            f"{target} is there and is not GGUF; remove it or choose another path"
        )
    sibling = _sibling(target)
    try:
        yield sibling
        with open(sibling, "rb") as file:
            os.fsync(file.fileno())
        sibling.replace(target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        sibling.unlink(missing_ok=True)


@contextmanager
def replaced_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A sibling directory, which becomes `path` on success and vanishes on failure."""
    target = _resolved(path)
    _check_directory(target)
    sibling, old = _sibling(target), _sibling(target)
    try:
        sibling.mkdir()
        yield sibling
        # a directory does not replace one that has files: for a moment there is none
        if target.exists():
            target.replace(old)
        try:
            sibling.replace(target)
        except OSError:
            if old.exists():
                old.replace(target)
            raise
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(sibling, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _resolved(path: str | os.PathLike[str]) -> Path:
    """Links followed, so that the rename replaces what a link points to and not the link."""
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, a circle of links
        raise CheckpointError(f"{os.fspath(path)!r} is no path: {error}") from error


def _check_directory(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(
            f"{target} is a file; expected a directory, or a path ending in .gguf"
        )
    names = sorted(entry.name for entry in target.iterdir())
    foreign = [n for n in names if n not in (CONFIG, INDEX) and not _OF_A_CHECKPOINT.fullmatch(n)]
    if foreign:
        shown = ", ".join(foreign[:_SHOWN])
        more = f" and {len(foreign) - _SHOWN} more" if len(foreign) > _SHOWN else ""
        raise CheckpointError(
            f"{target} holds {shown}{more}, which this export would not replace; remove them or "
            f"choose another directory"
        )


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _sibling(target: Path) -> Path:
    return target.parent / f".kdtr-{secrets.token_hex(8)}.tmp"
