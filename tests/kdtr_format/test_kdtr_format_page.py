"""FORMAT.md is true: its reader reads what the writer writes, its tables are the program's."""

import json
import re
from importlib.resources import files

import numpy as np
import pytest

from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.kdtr_format.layout import DTYPES, ENTRY, HEADER

PAGE = (files("kdtr.kdtr_format") / "FORMAT.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def read_kdtr():
    """The page's own reader; it may import struct and numpy, and nothing of kdtr."""
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert ["import struct", "import numpy as np"] == re.findall(
        r"^.*import.*$", source, re.MULTILINE
    )
    namespace = {}
    exec(source, namespace)  # the page is ours
    return namespace["read_kdtr"]


def test_the_pages_reader_reads_every_dtype_as_the_program_does(tmp_path, read_kdtr):
    rng = np.random.default_rng(7)
    tensors = {d.name: rng.integers(0, 2, (3, 5)).astype(d.numpy) for d in DTYPES}
    tensors |= {
        "scalar": np.float64(-0.0),
        "empty": np.zeros((2, 0), np.int64),
        "é/ü": np.arange(3),
    }
    write_bundle(tmp_path / "a.kdtr", tensors, {"case": "Größe", "n": [1, 2]})

    arrays, metadata = read_kdtr(tmp_path / "a.kdtr")

    with Bundle.open(tmp_path / "a.kdtr") as bundle:
        assert list(bundle) == list(arrays)
        assert bundle.metadata == json.loads(metadata)
        for name, array in arrays.items():
            assert bundle.payload(name).tobytes() == array.tobytes()
            if bundle[name].dtype.isbuiltin == 1:  # not one of ml_dtypes
                np.testing.assert_array_equal(bundle[name], array, strict=True)
        assert tensors["bf16"].shape == arrays["bf16"].shape
        assert (8,) == arrays["i4x2"].shape


def test_the_page_lists_the_programs_dtypes():
    rows = re.findall(r"\| (\d+) \| ([a-z]\w+) \| (\d+) \|", PAGE[PAGE.index("| code |") :])

    assert {(d.code, d.name, d.bits) for d in DTYPES} == {(int(c), n, int(b)) for c, n, b in rows}


@pytest.mark.parametrize(("part", "layout"), [("header", HEADER), ("entry", ENTRY)])
def test_the_pages_offsets_fill_the_struct(part, layout):
    """Each row's fields have the row's type; end to end they fill the struct without a hole."""
    table = PAGE[PAGE.index(f"| {part} | at |") :].split("\n\n")[0]
    end = 0
    for names, offsets, kind in re.findall(
        r"^\| ([a-z_, ]+) \| ([\d, ]+) \| ([\w ]+) \|", table, re.M
    ):
        count, bits = re.fullmatch(r"(?:(\d+) (?:x )?)?(?:u(\d+)|bytes)", kind).groups()
        width = int(count or 1) * int(bits or 8) // 8
        assert len(names.split(",")) == len(offsets.split(","))
        for offset in map(int, offsets.split(",")):
            assert end == offset, names
            end += width

    assert layout.size == end


def test_the_page_fits_two_screens():
    assert len(PAGE.splitlines()) <= 100
    assert max(map(len, PAGE.splitlines())) <= 130
