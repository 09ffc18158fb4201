"""What is built, declared and installed agrees with the folders."""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROOMS = (
    *("contract", "reference", "engine", "adapters", "kdtr_format", "conformance"),
    *("property_tests", "pytest_plugin"),
)
# For readers of the repository, not for users of the package.
NOT_SHIPPED = ("README.md",)

# One worker builds and installs, once.


def room_files() -> set[str]:
    """Every file of the rooms that belongs in the wheel, as `contract/tree.py`."""
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*") if file.is_file())
    paths = {file.relative_to(ROOT) for file in files if file.name not in NOT_SHIPPED}
    hidden = {path for path in paths if any(p == "__pycache__" or p[0] == "." for p in path.parts)}
    return {path.as_posix() for path in paths - hidden}


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with wheel and sdist, built from a copy: setuptools writes into its source."""
    folder = tmp_path_factory.mktemp("packaging")
    products = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=products)
    code = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    command = [sys.executable, "-c", code]

    build = subprocess.run(
        command, cwd=folder / "source", capture_output=True, text=True, check=False
    )

    assert build.returncode == 0, build.stdout + build.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> Iterator[zipfile.ZipFile]:
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return HeaderParser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_files_of_the_rooms_and_nothing_else(wheel):
    """If a file is missing, declare its package or pattern in pyproject.toml, [tool.setuptools]."""
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}

    assert [] == sorted({f"kdtr/{file}" for file in room_files()} - shipped)
    assert [] == sorted(shipped - {f"kdtr/{file}" for file in room_files()})


def test_the_wheel_carries_the_licence(wheel, metadata):
    carried = [name for name in wheel.namelist() if name.endswith(".dist-info/licenses/LICENSE")]

    assert "Apache-2.0" == metadata["License-Expression"]
    assert [(ROOT / "LICENSE").read_bytes()] == [wheel.read(name) for name in carried]


def test_the_sdist_builds_the_same_package_and_holds_no_links_or_tests(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    files = {member.name.partition("/")[2] for member in members}

    assert room_files() | {"pyproject.toml", "LICENSE", "README.md"} <= files
    assert not [member.name for member in members if not member.isreg()]
    assert not [file for file in files if file.startswith(("tests/", "typings/"))]


def test_users_get_the_runtime_dependencies_and_neither_cupy_nor_test_tools(metadata):
    required = [Requirement(text) for text in metadata.get_all("Requires-Dist")]

    assert ">=3.11" == metadata["Requires-Python"]
    assert {"numpy", "ml_dtypes", "safetensors", "rich"} == {
        requirement.name for requirement in required if requirement.marker is None
    }
    assert {
        *("cupy-cuda12x", "cupy-cuda13x", "gguf", "hf", "llamacpp", "parquet"),
        *("compile", "pytest", "properties", "campaign", "ray", "test", "dev"),
    } == set(metadata.get_all("Provides-Extra"))


# Imports every room with the dependencies of this environment, but without its editable finder.
IMPORT_ALL = """
import importlib, json, sys
from importlib.resources import files
sys.path += sys.argv[1:3]
rooms = [importlib.import_module("kdtr." + room) for room in sys.argv[3:]]
rules = files("kdtr.contract").joinpath("RULES.md").read_text(encoding="utf-8")
print(json.dumps({"files": [room.__file__ for room in rooms], "rules": rules}))
"""


def test_the_installed_wheel_imports(built, tmp_path):
    (path,) = built.glob("*.whl")
    install = ["pip", "install", "-qq", "--no-deps", "--no-index", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", *install, "--target", tmp_path, path], check=True)
    command = [sys.executable, "-I", "-S", "-c", IMPORT_ALL, tmp_path]

    answer = subprocess.run(
        [*command, sysconfig.get_path("purelib"), *ROOMS],
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert [str(tmp_path / "kdtr" / room / "__init__.py") for room in ROOMS] == found["files"]
    assert (ROOT / "contract/RULES.md").read_text(encoding="utf-8") == found["rules"]


# Declarations


def undeclared_packages(root: Path, declared: list[str]) -> list[str]:
    """A sentence for each package below `root` that pyproject.toml forgets, or invents."""
    inits = (init for room in ROOMS for init in (root / room).rglob("__init__.py"))
    there = {"kdtr." + ".".join(init.relative_to(root).parent.parts) for init in inits}
    forgotten = [f"{name} has a folder, but is not declared" for name in there - set(declared)]
    invented = [f"{name} is declared, but has no folder" for name in set(declared) - there]
    return sorted(forgotten + invented)


def test_every_package_is_declared():
    assert [] == undeclared_packages(ROOT, PROJECT["tool"]["setuptools"]["packages"])


def test_a_package_that_is_not_declared_is_reported(tmp_path):
    for folder in ("contract", "conformance", "conformance/mutants"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()

    assert [
        "kdtr.conformance.mutants has a folder, but is not declared",
        "kdtr.engine is declared, but has no folder",
    ] == undeclared_packages(tmp_path, ["kdtr.contract", "kdtr.engine", "kdtr.conformance"])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_package_that_shows_its_types(room):
    assert (ROOT / room / "__init__.py").is_file()
    assert (ROOT / room / "py.typed").is_file(), f"make an empty {room}/py.typed"


def test_type_checkers_find_every_room():
    links = {link.name: link.readlink().as_posix() for link in (ROOT / "typings/kdtr").iterdir()}

    assert {room: f"../../{room}" for room in ROOMS} == links


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("console_scripts", "kdtr"),
        *[
            (group, name)
            for group in ("kdtr.engines", "kdtr.verbs")
            for name in PROJECT["project"]["entry-points"][group]
        ],
    ],
)
def test_entry_points_resolve(group, name):
    """If one is missing, pyproject.toml changed since the set-up: run `make setup`."""
    (point,) = distribution("kdtr").entry_points.select(group=group, name=name)

    assert callable(point.load())


def test_the_engines_are_the_reference_the_host_the_device_and_the_peers():
    assert ["cuda", "hf", "host", "llamacpp", "reference"] == sorted(
        PROJECT["project"]["entry-points"]["kdtr.engines"]
    )


# Versions


def _pins(file: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / file).read_text(), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in lines}


PINS = _pins("constraints.txt")
PEER_PINS = _pins("constraints-peers.txt")
EXTRAS = PROJECT["project"]["optional-dependencies"]
DECLARED = [
    Requirement(text)
    for texts in (
        PROJECT["build-system"]["requires"],
        PROJECT["project"]["dependencies"],
        *EXTRAS.values(),
    )
    for text in texts
    if not text.startswith("kdtr[")
]


@pytest.mark.parametrize("declared", dict.fromkeys(map(str, DECLARED)))
def test_the_pinned_version_is_the_lower_bound_or_later_and_below_the_next_major(declared):
    requirement = Requirement(declared)
    name = canonicalize_name(requirement.name)
    pin = PINS.get(name) or PEER_PINS[name]

    assert {">=", "<"} == {bound.operator for bound in requirement.specifier}
    assert requirement.specifier.contains(pin)


def test_the_environments_of_the_peers_have_the_same_versions_but_for_mpmath():
    differ = {name for name in PEER_PINS if PINS.get(name, PEER_PINS[name]) != PEER_PINS[name]}

    assert {"mpmath"} == differ  # torch brings sympy, which wants mpmath below 1.4
    assert {"numpy", "ml-dtypes", "safetensors", "rich", "gguf", "pytest"} <= set(PEER_PINS)


def test_what_dependencies_bring_along_is_pinned_too():
    """Every installed distribution that kdtr's dependencies and extras lead to, in any depth."""
    reached, waiting = set(), [requirement.name for requirement in DECLARED]
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name not in reached and _installed(name):
            reached.add(name)
            inner = [Requirement(text) for text in distribution(name).requires or []]
            wanted = (r for r in inner if r.marker is None or r.marker.evaluate({"extra": ""}))
            waiting += [requirement.name for requirement in wanted]

    assert {"numpy", "pytest", "pluggy", "mdurl"} <= reached
    assert set() == reached - set(PINS)


def _installed(name: str) -> bool:
    try:
        return bool(distribution(name))
    except ModuleNotFoundError:
        return False
