"""Files that are written whole or not at all, several of them as one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from kdtr.contract import CaseError


def check_targets(targets: Mapping[str, Path], inputs: Iterable[str]) -> None:
    """Refuse what could not be written, before any work is done: CaseError, by the option's name.

    targets  by option, as "--html"
    inputs   files that are read: none may be written over
    """
    seen: dict[Path, str] = {}
    read = [Path(path).resolve() for path in inputs]
    for option, path in targets.items():
        if path.is_dir():
            raise CaseError(f"{option} {path} is a directory; expected the file to write")
        if path.exists() and not path.is_file():
            raise CaseError(f"{option} {path} is no regular file; expected a file to write")
        place = path.resolve()
        if place in read:
            raise CaseError(f"{option} {path} is a bundle to read; expected another file")
        if place in seen:
            raise CaseError(
                f"{option} {path} is the file of {seen[place]} too; expected one file for each"
            )
        seen[place] = option
        if not path.parent.is_dir():
            raise CaseError(f"{option} {path}: no directory {path.parent}; make it first")
        trial = _sibling(path)
        try:
            trial.touch(exist_ok=False)  # a mode does not tell: disks are mounted read-only
        except OSError as error:
            raise _refusal(option, path, error) from error
        finally:
            with suppress(OSError):
                trial.unlink(missing_ok=True)


def write_whole(contents: Mapping[str, tuple[Path, bytes]]) -> None:
    """Write all files, by option; none takes its name before all are complete.

    Earlier files of these names stay until then. Raises CaseError where one cannot be written.
    """
    done: list[tuple[str, Path, Path]] = []
    try:
        for option, (path, content) in contents.items():
            sibling = _sibling(path)
            done.append((option, path, sibling))
            try:
                with sibling.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise _refusal(option, path, error) from error
        for option, path, sibling in done:
            try:
                sibling.replace(path)
            except OSError as error:
                raise _refusal(option, path, error) from error
    finally:
        for _, _, sibling in done:
            with suppress(OSError):
                sibling.unlink(missing_ok=True)


def _sibling(path: Path) -> Path:
    return path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")


def _refusal(option: str, path: Path, error: OSError) -> CaseError:
    return CaseError(f"{option} {path}: {error.strerror or error}; expected a place to write to")
