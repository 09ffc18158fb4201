"""Golden bundles that were damaged: refused as such, or read as they were, and nothing else.

These laws speak of no engine and cite no rule: FORMAT.md and docs/golden-bundles.md say what a
file is. The two readers are held together by tests of the format.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from kdtr.conformance.bundle import GoldenBundle
from kdtr.conformance.case import CasePlan, Drafted, Planted
from kdtr.conformance.golden import record_bundle
from kdtr.conformance.seed_model import seed_tensors
from kdtr.contract import BundleError
from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.property_tests.profiles import cheap
from kdtr.property_tests.strategies import PLAIN

_PLANS = (
    CasePlan("y", "a Y", ("MASK-2",), (Planted((-1, 0, 0, 2), (0, 2)),), chunks=((3, 0),)),
    CasePlan("built", "from drafts", ("TREE-3",), (Drafted((0,), budget=2),), root=5),
)


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="kdtr-bundles-")  # until the process ends


@functools.cache
def golden() -> bytes:
    """A golden bundle of the plainest model with experts, recorded once in a process."""
    config = PLAIN.replace(first_k_dense_replace=0, vocab_size=11)
    path = Path(_folder().name) / "golden.kdtr"
    record_bundle(path, {"name": "damaged"}, config, seed_tensors(config, 0), _PLANS, alignment=64)
    return path.read_bytes()


def _written(data: bytes) -> Path:
    path = Path(_folder().name) / "read.kdtr"
    path.write_bytes(data)
    return path


def tensors_of(data: bytes) -> list[object]:
    """All that the reader of the format says of a file, or BundleError."""
    with Bundle.open(_written(data)) as bundle:
        bundle.verify()
        arrays = {name: bundle[name] for name in bundle.names()}
        found: list[object] = [
            (name, array.dtype.name, array.shape, array.tobytes()) for name, array in arrays.items()
        ]
        return [*found, json.dumps(bundle.metadata)]


def cases_of(data: bytes) -> list[object]:
    """What the judge reads in it, or BundleError."""
    opened = GoldenBundle.open(_written(data))
    found: list[object] = [opened.config, opened.weights_sha256]
    found += [case.inputs.case_id for case in opened.cases]
    opened.close()
    return found


Damage = Callable[[bytes], bytes]


@st.composite
def places(draw: st.DrawFn) -> int:
    """An offset: of the header, the directory, the metadata or the payloads, all as likely."""
    edges = parts()
    part = draw(st.integers(0, len(edges) - 2))
    return draw(st.integers(edges[part], edges[part + 1] - 1))


@functools.cache
def parts() -> tuple[int, ...]:
    """Where the parts of the golden bundle begin, and its end."""
    data = golden()
    with Bundle.open(_written(data)) as bundle:
        payloads = min(entry.offset for entry in bundle.entries)
        n_entries = len(bundle.entries)
    header, directory = 128, 128 + 192 * n_entries  # FORMAT.md
    return 0, header, directory, payloads, len(data)


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, Damage]:
    """What is done to the bytes, in words and as a function."""
    at, n = draw(places()), draw(st.sampled_from([1, 8, 64, 200]))
    kind = draw(st.sampled_from(["flip", "cut", "swap", "insert", "delete", "set"]))
    if kind == "flip":
        bit = draw(st.integers(0, 7))
        return (
            f"bit {bit} of byte {at} flipped",
            lambda d: d[:at] + bytes(b ^ 1 << bit for b in d[at : at + 1]) + d[at + 1 :],
        )
    if kind == "cut":
        return f"cut to {at} bytes", lambda d: d[:at]
    if kind == "swap":
        other = draw(places())
        low, high = sorted((at, other))
        n = min(n, high - low)
        return (
            f"{n} bytes at {low} and at {high} swapped",
            lambda d: (
                d[:low] + d[high : high + n] + d[low + n : high] + d[low : low + n] + d[high + n :]
            ),
        )
    if kind == "insert":
        new = draw(st.sampled_from([bytes(n), b"\xff" * n]))
        return f"{n} times {new[0]:#x} inserted at {at}", lambda d: d[:at] + new + d[at:]
    if kind == "delete":
        return f"{n} bytes at {at} deleted", lambda d: d[:at] + d[at + n :]
    value = draw(st.integers(0, 255))
    return f"byte {at} = {value}", lambda d: d[:at] + bytes([value]) + d[at + 1 :]


@cheap()
@given(damage=st.lists(damages(), min_size=1, max_size=3))
def test_a_damaged_bundle_is_refused_or_unharmed(damage: list[tuple[str, Damage]]) -> None:
    """FORMAT.md: a file whose bytes were flipped, cut, swapped, inserted or deleted is refused
    with BundleError, or reads as it did; a reader raises nothing else."""
    data = golden()
    for _, harm in damage:
        data = harm(data)

    said = [words for words, _ in damage]
    for read in (tensors_of, cases_of):
        try:
            found = read(data)
        except BundleError:
            event(f"refused by {read.__name__}")
        else:
            event(f"unharmed for {read.__name__}")
            assert read(golden()) == found, said


def _reshaped(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)[: array.size // 2]


_CHANGES: dict[str, Callable[[np.ndarray], np.ndarray | None]] = {
    "removed": lambda array: None,
    "one element less": _reshaped,
    "float32": lambda array: array.astype(np.float32),
    "int64": lambda array: np.nan_to_num(array.astype(np.float64)).astype(np.int64),
    "zeros": np.zeros_like,
    "NaN": lambda array: np.full(array.shape, np.nan),
    "large": lambda array: np.full(array.shape, 2**31 if array.dtype.kind == "i" else 3e38),
    "negative": lambda array: (
        -np.ones(array.shape, array.dtype if array.dtype.kind == "i" else "f8")
    ),
}
_VALUES = [None, 0, -1, "", "x", [], {}, [None], {"name": 1}, 2**40, True]


@given(data=st.data())
def test_a_bundle_with_other_contents_is_refused_or_read(data: st.DataObject) -> None:
    """docs/golden-bundles.md: a well-formed file that is no golden bundle, because a tensor is
    missing, misshapen or out of range, or because its metadata say something else, is refused with
    BundleError; a reader raises nothing else."""
    source = Path(_folder().name) / "golden.kdtr"
    golden()
    with Bundle.open(source) as bundle:
        tensors = {name: np.array(bundle[name]) for name in bundle.names()}
        metadata = json.loads(json.dumps(bundle.metadata))
    if data.draw(st.booleans(), label="metadata"):
        holder, keys = metadata, [data.draw(st.sampled_from(sorted(metadata)), label="key")]
        inner = metadata[keys[0]]
        inner = inner[0] if isinstance(inner, list) else inner
        if isinstance(inner, dict) and data.draw(st.booleans(), label="within"):
            holder, keys = inner, [data.draw(st.sampled_from(sorted(inner)), label="inner key")]
        holder[keys[0]] = data.draw(st.sampled_from(_VALUES), label="value")
    else:
        part = data.draw(st.sampled_from(["config/", "input/", "expect/", "weights/"]))
        names = [name for name in tensors if name.startswith(part)]
        name = data.draw(st.sampled_from(names), label="tensor")
        change = data.draw(st.sampled_from(sorted(_CHANGES)), label="change")
        with np.errstate(all="ignore"):
            changed = _CHANGES[change](tensors.pop(name))
        if changed is not None:
            tensors[name] = changed
    path = Path(_folder().name) / "changed.kdtr"
    write_bundle(path, tensors, metadata, alignment=64)

    try:
        GoldenBundle.open(path).close()
    except BundleError:
        event("refused")
    else:
        event("read")
