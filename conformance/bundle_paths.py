"""Golden bundles as they are named on a command line: files, folders, and what kdtr ships."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from kdtr.contract import BundleError, CaseError

BUILT_IN = "built-in"  # the word for the corpus that kdtr brings along
_SUFFIX = ".kdtr"


def bundle_paths(words: Iterable[str]) -> list[str]:
    """The bundles: a file as it is, the *.kdtr of a folder by name, and for `built-in` the corpus,
    unless there is a file or folder of that name.

    Raises BundleError for a folder without any, and for a word that is none of these.
    """
    paths: list[str] = []
    for word in words:
        if not word:
            raise BundleError("an empty name for a golden bundle; expected a file, or a folder")
        folder = Path(word)
        if word == BUILT_IN and not folder.exists():
            folder = Path(str(files("kdtr.conformance").joinpath("corpus")))
        if not folder.is_dir():
            if not folder.exists() and folder.suffix != _SUFFIX:
                raise BundleError(
                    f"{word}: no such file or folder; expected golden bundles (*{_SUFFIX}), a "
                    f"folder of them, or the word {BUILT_IN} for those that kdtr brings along"
                )
            paths.append(word)
            continue
        found = sorted(str(path) for path in folder.glob(f"*{_SUFFIX}"))
        if not found:
            raise BundleError(
                f"{folder} holds no *{_SUFFIX}; expected golden bundles, as `kdtr golden` writes "
                f"them, or the word {BUILT_IN} for those that kdtr brings along"
            )
        paths += found
    return paths


def by_name(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Path]:
    """The files by their names, without folders. Raises CaseError where two have one name."""
    given: dict[str, Path] = {}
    for path in map(Path, paths):
        if given.setdefault(path.name, path) != path:
            raise CaseError(
                f"{given[path.name]} and {path} have one name, by which cases are known here; give "
                "one of them"
            )
    return given
