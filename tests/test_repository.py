"""No file of the repository says where one machine keeps things, or where packages come from."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Written so that this file does not fit its own patterns.
FORBIDDEN = {
    "a path of one machine": re.compile(
        r"(?<![\w.}/-])/(?:[r]oot|[w]ork|[h]ome/\w+|Users/\w+)/[\w.-]*"
    ),
    "a package index": re.compile(
        r"[p]ypi\.|[p]ythonhosted\.|--(?:extra-)?[i]ndex-url|https?://\S*/[s]imple\b",
    ),
}


def machine_words(text: str) -> list[str]:
    """A sentence for each mention, with its line."""
    return [
        f"line {number} names {what}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        for match in pattern.finditer(line)
    ]


def text_files() -> list[Path]:
    """Tracked files, and new ones that are not ignored, except binary ones and links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    files = [ROOT / name.decode() for name in listed if name]
    return [f for f in files if f.is_file() and not f.is_symlink() and b"\0" not in f.read_bytes()]


def test_no_file_names_a_machine_or_an_index():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: which files belong to the project is not known")
    files = text_files()

    assert {ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / "contract/RULES.md"} <= set(files)
    assert [] == [
        f"{file.relative_to(ROOT)} {said}"
        for file in files
        for said in machine_words(file.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(
    "mention",
    [
        "/{}/main/engine".format("work"),
        "/{}/.cache".format("root"),
        "/{}/ada/kdtr".format("home"),
        "{}.org".format("pypi"),
        "--{}-url".format("index"),
        "http://mirror.local/{}/".format("simple"),
    ],
)
def test_a_mention_is_reported_with_its_line(mention):
    (said,) = machine_words(f"first line\nsee {mention}\n")

    assert said.startswith("line 2 names a ")


@pytest.mark.parametrize(
    "text", ["round1/root/tokens", "tree/work/rows", "the root / bonus pair", "a simple index"]
)
def test_names_in_bundles_are_not_paths(text):
    assert [] == machine_words(text)
