"""kdtr.h compiles strictly, reads what Python writes, writes the same bytes; and the fuzz."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kdtr.kdtr_format import Bundle, write_bundle
from kdtr.kdtr_format.layout import DTYPES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fuzz = _load(HERE / "fuzz_kdtr.py")

_missing = [language for language in ("c", "c++") if fuzz.compiler(language) is None]
pytestmark = [
    pytest.mark.skipif(
        bool(_missing) and os.environ.get("CI") != "true",
        reason=f"no compiler for {' and '.join(_missing)}: install gcc and g++, or set CC and CXX",
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compiles a source once for each set of flags."""
    folder, programs = tmp_path_factory.mktemp("c"), {}

    def build(source, *flags, language="c"):
        key = (source, flags, language)
        if key not in programs:
            program = folder / f"program{len(programs)}"
            programs[key] = fuzz.compile_c(source, program, *flags, language=language)
        return programs[key]

    return build


@pytest.fixture(scope="module")
def driver(built):
    return built(fuzz.DRIVER, "-std=c99", *fuzz.SANITIZED)


def run(*command):
    """(exit status, standard output) of a program that must not write to standard error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "" == done.stderr
    return done.returncode, done.stdout


def arrays(dtype, shape, rng):
    width = {"bool": 1, "i4x2": 1}.get(dtype.name, dtype.bits // 8)
    n = int(np.prod(shape))
    raw = rng.integers(0, {"bool": 2, "i4x2": 16}.get(dtype.name, 256), n * width, np.uint8)
    return raw.view(dtype.numpy).reshape(shape)


SHAPES = {
    "0-d": (),
    "empty": (0,),
    "empty, 3-d": (2, 0, 3),
    "one": (1,),
    "odd": (7,),
    "matrix": (3, 5),
    "8-d": (1, 2, 1, 3, 1, 2, 1, 1),
    "past 512 bytes": (11, 127),
}


@pytest.fixture(scope="module", params=[64, 256, 65536])
def bundle_path(request, tmp_path_factory):
    """Every dtype in every shape, and names that sort by bytes and by nothing else."""
    rng = np.random.default_rng(request.param)
    tensors = {f"{d.name}/{name}": arrays(d, s, rng) for d in DTYPES for name, s in SHAPES.items()}
    for name in ("a", "a/b", "a b", "ab", "é", "\U0001f333", "\uffff", "n" * 95):
        tensors[name] = arrays(DTYPES[12], (2,), rng)
    path = tmp_path_factory.mktemp("bundle") / "a.kdtr"
    write_bundle(path, tensors, {"k": ["é", 1, None]}, alignment=request.param)
    return path


# Compiling


@pytest.mark.parametrize("optimise", ["-O0", "-O3"])
@pytest.mark.parametrize(
    ("language", "standard"), [("c", "c99"), ("c", "c11"), ("c++", "c++11"), ("c++", "c++17")]
)
def test_it_compiles_without_a_warning_and_reads(built, bundle_path, language, standard, optimise):
    program = built(fuzz.DRIVER, f"-std={standard}", optimise, language=language)

    assert (0, fuzz.python_verdict(bundle_path) + "\n") == run(program, "show", bundle_path)


def test_the_declarations_alone_compile(tmp_path):
    """A second source file of a program, which leaves the implementation to the first."""
    (tmp_path / "a.c").write_text('#include "kdtr.h"\n#include "kdtr.h"\nint n = KDTR_BOOL;\n')

    for language in ("c", "c++"):
        fuzz.compile_c(tmp_path / "a.c", tmp_path / "a.o", "-c", language=language)


# Reading and writing


def test_c_reads_what_python_wrote(driver, bundle_path):
    assert (0, fuzz.python_verdict(bundle_path) + "\n") == run(driver, "show", bundle_path)


def test_c_writes_the_bytes_that_python_writes(driver, bundle_path, tmp_path):
    copy = tmp_path / "copy.kdtr"

    assert (0, "") == run(driver, "copy", bundle_path, copy)

    assert bundle_path.read_bytes() == copy.read_bytes()
    assert [copy] == list(tmp_path.iterdir())
    with Bundle.open(copy) as bundle:
        bundle.verify()


def test_a_bundle_without_tensors_goes_round(driver, tmp_path):
    path, copy = tmp_path / "none.kdtr", tmp_path / "copy.kdtr"
    write_bundle(path, {}, {})

    assert (0, "0 0 7b7d\n") == run(driver, "show", path)
    assert (0, "") == run(driver, "copy", path, copy)
    assert path.read_bytes() == copy.read_bytes()


@pytest.mark.parametrize("n", [*range(16), 510, 511, 512, 513, 519, 520, 4099])
def test_checksums_of_every_remainder(driver, tmp_path, n):
    write_bundle(tmp_path / "a.kdtr", {"a": np.arange(n).astype(np.uint8)}, {})

    assert run(driver, "show", tmp_path / "a.kdtr")[1].startswith("0 0 7b7d 61:u8:")


def test_threads_share_a_file(built, bundle_path):
    program = built(HERE / "c/threads.c", "-std=c99", "-O1", "-g", "-fsanitize=thread", "-pthread")

    done = subprocess.run([program, bundle_path], capture_output=True, text=True, check=False)

    if "unexpected memory mapping" in done.stderr:
        pytest.skip("this kernel lays out memory as this ThreadSanitizer does not know it")
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


def test_writing_replaces_a_file_and_steps_around_another_writers_sibling(driver, tmp_path):
    path, sibling = tmp_path / "a.kdtr", tmp_path / "a.kdtr.0.tmp"
    path.write_bytes(b"before")
    sibling.write_bytes(b"another's")

    assert (0, "") == run(driver, "put", path, '{"k":1}', "64", "t", "13", "1", "2", "0a0b")

    write_bundle(tmp_path / "same", {"t": np.array([10, 11], np.uint8)}, {"k": 1}, alignment=64)
    assert (tmp_path / "same").read_bytes() == path.read_bytes()
    assert b"another's" == sibling.read_bytes()


def test_after_a_failed_write_the_earlier_file_is_what_it_was(driver, tmp_path):
    source, path = tmp_path / "source", tmp_path / "a.kdtr"
    write_bundle(source, {"a": np.zeros(10_000)}, {})
    path.write_bytes(b"before")
    limited = "ulimit -f 8; trap '' XFSZ; exec \"$@\""  # files of at most 8 KiB

    answer = run("bash", "-c", limited, "bash", driver, "copy", source, path)

    assert (9, f"9 {path}: cannot be written: File too large\n") == answer
    assert b"before" == path.read_bytes()
    assert {source, path} == set(tmp_path.iterdir())


U8 = ("t", "13", "1", "2", "0102")
UNSTORABLE = {
    "alignment": (("{}", "96"), "alignment is 96; expected a power of two from 64 to 65536"),
    "metadata": (("[]", "64"), "metadata of 2 bytes is not canonical JSON; expected {..} in UTF-8"),
    "twice": (("{}", "64", *U8, *U8), "tensor 't' is there twice; expected unique names"),
    "no name": (
        ("{}", "64", "", *U8[1:]),
        "tensor '' has a name that cannot be stored; expected 1",
    ),
    "long name": (("{}", "64", "n" * 96, *U8[1:]), "n' has a name that cannot be stored"),
    "not UTF-8": (
        ("{}", "64", b"\xff", *U8[1:]),
        r"tensor '\xff' has a name that cannot be stored",
    ),
    "dtype": (("{}", "64", "t", "15", "0", "00"), "tensor 't' has dtype code 15; expected 1 to 14"),
    "ndim": (("{}", "64", "t", "13", "9", *"111111111", "00"), "has 9 dimensions; at most 8"),
    "elements": (("{}", "64", "t", "13", "2", str(2**63), "2", "00"), "at most 2**48 elements"),
    "no data": (("{}", "64", "t", "1", "0", ""), "tensor 't' has no data; expected 8 bytes"),
    "bool": (
        ("{}", "64", "t", "14", "1", "2", "0102"),
        "is bool, but element 1 is 2; expected 0 or",
    ),
    "nibble": (("{}", "64", "t", "10", "1", "3", "2131"), "has the spare nibble 0x3; expected 0"),
}


@pytest.mark.parametrize(("words", "text"), UNSTORABLE.values(), ids=UNSTORABLE)
def test_what_cannot_be_stored_is_refused_before_writing(driver, tmp_path, words, text):
    path = tmp_path / "a.kdtr"
    path.write_bytes(b"before")

    status, said = run(driver, "put", path, *words)

    assert (9, "9 ") == (status, said[:2])
    assert text in said
    assert [path] == list(tmp_path.iterdir())
    assert b"before" == path.read_bytes()


def test_a_place_that_cannot_be_written_is_named(driver, tmp_path):
    inside, folder = tmp_path / "nowhere/a.kdtr", tmp_path / "folder"
    folder.mkdir()

    assert (
        f"9 {inside}: cannot be written: No such file or directory\n"
        == (run(driver, "put", inside, "{}", "64")[1])
    )
    assert (
        f"9 {folder}: cannot be written: Is a directory\n"
        == (run(driver, "put", folder, "{}", "64")[1])
    )
    assert [folder] == list(tmp_path.iterdir())


# Refusals


def test_files_that_are_none(driver, tmp_path):
    """Step 1, through kdtr_open; Python says the same."""
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")

    for name, text in {
        "empty": "the file is empty",
        "folder": "is a directory",
        "pipe": "is not a regular file",
        "missing": "no such file",
    }.items():
        path = tmp_path / name
        said = f"1 {path}: {text}; expected a KDTR file\n"
        assert (0, said) == run(driver, "show", path)
        assert f"1 {text}; expected a KDTR file" == fuzz.python_verdict(path)


@pytest.mark.parametrize("foreign", [True, False])
def test_a_huge_file_is_refused_by_its_header_without_memory(driver, tmp_path, foreign):
    """A sparse file larger than any memory: the first 128 bytes decide, not an allocation."""
    path = tmp_path / "a.kdtr"
    write_bundle(path, {"x": np.zeros(1)}, {})
    size = path.stat().st_size
    if foreign:
        path.write_bytes(b"GGUF")
    try:
        os.truncate(path, 2**43)
    except OSError:
        pytest.skip("the file system holds no file of 8 TiB")

    _, said = run(driver, "show", path)

    cut = f"the header says {size} bytes, the file has {2**43}; the file was cut or edited\n"
    wanted = "not a KDTR file: it starts with 47 47 55 46 00 00 00 00" if foreign else cut
    assert said.startswith(f"2 {path}: {wanted}")


def test_text_files_are_told_by_their_first_bytes(driver, tmp_path):
    (tmp_path / "a").write_bytes(b"GGUF")

    assert (
        f"2 {tmp_path / 'a'}: not a KDTR file: it starts with 47 47 55 46; "
        "expected it to start with 89 4b 44 54 52 0d 0a 1a\n"
    ) == run(driver, "show", tmp_path / "a")[1]


# Every structural refusal of FORMAT.md and of the payloads, as fuzz_kdtr.without_values writes it.
REFUSALS = """
1 the file is empty; expected a KDTR file
2 not a KDTR file
2 the file has # bytes, the header alone takes #; the file was cut or edited
2 format version #.#, this reader knows #.x; use the kdtr that wrote the file, or regenerate it
2 header checksum is #, its bytes give #; the file was cut or edited
2 needs the features #, this reader knows none; use a newer kdtr
2 header_size is #; expected #
2 entry_size is #; expected #
2 the header's reserved bytes are #; expected zeros
2 alignment is #; expected a power of two from # to #
2 the header says # bytes, the file has #; the file was cut or edited
2 dir_offset is #; expected #
2 # entries of # bytes do not fit a file of #
2 dir_size is #; expected #
2 meta_offset is #; expected #
2 meta_size is #; at most #
2 data_offset is #; expected #
2 data_offset is #, past the file's end at #; the file was cut or edited
3 directory checksum is #, its bytes give #; the file was cut or edited
3 metadata checksum is #, its bytes give #; the file was cut or edited
4 entry # has an empty name
4 entry #: the name has no NUL in its # bytes
4 entry #: the name N is padded with non-zero bytes
4 entry #: the name N is not UTF-# at byte #
4 tensor N is there twice; expected unique names
4 tensor N comes after N; expected bytewise order
4 tensor N has flags # and reserved #; expected zeros
4 tensor N has dtype code #; expected # to #
4 tensor N has # dimensions; at most #
4 tensor N has # dimensions, but the unused ones are #; expected zeros
4 tensor N has shape #; at most #**# elements, zeros counted as ones
4 tensor N spans bytes #..#, but # takes #; the file was cut or edited
4 tensor N starts at byte #, before byte # where the part before it ends; expected #
4 tensor N starts at byte #, not a multiple of the alignment #; expected #
4 tensor N starts at byte #, which leaves a hole; expected #
4 tensor N spans bytes #..#, the file ends at #; the file was cut or edited
4 the last tensor ends at byte #, the file at #; expected no trailing bytes
5 byte # is #, in the gap #..#; expected zeros
6 metadata is not UTF-# at byte #
7 tensor N has checksum #, its # bytes at # give #; the file was cut or edited
7 tensor N is bool, but element # is #; expected # or #
7 tensor N has the spare nibble #; expected #
""".strip().splitlines()


@pytest.fixture(scope="module")
def campaign(driver, tmp_path_factory):
    return fuzz.fuzz(driver, tmp_path_factory.mktemp("fuzz"), run=1, indices=range(4000))


def test_both_readers_say_the_same_of_damaged_files(campaign):
    assert [] == campaign.faults
    assert 4000 == sum(campaign.counts.values())


def test_the_damage_reaches_every_refusal(campaign):
    assert [] == [text for text in REFUSALS if text not in campaign.texts]


@pytest.mark.parametrize("said", [fuzz.REFUSED, fuzz.LOADS, fuzz.EITHER])
@pytest.mark.parametrize("kind", [fuzz.SEALED, fuzz.RESEALED])
def test_the_damage_is_of_every_class(campaign, kind, said):
    assert 20 < sum(n for (k, s, _), n in campaign.counts.items() if (k, s) == (kind, said))


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """Damaged files, and the Python reader's verdicts."""
    folder = tmp_path_factory.mktemp("judged")
    seeds, files, verdicts = fuzz.make_seeds(folder), [], []
    for index in range(3000):
        files.append(fuzz.make_mutant(seeds, 1, index).data)
        (folder / "mutant").write_bytes(files[-1])
        verdicts.append(fuzz.python_verdict(folder / "mutant"))
    return files, verdicts


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("t->offset > f->n_bytes || t->n_bytes >", "t->n_bytes >"),
        ("c < 0xc2 ? n", "c < 0xc0 ? n"),
        ("if (c == 0xed) high = 0x9f;", ""),
        ("product > kdtr_max_elements_ / n", "0"),
        ("if (order < 0)\n        return", "if (0)\n        return"),
        ("flags || reserved", "flags"),
        ("at < start; at++", "at + 1 < start; at++"),
        ("if (size < kdtr_header_size_)", "if (0)"),
        ("f->n_entries > size / kdtr_entry_size_", "0"),
        ("p[t->n_bytes - 1] >> 4)\n", "p[0] >> 4)\n"),
    ],
)
def test_a_planted_fault_is_found(judged, tmp_path, before, after):
    """Each is a mistake that a reader of FORMAT.md could make."""
    files, verdicts = judged
    header = (ROOT / "kdtr_format/kdtr.h").read_text(encoding="utf-8")
    assert 1 == header.count(before)
    (tmp_path / "kdtr.h").write_text(header.replace(before, after), encoding="utf-8")
    flags = ("-std=c99", f"-I{tmp_path}", *fuzz.SANITIZED, "-Wno-error")
    faulty = fuzz.compile_c(fuzz.DRIVER, tmp_path / "driver", *flags)

    said = fuzz.c_verdicts(faulty, files)

    assert not all(map(fuzz.agree, verdicts, said))  # a crash is a line that agrees with nothing


