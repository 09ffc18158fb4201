"""The committed corpus: recording it, and comparing a fresh recording with it, byte for byte."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from kdtr.conformance.corpus_models import CorpusModel, corpus_models, corpus_plans
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.golden_again import adopted_bundles, record_again
from kdtr.conformance.seed_model import SeedModel
from kdtr.conformance.tiny_corpus import TINY_SEED, tiny_plans
from kdtr.contract import BundleError, ModelConfig
from kdtr.kdtr_format import Bundle

SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
TINY = SeedModel("tiny", ModelConfig.tiny(), TINY_SEED)
_ALIGNMENT = 64  # bytes: most tensors are small

Progress = Callable[[str], None]


def record_tiny(path: Path, progress: Progress = lambda _: None) -> str:
    """The seed model's bundle, too large to commit: its SHA-256 is."""
    about = {"name": TINY.name, "seed": TINY.seed}
    return record_bundle(path, about, TINY.config, TINY.tensors(), tiny_plans(), progress)


def record_corpus(
    directory: Path, progress: Progress = lambda _: None, *, adopted_from: Path | None = None
) -> dict[str, str]:
    """Record every bundle into the directory, and SHA256SUMS beside them; returns the sums.

    adopted_from  where the adopted bundles are, which hold their own questions; else `directory`
    SHA256SUMS also holds the sum of tiny.kdtr, which is not kept there.
    """
    sums = {}
    for path in adopted_bundles(adopted_from or directory):
        progress(path.stem)
        sums[path.name] = record_again(path, directory / path.name)
    for entry in corpus_models():
        name = f"{entry.model.name}.kdtr"
        sums[name] = _record(directory / name, entry, progress)
    with tempfile.TemporaryDirectory() as scratch:
        sums["tiny.kdtr"] = record_tiny(Path(scratch) / "tiny.kdtr", progress)
    write_sums(directory, sums)
    return sums


def check_corpus(directory: Path, progress: Progress = lambda _: None) -> list[str]:
    """Record the corpus anew and compare with the directory; returns what differs, in words."""
    committed = read_sums(directory)
    with tempfile.TemporaryDirectory() as scratch:
        fresh = record_corpus(Path(scratch), progress, adopted_from=directory)
        return list(_differences(directory, committed, Path(scratch), fresh))


def _record(path: Path, entry: CorpusModel, progress: Progress) -> str:
    model = entry.model
    about = {"name": model.name, "seed": model.seed, "thin": bool(entry.thin), "why": entry.why}
    return record_bundle(
        path,
        about,
        model.config,
        model.tensors(),
        tuple(corpus_plans(entry)),
        lambda alias: progress(f"{model.name} / {alias}"),
        alignment=_ALIGNMENT,
    )


def _differences(
    directory: Path, committed: dict[str, str], scratch: Path, fresh: dict[str, str]
) -> Iterator[str]:
    for name in sorted(committed.keys() | fresh.keys()):
        if committed.get(name) != fresh.get(name):
            yield (
                f"{name}: {SUMS} has {committed.get(name, 'no such bundle')}, a fresh recording "
                f"{fresh.get(name, 'no such bundle')}"
            )
    extra = {file.name for file in directory.glob("*.kdtr")} - fresh.keys()
    for name in sorted(extra):
        yield f"{name}: no model of the corpus makes it; remove it"
    for file in sorted(scratch.glob("*.kdtr")):
        kept = directory / file.name
        if not kept.is_file():
            yield f"{file.name}: missing; record the corpus with `make golden`"
        elif kept.read_bytes() != file.read_bytes():
            yield f"{file.name}: {_first_difference(kept, file)}"


def read_sums(directory: Path) -> dict[str, str]:
    """The directory's SHA256SUMS, by file name; BundleError where there is none."""
    path = directory / SUMS
    if not path.is_file():
        raise BundleError(f"{path}: no such file; record the corpus with `make golden`")
    sums = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        found = _SUM.fullmatch(line.decode("ascii", errors="replace"))
        if found is None:
            raise BundleError(
                f"{path}, line {number}: {line[:80]!r}; expected a SHA-256, two blanks and a name"
            )
        sums[found[2]] = found[1]
    return sums


def write_sums(directory: Path, sums: Mapping[str, str]) -> None:
    """SHA256SUMS, as sha256sum writes it; replaced whole."""
    lines = [f"{sums[name]}  {name}\n" for name in sorted(sums)]
    scratch = directory / f"{SUMS}.{os.getpid()}"
    scratch.write_text("".join(lines), encoding="ascii")
    scratch.replace(directory / SUMS)


def _first_difference(kept: Path, fresh: Path) -> str:
    with Bundle.open(kept) as old, Bundle.open(fresh) as new:
        if old.names() != new.names():
            odd = sorted(set(old.names()) ^ set(new.names()))
            return f"other tensors, first {odd[0]}"
        for name in new.names():
            same = old[name].dtype == new[name].dtype and old[name].shape == new[name].shape
            if not same or not np.array_equal(old.payload(name), new.payload(name)):
                return f"tensor {name} differs, and perhaps others"
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in (kept, fresh)]
    return f"the metadata differ ({' and '.join(digests)})"
