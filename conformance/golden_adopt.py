"""`kdtr adopt`: a failed example becomes cases of a corpus.

A law or a campaign leaves a failed example as a golden bundle. Adopting records it again, so that
the expectations are this version's, under a name of its own beside the other bundles, and adds
its sum to SHA256SUMS; `kdtr golden-check` then holds it to the same bytes for ever.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.golden_again import ADOPTED, record_again
from kdtr.conformance.golden_corpus import SUMS, read_sums, write_sums
from kdtr.contract import BundleError, CaseError
from kdtr.kdtr_format import Bundle


@dataclass(frozen=True, slots=True)
class Adopted:
    """The bundle written, its sum, the cases that are new, and those that were there already.

    differs  whether the file that was given held other bytes than the truth of today
    """

    path: Path
    sha256: str
    cases: tuple[str, ...]
    known: tuple[str, ...]
    differs: bool


def adopt(source: Path, corpus: Path, name: str | None = None) -> Adopted:
    """Add the bundle's cases to the corpus, but for those that it has.

    name  of the new bundle, without `adopted-` and `.kdtr`; None: that of the source
    Raises CaseError for a name that is taken or no name and for cases that are all known,
    BundleError for a source that is no golden bundle: before anything is written.
    """
    out = corpus / f"{ADOPTED}{_name(source, name)}.kdtr"
    if not source.is_file():
        raise BundleError(f"{source}: no such file; expected a golden bundle")
    _make(corpus)
    with _alone(corpus):
        return _adopt(source, corpus, out)


def _adopt(source: Path, corpus: Path, out: Path) -> Adopted:
    if out.exists():
        raise CaseError(f"{out} exists; give another --name, or remove it and its line in {SUMS}")
    bundle = GoldenBundle.open(source)
    cases = {case.inputs.case_id: case.inputs.alias for case in bundle.cases}
    bundle.close()
    where = _ids(corpus, besides=source)
    known = {case_id: where[case_id] for case_id in cases if case_id in where}
    if len(known) == len(cases):
        place = sorted(set(known.values()))[0]
        raise CaseError(f"{source}: every case of it is in {place} already; nothing to adopt")
    sums = read_sums(corpus) if (corpus / SUMS).exists() else {}
    sha256 = record_again(source, out, without=known)
    try:
        write_sums(corpus, {**sums, out.name: sha256})
    except OSError:
        out.unlink()  # a bundle without its sum would be refused by the next try
        raise
    given = hashlib.sha256(source.read_bytes()).hexdigest()
    return Adopted(
        out,
        sha256,
        tuple(alias for case_id, alias in cases.items() if case_id not in known),
        tuple(cases[case_id] for case_id in known),
        differs=not known and given != sha256,
    )


def _name(source: Path, name: str | None) -> str:
    chosen = (source.stem if name is None else name).removeprefix(ADOPTED)
    if not chosen or not all(c.isascii() and (c.isalnum() or c in "-_") for c in chosen):
        raise CaseError(
            f"--name {chosen!r}; expected ASCII letters, digits, - and _, without a directory"
        )
    return chosen


def _ids(corpus: Path, *, besides: Path) -> dict[str, str]:
    """The ids of all cases in the corpus, with the file that holds each; `besides` is not of it."""
    found = {}
    for path in sorted(corpus.glob("*.kdtr")):
        if path.samefile(besides):
            continue
        with Bundle.open(path) as bundle:
            entries = bundle.metadata.get("cases")
        for entry in entries if isinstance(entries, list) else []:
            if isinstance(entry, dict):
                found[str(entry.get("id"))] = path.name
    return found


@contextmanager
def _alone(corpus: Path) -> Iterator[None]:
    """One adoption at a time: each reads the sums and writes them back."""
    handle = os.open(corpus, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _make(corpus: Path) -> None:
    try:
        corpus.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(f"--into {corpus}: {error.strerror}; expected a directory") from error


def add_adopt_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="a failed example, as a law wrote it")
    parser.add_argument(
        "--into", required=True, metavar="DIR", help="the corpus: bundles and SHA256SUMS"
    )
    parser.add_argument("--name", metavar="NAME", help="of the new bundle; default: the file's own")


def adopt_command(args: argparse.Namespace) -> list[str]:
    """Adopt; returns what to tell, line by line: the sum first, as sha256sum prints it."""
    if not args.into:
        raise BundleError("--into is empty; expected a directory")
    adopted = adopt(Path(args.bundle), Path(args.into), args.name)
    lines = [f"{adopted.sha256}  {adopted.path}", f"cases: {', '.join(adopted.cases)}"]
    if adopted.known:
        lines.append(f"known already, left out: {', '.join(adopted.known)}")
    if adopted.differs:
        lines.append("the file held other bytes: its expectations are not those of this version")
    return lines
