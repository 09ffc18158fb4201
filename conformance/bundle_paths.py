"""Golden bundles as they are named on a command line: files, folders, and what kdtr ships."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from kdtr.contract import BundleError

SHIPPED = "shipped"  # the word for the corpus that kdtr brings along
_SUFFIX = ".kdtr"


def bundle_paths(words: Iterable[str]) -> list[str]:
    """The bundles: a file as it is, the *.kdtr of a folder by name, and for `shipped` the corpus.

    Raises BundleError for a folder without any. A file or folder of the name goes before `shipped`.
    """
    paths: list[str] = []
    for word in words:
        folder = Path(word)
        if word == SHIPPED and not folder.exists():
            folder = Path(str(files("kdtr.conformance").joinpath("corpus")))
        if not folder.is_dir():
            paths.append(word)
            continue
        found = sorted(str(path) for path in folder.glob(f"*{_SUFFIX}"))
        if not found:
            raise BundleError(
                f"{folder} holds no *{_SUFFIX}; expected golden bundles, as `kdtr golden` writes "
                f"them, or the word {SHIPPED} for those that kdtr ships"
            )
        paths += found
    return paths
