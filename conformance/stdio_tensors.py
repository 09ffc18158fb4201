"""The tensors of the stdio protocol: KDTR files in a directory that vanishes with the engine.

Answers lie under their own names, traced stages under `trace/<stage>` or `trace/<stage>/<layer>`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from kdtr.contract import EngineError, KdtrError
from kdtr.kdtr_format import Bundle, write_bundle

Traced = list[tuple[str, int | None, np.ndarray]]

# What each verb's file holds beside the stages; verify may leave its logits out.
ANSWERS: Mapping[str, tuple[str, ...]] = {
    "forward_tokens": ("logits",),
    "verify": ("logits",),
    "snapshot": ("tokens", "positions", "c_kv", "k_pe"),
}
_OPTIONAL = frozenset({"verify"})
_TRACED = re.compile(r"trace/([^/]+)(?:/(0|[1-9]\d{0,5}))?")
_MEMORY = Path("/dev/shm")
_ENOUGH = 2**30  # bytes free: containers often have 64 MiB there, less than a large trace
# KDTR has no 16-bit integers: they travel as the next wider ones, which hold the same values
_WIDER = {np.dtype(np.int16): np.int32, np.dtype(np.uint16): np.uint32}


class Scratch:
    """A private directory, removed with all in it when asked, when forgotten, or at exit."""

    def __init__(self, *, in_memory: bool) -> None:
        where = _MEMORY if in_memory and _has_room(_MEMORY) else None
        _sweep(where or Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=f"kdtr-stdio-{os.getpid()}-", dir=where))
        self._count = 0
        self._end = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)

    def new_path(self) -> Path:
        """Of a file that is not there yet."""
        self._count += 1
        return self.path / f"{self._count}.kdtr"

    def remove(self) -> None:
        self._end()


def _sweep(where: Path) -> None:
    """Remove what processes left that were killed before they could."""
    for path in where.glob("kdtr-stdio-*-*"):
        owner = path.name.split("-")[2]
        if not owner.isdigit() or int(owner) == os.getpid():
            continue
        try:
            os.kill(int(owner), 0)
        except ProcessLookupError:
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # somebody else's, and alive


def _has_room(directory: Path) -> bool:
    try:
        return shutil.disk_usage(directory).free >= _ENOUGH
    except OSError:
        return False


def write_tensors(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """BundleError when one cannot be stored."""
    wide = {
        name: array.astype(_WIDER.get(array.dtype, array.dtype), copy=False)
        for name, array in arrays.items()
    }
    write_bundle(path, wide, {})


def trace_name(stage: str, layer: int | None) -> str:
    """The tensor's name of a traced stage. EngineError for what no name can say.

    >>> trace_name("hidden", 3)
    'trace/hidden/3'
    """
    name = f"trace/{stage}" if layer is None else f"trace/{stage}/{layer}"
    if _split(name) != (stage, layer):
        raise EngineError(f"trace of {stage!r} at layer {layer!r}; expected a stage and its layer")
    return name


def _split(name: str) -> tuple[str, int | None] | None:
    found = _TRACED.fullmatch(name)
    if found is None:
        return None
    return found[1], None if found[2] is None else int(found[2])


def read_tensors(
    verb: str, path: Path, *, traced: bool, answered: bool
) -> tuple[dict[str, np.ndarray], Traced]:
    """The answers and the traced stages in a reply's file, which is deleted.

    traced    whether stages were asked for
    answered  whether the verb succeeded; a refusal may still show stages
    EngineError when the file is no KDTR file, or holds other tensors.
    """
    answers = ANSWERS.get(verb, ()) if answered else ()
    try:
        with Bundle.open(path, private=True) as bundle:
            found = {name: bundle[name] for name in bundle.names()}
    except KdtrError as error:
        raise EngineError(f"the file of the reply: {error}") from None
    finally:
        delete(path)
    stages: Traced = []
    for name in [name for name in found if name not in answers]:
        split = _split(name) if traced else None
        if split is None:
            expected = [*answers, *(["trace/<stage>", "trace/<stage>/<layer>"] if traced else [])]
            raise EngineError(
                f"the file of the reply holds {name!r}; expected {', '.join(expected) or 'no file'}"
            )
        stages.append((*split, found.pop(name)))
    return found, stages


def check_answers(verb: str, found: Mapping[str, Any]) -> None:
    """EngineError when the file lacks a tensor that the verb answers with."""
    missing = [name for name in ANSWERS.get(verb, ()) if name not in found]
    if missing and verb not in _OPTIONAL:
        raise EngineError(
            f"the reply comes without {', '.join(missing)}; expected them in the file that the "
            "request names in `out`, and `wrote` true"
        )


def delete(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
