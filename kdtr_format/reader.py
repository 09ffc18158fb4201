"""Reading a KDTR file: a validated memory map and read-only arrays that point into it.

Opening checks every byte outside the payloads (structure.py) and reads none inside. A payload is
checked once, when its tensor is first read or all at once by Bundle.verify().
"""

import hashlib
import os
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kdtr.contract.errors import BundleError
from kdtr.kdtr_format.int4 import unpack_i4x2
from kdtr.kdtr_format.layout import DTYPE_BY_NAME
from kdtr.kdtr_format.named_arrays import NamedArrays, UnknownNameError
from kdtr.kdtr_format.structure import Entry, Structure, read_structure


class _Region:
    """Memory of one payload, and no way from it to the rest of the file.

    numpy.frombuffer(map) would do, but leaves the whole map in `array.base`, and with it an answer
    key within reach of an engine that holds only inputs.
    """

    __slots__ = ("_bytes",)

    def __init__(self, mapped: mmap, offset: int, n_bytes: int) -> None:
        self._bytes = np.frombuffer(mapped, np.uint8, n_bytes, offset)  # keeps the map open

    @property
    def __array_interface__(self) -> dict[str, object]:
        pointer = (self._bytes.ctypes.data, True)  # True: read-only
        return {"shape": self._bytes.shape, "typestr": "|u1", "data": pointer, "version": 3}


class _Payloads:
    """The payloads of one mapped file, each checked before it is first handed out."""

    __slots__ = ("_checked", "_map")

    def __init__(self, mapped: mmap) -> None:
        self._map: mmap | None = mapped
        self._checked: set[str] = set()

    def close(self) -> None:
        if self._map is not None:
            # BufferError: arrays still point into it; the map goes when the last of them does
            with suppress(BufferError):
                self._map.close()
        self._map = None

    def mapped(self) -> mmap:
        if self._map is None:
            raise BundleError("the bundle is closed; read its tensors before closing it")
        return self._map

    def bytes_of(self, entry: Entry) -> np.ndarray:
        """Checked payload, uint8 [n_bytes], read-only, zero-copy."""
        payload = np.asarray(_Region(self.mapped(), entry.offset, entry.n_bytes))
        if entry.name not in self._checked:
            _check_payload(entry, payload)
            self._checked.add(entry.name)
        return payload

    def array_of(self, entry: Entry) -> np.ndarray:
        payload = self.bytes_of(entry)
        if entry.dtype == "i4x2":
            values = unpack_i4x2(payload, entry.shape)
            values.flags.writeable = False
            return values
        return payload.view(DTYPE_BY_NAME[entry.dtype].numpy).reshape(entry.shape)


def _check_payload(entry: Entry, payload: np.ndarray) -> None:
    tensor = f"tensor {entry.name!r}"
    actual = zlib.crc32(payload.data)
    if actual != entry.crc:
        raise BundleError(
            f"{tensor} has checksum {entry.crc:08x}, its {entry.n_bytes} bytes at {entry.offset} "
            f"give {actual:08x}; the file was cut or edited"
        )
    if entry.dtype == "bool" and payload.size and payload.max() > 1:
        index = int(np.argmax(payload > 1))
        raise BundleError(
            f"{tensor} is bool, but element {index} is {payload[index]}; expected 0 or 1"
        )
    if entry.dtype == "i4x2" and prod(entry.shape) % 2 and payload[-1] >> 4:
        raise BundleError(f"{tensor} has the spare nibble {payload[-1] >> 4:#x}; expected 0")


class UnknownTensorError(BundleError, UnknownNameError):
    """A tensor that the bundle or view does not have."""


class _Tensors(NamedArrays):
    """What Bundle and TensorView share: entries, and the payloads that they describe."""

    __slots__ = ("_entries", "_payloads")
    unknown = UnknownTensorError

    def __init__(self, entries: Mapping[str, Entry], payloads: _Payloads) -> None:
        super().__init__(entries)
        self._entries = entries
        self._payloads = payloads

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The directory, in file order: bytewise by name."""
        return tuple(self._entries.values())

    def payload(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored, uint8 [n_bytes], read-only, zero-copy: i4x2 packed, say."""
        self._require(name)
        return self._payloads.bytes_of(self._entries[name])

    def _load(self, name: str) -> np.ndarray:
        return self._payloads.array_of(self._entries[name])