# The example


@pytest.fixture(scope="module")
def example(built):
    return built(ROOT / "docs/examples/c/golden_tokens.c", "-std=c99", *fuzz.SANITIZED)


def test_the_example_prints_the_tokens(example, tmp_path):
    """A bundle named as the golden one is, with numbers that need their sign and all their bits."""
    rounds = [[5], [-7, 2**40], [], [3]]
    tensors = {f"expect/ar/round{i}/emitted": np.array(r, np.int64) for i, r in enumerate(rounds)}
    tensors |= {"expect/ar/chunk0/root": np.array(11), "expect/ar/round0/root": np.array(99)}
    write_bundle(tmp_path / "a.kdtr", tensors, {})

    assert (0, f"11\n5\n-7\n{2**40}\n3\n") == run(example, tmp_path / "a.kdtr")


def test_the_example_prints_the_golden_tokens(example):
    path = ROOT / "build/golden/tiny.kdtr"
    if not path.exists():
        pytest.skip("no build/golden/tiny.kdtr: make gate records it")
    with Bundle.open(path) as bundle:
        names = [f"expect/ar/round{i}/emitted" for i in range(23)]
        tokens = [int(bundle["expect/ar/chunk0/root"]), *np.concatenate([bundle[n] for n in names])]

    assert 24 == len(tokens)
    assert (0, "".join(f"{token}\n" for token in tokens)) == run(example, path)


