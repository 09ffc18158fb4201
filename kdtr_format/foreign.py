"""What a file that is not KDTR looks like, for the refusal's text."""

from mmap import mmap

from kdtr.kdtr_format.layout import MAGIC

_STARTS = (
    (b"GGUF", "GGUF"),
    (b"\x93NUMPY", "a NumPy .npy array"),
    (b"version https://git-lfs", "a Git LFS pointer (run git lfs pull)"),
    (b"\x89HDF", "HDF5"),
    (b"PAR1", "Parquet"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "Zstandard"),
    (b"{", "JSON"),
)


def looks_like(data: mmap | bytes) -> str:
    """A clause such as 'it looks like GGUF', from the first bytes of a file that is not empty."""
    start = bytes(data[:128])
    if MAGIC.startswith(start):
        return f"it has only {len(start)} bytes, the file was cut"
    if b"KDTR" in start[:8]:
        return f"its first bytes {start[:8].hex(' ')} were damaged, as a text-mode transfer does"
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        # the first member's name follows the 30 bytes of its local header
        kind = "a NumPy .npz archive" if b".npy" in start[30:] else "a zip archive"
        return f"it looks like {kind}"
    for magic, kind in _STARTS:
        if start.startswith(magic):
            return f"it looks like {kind}"
    if start[8:9] == b"{" and 8 + int.from_bytes(start[:8], "little") <= len(data):
        return "it looks like safetensors"
    return f"it starts with {start[:8].hex(' ')}"