class TensorView(_Tensors):
    """Some tensors of a bundle. No public attribute leads to the others, the path or the bundle.

    Refusals do not name the path either. Reading works until the bundle is closed; arrays already
    read stay valid after it.
    """

    __slots__ = ()


class Bundle(_Tensors):
    """An open KDTR file: a read-only mapping of its tensors, sorted bytewise by name.

    `bundle[name]` has the entry's shape and dtype and points into the file; i4x2 alone is unpacked
    into a copy, ml_dtypes.int4 (`payload(name)` has the packed bytes). Make one with Bundle.open.
    The file must not be changed in place while it is open: write_bundle replaces, it never edits.
    Reading from a file that was cut meanwhile ends the process with SIGBUS, as with every map.
    """

    __slots__ = ("_path", "_structure")

    def __init__(self, path: Path, mapped: mmap, structure: Structure) -> None:
        super().__init__({entry.name: entry for entry in structure.entries}, _Payloads(mapped))
        self._path = path
        self._structure = structure

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, private: bool = False) -> Self:
        """Map and validate the file; BundleError, with the path, says what is wrong with it.

        private  read it into memory first: whoever wrote it may still change or cut it
        """
        path = Path(path)
        with naming(path):
            mapped = _map_file(path, private=private)
            try:
                return cls(path, mapped, read_structure(mapped))
            except BaseException:
                mapped.close()
                raise

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's metadata; the bundle's own dict, so copy it before changing it."""
        return self._structure.metadata

    @property
    def version(self) -> tuple[int, int]:
        """The format's (major, minor); a minor above ours only adds what may be ignored."""
        return self._structure.header.major, self._structure.header.minor

    def verify(self) -> None:
        """Check every payload now; BundleError names the first tensor that fails."""
        with naming(self._path):
            self._payloads.mapped()  # a closed bundle without tensors is still closed
            for entry in self.entries:
                self._payloads.bytes_of(entry)

    def sha256(self) -> str:
        """SHA-256 of the whole file, in hex: the bundle's identity."""
        with naming(self._path):
            return hashlib.sha256(self._payloads.mapped()).hexdigest()

    def view(self, *prefixes: str) -> TensorView:
        """The tensors whose names start with one of `prefixes`, under their full names.

        End a prefix with "/": "inputs" alone would also select "inputs_expected/logits".
        """
        if "" in prefixes:
            raise BundleError("the prefix '' selects every tensor; name the parts to hand out")
        chosen = {n: e for n, e in self._entries.items() if n.startswith(prefixes)}
        return TensorView(chosen, self._payloads)

    def payload(self, name: str) -> np.ndarray:
        with naming(self._path):
            return super().payload(name)

    def __getitem__(self, name: str) -> np.ndarray:
        with naming(self._path):
            return super().__getitem__(name)

    def close(self) -> None:
        """Forget the file. Arrays already read stay valid; a second close does nothing."""
        self._payloads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Bundle {str(self._path)!r}, {len(self)} tensors>"


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path before the text of a refusal made inside."""
    try:
        yield
    except BundleError as error:
        raise type(error)(f"{path}: {error}") from None


def _map_file(path: Path, *, private: bool = False) -> mmap:
    try:
        mode = os.stat(path).st_mode  # before open, which would wait for a pipe's other end
        if stat.S_ISDIR(mode):
            raise BundleError("is a directory; expected a KDTR file")
        if not stat.S_ISREG(mode):
            raise BundleError("is not a regular file; expected a KDTR file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # mmap refuses it with a ValueError
                raise BundleError("the file is empty; expected a KDTR file")
            if private:
                content = file.read()
                mapped = mmap(-1, len(content))
                mapped.write(content)
                return mapped
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except FileNotFoundError:
        raise BundleError("no such file; expected a KDTR file") from None
    except (
        OSError,
        ValueError,
    ) as error:  # ValueError: a NUL in the path, a file emptied meanwhile
        raise BundleError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from error