def test_the_example_says_what_is_wrong(example, tmp_path):
    write_bundle(tmp_path / "a.kdtr", {"x": np.zeros(1)}, {})
    write_bundle(tmp_path / "b.kdtr", {"expect/ar/chunk0/root": np.zeros((), np.int32)}, {})

    for path, text in {
        "a.kdtr": "no tensor 'expect/ar/chunk0/root' among 1\n",
        "b.kdtr": "the tokens are not i64\n",
        "c.kdtr": f"{tmp_path / 'c.kdtr'}: no such file; expected a KDTR file\n",
    }.items():
        done = subprocess.run(
            [example, tmp_path / path], capture_output=True, text=True, check=False
        )
        assert (1, "", text) == (done.returncode, done.stdout, done.stderr)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_the_example_says_when_its_output_is_lost(example, tmp_path):
    tensors = {"expect/ar/chunk0/root": np.array(11), "expect/ar/round0/emitted": np.array([5])}
    write_bundle(tmp_path / "a.kdtr", tensors, {})

    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [example, tmp_path / "a.kdtr"], stdout=full, stderr=subprocess.PIPE, check=False
        )

    assert (1, b"cannot write the tokens\n") == (done.returncode, done.stderr)


# The test's own tools


@pytest.mark.parametrize(
    ("python", "c"),
    [
        ("4 tensor 'a' is there twice", r"4 tensor 'b' is there twice"),
        ("2 dir_size is 5; expected 6", "2 dir_size is 5; expected 7"),
        ("3 metadata checksum is 0", "0 0 7b7d"),
        ("6 metadata is not UTF-8: invalid start byte at byte 3", "0 0 7b7d"),
        ("6 metadata is not JSON", "4 entry 0 has an empty name"),
        ("0 0 7b7d", "0 0 7b7d 61:u8:"),
        ("0 0 7b7d", "crash, exit status 1"),
    ],
)
def test_verdicts_that_differ(python, c):
    assert not fuzz.agree(python, c)


@pytest.mark.parametrize(
    ("python", "c"),
    [
        ("4 entry 0: the name b'\\xff' is not UTF-8 at byte 0: invalid start byte",) * 2,
        (
            "6 metadata is not UTF-8: invalid start byte at byte 3",
            "6 metadata is not UTF-8 at byte 3",
        ),
        ("6 metadata is not JSON: no", "0 0 7b7d"),
        ("6 metadata is not JSON: no", "7 tensor 'a' is bool"),
        ("4 tensor 'é' is there twice", r"4 tensor '\xc3\xa9' is there twice"),
        (f"4 spans bytes 5..{2**64 + 5}", "4 spans bytes 5..past 2**64"),
    ],
)
def test_verdicts_that_agree(python, c):
    assert fuzz.agree(python, c)


def test_a_mutant_is_the_same_every_time(tmp_path):
    seeds = fuzz.make_seeds(tmp_path)

    assert fuzz.make_mutant(seeds, 1, 17) == fuzz.make_mutant(fuzz.make_seeds(tmp_path), 1, 17)
