"""The arrows: which room may import which, and what else it may import.

The checker reads every import with ast, so an arrow is judged also where no test walks. What it
cannot read (a name put together at run time) is left to the fresh interpreters at the end.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Room:
    """What a room may import besides itself and the standard library, and why no more."""

    rooms: tuple[str, ...]
    libraries: tuple[str, ...]
    why: str


ROOMS = {
    "contract": Room(
        rooms=(),
        libraries=(),
        why="both sides share it, so it holds no algorithms and loads nothing",
    ),
    "kdtr_format": Room(
        rooms=("contract",),
        # gguf: the extra's, imported when a GGUF file is written (the fresh interpreter below)
        libraries=("numpy", "ml_dtypes", "safetensors", "gguf"),
        why="a file can be read without a model",
    ),
    "reference": Room(
        rooms=("contract", "kdtr_format"),
        libraries=("numpy", "ml_dtypes"),
        why="the truth depends on nothing that it is used to judge",
    ),
    "engine": Room(
        rooms=("contract", "kdtr_format"),
        libraries=("numpy", "ml_dtypes", "cupy"),
        why="the comparison would prove nothing if both sides shared code",
    ),
    "adapters": Room(
        rooms=("contract", "kdtr_format"),
        # torch, transformers, llama_cpp: the extras', each in the files of LIBRARY_FILES alone
        libraries=("numpy", "torch", "transformers", "llama_cpp"),
        why="a library is judged as it ships, by a judge and a truth that it shares no code with",
    ),
    "conformance": Room(
        rooms=("contract", "kdtr_format"),
        # pyarrow: the extra's, imported when `kdtr index` writes (the fresh interpreter below)
        libraries=("numpy", "ml_dtypes", "rich", "pyarrow"),
        why="the judge loads engines by name and takes the truth from golden bundles",
    ),
    "property_tests": Room(
        rooms=("contract", "kdtr_format", "reference", "conformance"),
        # pyarrow and ray: the extras', imported when a campaign runs (test_campaign_cli.py)
        libraries=("numpy", "hypothesis", "pytest", "rich", "pyarrow", "ray"),
        why="a law holds for every engine, so engines are loaded by name",
    ),
    # A room of its own, for conformance needs no pytest, and every pytest run of an environment
    # loads its plugin: that must not import what conformance does.
    "pytest_plugin": Room(
        rooms=("contract", "conformance"),
        libraries=("pytest",),
        why="it shows the judge's verdicts as tests, and makes none",
    ),
}
# Files that may import one room more than their own room may; a pattern without a file fails.
GRANTS = {
    # What records the truth, and what asks it how much rounding alone moves, and what follows from
    # another choice of experts.
    ("conformance", "reference"): (
        "conformance/golden*.py",
        "conformance/noise_floor.py",
        "conformance/alternatives_truth.py",
    )
}
# Libraries that one adapter alone imports; a pattern without a file fails.
LIBRARY_FILES = {
    "torch": "adapters/hf_*.py",
    "transformers": "adapters/hf_*.py",
    "llama_cpp": "adapters/llamacpp_*.py",
}
# Libraries a room may import under `if TYPE_CHECKING` and only there.
TYPING_ONLY = {"contract": ("numpy",)}
# Folders that import what they like, except an engine. A folder that is neither is reported.
TEST_FOLDERS = ("tests", "benchmarks", "docs")
# What tests or times an operation of an engine's room; everything else loads engines by name.
ENGINE_TESTS = {
    "engine": ("tests/engine/*", "benchmarks/kernels/*"),
    "adapters": ("tests/adapters/*",),
}
# No sources of ours: links to the rooms, and products.
NOT_JUDGED = ("typings", "build", "dist")

DYNAMIC_IMPORTS = ("import_module", "__import__", "importorskip")


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One imported module: its absolute name, or with leading dots if it leaves the room."""

    line: int
    module: str
    typing_only: bool = False


class ImportReader(ast.NodeVisitor):
    """Collects the imports of one file, also late, dynamic (literal) and as `kdtr.X`."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package  # of the file: ("kdtr", "engine")
        self.found: set[Import] = set()
        self.typing_only = False

    def add(self, node: ast.stmt | ast.expr, module: str) -> None:
        self.found.add(Import(node.lineno, module, self.typing_only))

    def visit_If(self, node: ast.If) -> None:
        outside = self.typing_only
        self.typing_only |= ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for child in node.body:
            self.visit(child)
        self.typing_only = outside
        for child in (node.test, *node.orelse):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.absolute("." * node.level + (node.module or ""))
        if module == "kdtr":
            for alias in node.names:
                self.add(node, "kdtr" if alias.name == "*" else f"kdtr.{alias.name}")
        else:
            self.add(node, module)

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func).rpartition(".")[2]
        first = [*node.args, *(k.value for k in node.keywords if k.arg in ("name", "modname"))][:1]
        match first:
            case [ast.Constant(value=str(module))] if called in DYNAMIC_IMPORTS:
                self.add(node, self.absolute(module))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name) and node.value.id == "kdtr" and node.attr in ROOMS:
            self.add(node, f"kdtr.{node.attr}")
        self.generic_visit(node)

    def absolute(self, module: str) -> str:
        """`.tree` in kdtr.engine is kdtr.engine.tree; what leaves the room keeps its dots."""
        name = module.lstrip(".")
        level = len(module) - len(name)
        if not level:
            return module
        base = self.package[: len(self.package) - level + 1]
        room_depth = 2 if self.package[0] == "kdtr" else 1
        return module if len(base) < room_depth else ".".join((*base, *filter(None, [name])))


def imports_of(root: Path, file: Path) -> list[Import]:
    folder = file.relative_to(root).parts[:-1]
    reader = ImportReader(("kdtr", *folder) if folder and folder[0] in ROOMS else folder or (".",))
    reader.visit(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))
    return sorted(reader.found)


def wrong_arrows(root: Path) -> list[str]:
    """A sentence for each thing in the house at `root` that the rules above do not allow."""
    return [*missing_rooms(root), *unknown_folders(root), *stale_grants(root), *wrong_imports(root)]


def missing_rooms(root: Path) -> Iterator[str]:
    for room in (*ROOMS, "tests"):
        if not any((root / room).rglob("*.py")):
            yield f"{room}/ is missing or holds no Python file; its arrows were not checked"


def unknown_folders(root: Path) -> Iterator[str]:
    known = (*ROOMS, *TEST_FOLDERS, *NOT_JUDGED)
    for folder in sorted(root.iterdir()):
        ours = folder.is_dir() and folder.name[0] != "." and not (folder / "pyvenv.cfg").exists()
        if ours and folder.name not in known and any(folder.rglob("*.py")):
            yield f"{folder.name}/ holds Python files, but no rule says what it may import; add one"


def stale_grants(root: Path) -> Iterator[str]:
    for library, pattern in LIBRARY_FILES.items():
        if not any(root.glob(pattern)):
            yield f"{pattern} may import {library}, but no file fits; remove it"
    for (room, other), patterns in GRANTS.items():
        for pattern in patterns:
            if not any(root.glob(pattern)):
                yield f"{pattern} may import kdtr.{other}, but no file in {room}/ fits; remove it"


def wrong_imports(root: Path) -> Iterator[str]:
    for file in _sources(root):
        path = file.relative_to(root).as_posix()
        for found in imports_of(root, file):
            sentence = _judge(path, found)
            if sentence:
                yield f"{path}:{found.line} imports {found.module}{sentence}"


def _sources(root: Path) -> list[Path]:
    inner = (file for folder in (*ROOMS, *TEST_FOLDERS) for file in (root / folder).rglob("*.py"))
    return sorted([*root.glob("*.py"), *inner])


def _judge(path: str, found: Import) -> str | None:
    """The rest of the sentence about a wrong import, or None."""
    room, parts = path.partition("/")[0], found.module.split(".")
    if found.module.startswith("."):
        return ", which leaves the room; write the absolute name, kdtr.X"
    if parts[0] in ROOMS:
        return f" by its folder's name; the installed package is kdtr.{parts[0]}"
    if parts[0] == "kdtr":
        return _judge_room(path, room, parts[1] if len(parts) > 1 else "")
    if room not in ROOMS or parts[0] in sys.stdlib_module_names:
        return None
    return _judge_library(path, parts[0], found.typing_only)


def _judge_room(path: str, room: str, other: str) -> str | None:
    if not other:
        return " without naming a room; write kdtr.X"
    if other not in ROOMS:
        return f", but there is no room {other}/"
    if room not in ROOMS:
        tests = ENGINE_TESTS.get(other)
        if tests is None or any(fnmatch(path, pattern) for pattern in tests):
            return None
        return f"; only {' and '.join(tests)} may, others load engines by name"
    granted = GRANTS.get((room, other), ())
    if other in (room, *ROOMS[room].rooms) or any(fnmatch(path, pattern) for pattern in granted):
        return None
    allowed = ", ".join(f"kdtr.{name}" for name in ROOMS[room].rooms) or "the standard library"
    also = f" ({', '.join(granted)} also kdtr.{other})" if granted else ""
    return f"; {room}/ may import only {allowed}{also}: {ROOMS[room].why}"


def _judge_library(path: str, library: str, typing_only: bool) -> str | None:
    room = path.partition("/")[0]
    for_typing = TYPING_ONLY.get(room, ())
    files = LIBRARY_FILES.get(library, "*")
    if not fnmatch(path, files):
        return f"; only {files} may"
    if library in ROOMS[room].libraries or (typing_only and library in for_typing):
        return None
    allowed = ", ".join(("the standard library", *ROOMS[room].libraries))
    also = f" ({', '.join(for_typing)} under TYPE_CHECKING)" if for_typing else ""
    return f"; {room}/ may use only {allowed}{also}: {ROOMS[room].why}"


def arrows(root: Path) -> dict[str, set[str]]:
    """The rooms that each room imports, as its files stand."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for file in _sources(root):
        room = file.relative_to(root).parts[0]
        if room not in ROOMS:
            continue
        modules = [found_import.module.split(".") for found_import in imports_of(root, file)]
        others = {parts[1] for parts in modules if parts[0] == "kdtr" and len(parts) > 1}
        found[room] |= (others & set(ROOMS)) - {room}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Rooms that import each other in a circle, the first one repeated at the end; or none."""

    def walk(trail: list[str]) -> list[str]:
        if trail[-1] in trail[:-1]:
            return trail[trail.index(trail[-1]) :]
        rings = (walk([*trail, other]) for other in sorted(edges[trail[-1]]))
        return next(filter(None, rings), [])

    return next(filter(None, (walk([room]) for room in edges)), [])


# Imports a package and all its modules; prints every module that was asked for, found or not, so
# that an optional import of something that is not installed is seen too.
ASKED_FOR = """
import importlib, json, pkgutil, sys
asked = []
class Listener:
    @staticmethod
    def find_spec(name, path=None, target=None):
        asked.append(name)
package, *first = sys.argv[1:]
sys.path[:0] = first
sys.meta_path.insert(0, Listener)
found = importlib.import_module(package)
for module in pkgutil.walk_packages(found.__path__, package + "."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
print(json.dumps(asked))
"""


def asked_for(package: str, *path: Path) -> list[str]:
    """The modules that a fresh interpreter looks for when it imports all of `package`."""
    command = [sys.executable, "-I", "-c", ASKED_FOR, package, *map(str, path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


# The house as it stands


def test_every_import_follows_the_arrows():
    wrong = wrong_arrows(ROOT)

    assert not wrong, "\n" + "\n".join(wrong)


def test_no_rooms_import_each_other_in_a_circle():
    assert [] == circle(arrows(ROOT))


def test_the_rules_allow_no_circle():
    allowed = {room: set(rules.rooms) for room, rules in ROOMS.items()}
    for room, other in GRANTS:
        allowed[room].add(other)

    assert [] == circle(allowed)


def test_rooms_are_not_importable_by_their_folder_names():
    """Run `pytest`, not `python -m pytest`: the latter puts the checkout on sys.path."""
    shadowing = [folder for folder in sys.path if folder in ("", str(ROOT))]

    assert not shadowing, test_rooms_are_not_importable_by_their_folder_names.__doc__


@pytest.mark.parametrize(
    ("room", "unwanted"),
    [
        ("contract", {"numpy", "cupy"} | {f"kdtr.{room}" for room in ROOMS if room != "contract"}),
        ("reference", {"cupy", "kdtr.engine", "kdtr.conformance"}),
        ("kdtr_format", {"cupy", "gguf", "kdtr.engine", "kdtr.reference"}),
        ("conformance", {"cupy", "pyarrow", "kdtr.engine", "kdtr.adapters"}),
        ("adapters", {"torch", "transformers", "llama_cpp", "gguf", "kdtr.conformance"}),
    ],
)
def test_a_fresh_interpreter_imports_the_room_without(room, unwanted):
    asked = asked_for(f"kdtr.{room}")

    assert f"kdtr.{room}" in asked
    assert set() == unwanted.intersection(asked)


# The checker itself: each planted fault is reported, with its sentence


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A house in order: every room and the granted files, with arrows that are allowed."""
    for room in ROOMS:
        plant(tmp_path, f"{room}/__init__.py", f"from kdtr.{room} import own")
    plant(tmp_path, "contract/tree.py", "if TYPE_CHECKING:\n    import numpy")
    plant(tmp_path, "engine/session.py", "from . import own\nimport cupy\nimport kdtr.kdtr_format")
    plant(tmp_path, "conformance/golden.py", "from kdtr import reference")
    plant(tmp_path, "conformance/noise_floor.py", "from kdtr import reference")
    plant(tmp_path, "conformance/alternatives_truth.py", "from kdtr import reference")
    plant(tmp_path, "adapters/hf_engine.py", "def late():\n    import torch, transformers")
    plant(tmp_path, "adapters/llamacpp_engine.py", "def late():\n    import llama_cpp")
    plant(tmp_path, "tests/adapters/test_session.py", "import kdtr.adapters")
    plant(tmp_path, "tests/test_reference.py", "import torch\nimport kdtr.reference")
    plant(tmp_path, "tests/engine/test_session.py", "import kdtr.engine")
    return tmp_path


def plant(root: Path, path: str, source: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source + "\n", encoding="utf-8")


def test_a_house_in_order_is_not_reported(house):
    assert [] == wrong_arrows(house)


ENGINE_ARROWS = (
    "engine/ may import only kdtr.contract, kdtr.kdtr_format: "
    "the comparison would prove nothing if both sides shared code"
)
CONFORMANCE_ARROWS = (
    "conformance/ may import only kdtr.contract, kdtr.kdtr_format{}: "
    "the judge loads engines by name and takes the truth from golden bundles"
)
CONTRACT_LIBRARIES = (
    "contract/ may use only the standard library (numpy under TYPE_CHECKING): "
    "both sides share it, so it holds no algorithms and loads nothing"
)


@pytest.mark.parametrize(
    ("path", "source", "sentence"),
    [
        pytest.param(
            "engine/session.py",
            "import os\n\nfrom kdtr.reference import path",
            f"engine/session.py:3 imports kdtr.reference; {ENGINE_ARROWS}",
            id="engine to reference",
        ),
        pytest.param(
            "engine/session.py",
            "def late():\n    from kdtr import reference",
            f"engine/session.py:2 imports kdtr.reference; {ENGINE_ARROWS}",
            id="inside a function",
        ),
        pytest.param(
            "engine/session.py",
            "if TYPE_CHECKING:\n    import kdtr.reference.tree as t",
            f"engine/session.py:2 imports kdtr.reference.tree; {ENGINE_ARROWS}",
            id="for typing",
        ),
        pytest.param(
            "engine/session.py",
            "import kdtr.contract\nkdtr.reference.path(t, 1)",
            f"engine/session.py:2 imports kdtr.reference; {ENGINE_ARROWS}",
            id="as an attribute of kdtr",
        ),
        pytest.param(
            "engine/session.py",
            "import importlib\nimportlib.import_module('kdtr.reference')",
            f"engine/session.py:2 imports kdtr.reference; {ENGINE_ARROWS}",
            id="importlib",
        ),
        pytest.param(
            "engine/session.py",
            "__import__(name='kdtr.reference')",
            f"engine/session.py:1 imports kdtr.reference; {ENGINE_ARROWS}",
            id="dunder import",
        ),
        pytest.param(
            "engine/kernels/launch.py",
            "from ...reference import path",
            "engine/kernels/launch.py:1 imports ...reference, which leaves the room; "
            "write the absolute name, kdtr.X",
            id="relative, out of a subfolder",
        ),
        pytest.param(
            "engine/session.py",
            "from .. import reference",
            "engine/session.py:1 imports .., which leaves the room; "
            "write the absolute name, kdtr.X",
            id="relative, of kdtr",
        ),
        pytest.param(
            "engine/session.py",
            "from contract import DraftTree",
            "engine/session.py:1 imports contract by its folder's name; "
            "the installed package is kdtr.contract",
            id="folder name",
        ),
        pytest.param(
            "tests/test_reference.py",
            "import reference.tree",
            "tests/test_reference.py:1 imports reference.tree by its folder's name; "
            "the installed package is kdtr.reference",
            id="folder name in a test",
        ),
        pytest.param(
            "engine/session.py",
            "import kdtr",
            "engine/session.py:1 imports kdtr without naming a room; write kdtr.X",
            id="kdtr alone",
        ),
        pytest.param(
            "engine/session.py",
            "from kdtr.kernels import launch",
            "engine/session.py:1 imports kdtr.kernels, but there is no room kernels/",
            id="no such room",
        ),
        pytest.param(
            "contract/tree.py",
            "import numpy as np",
            f"contract/tree.py:1 imports numpy; {CONTRACT_LIBRARIES}",
            id="numpy in contract",
        ),
        pytest.param(
            "contract/tree.py",
            "if TYPE_CHECKING:\n    import numpy\nelse:\n    import numpy.linalg",
            f"contract/tree.py:4 imports numpy.linalg; {CONTRACT_LIBRARIES}",
            id="numpy in the else of TYPE_CHECKING",
        ),
        pytest.param(
            "contract/tree.py",
            "if not TYPE_CHECKING:\n    import numpy",
            f"contract/tree.py:2 imports numpy; {CONTRACT_LIBRARIES}",
            id="numpy when not TYPE_CHECKING",
        ),
        pytest.param(
            "contract/tree.py",
            "from kdtr.reference import path",
            "contract/tree.py:1 imports kdtr.reference; contract/ may import only the standard "
            "library: both sides share it, so it holds no algorithms and loads nothing",
            id="contract to reference",
        ),
        pytest.param(
            "reference/model.py",
            "try:\n    import cupy\nexcept ImportError:\n    pass",
            "reference/model.py:2 imports cupy; reference/ may use only the standard library, "
            "numpy, ml_dtypes: the truth depends on nothing that it is used to judge",
            id="optional cupy in reference",
        ),
        pytest.param(
            "reference/model.py",
            "from kdtr.conformance import tolerance",
            "reference/model.py:1 imports kdtr.conformance; reference/ may import only "
            "kdtr.contract, kdtr.kdtr_format: "
            "the truth depends on nothing that it is used to judge",
            id="reference to conformance",
        ),
        pytest.param(
            "kdtr_format/reader.py",
            "import rich.table",
            "kdtr_format/reader.py:1 imports rich.table; kdtr_format/ may use only the standard "
            "library, numpy, ml_dtypes, safetensors, gguf: a file can be read without a model",
            id="rich in kdtr_format",
        ),
        pytest.param(
            "conformance/report.py",
            "import kdtr.reference",
            "conformance/report.py:1 imports kdtr.reference; "
            + CONFORMANCE_ARROWS.format(
                " (conformance/golden*.py, conformance/noise_floor.py, "
                "conformance/alternatives_truth.py also kdtr.reference)"
            ),
            id="conformance to reference, no grant",
        ),
        pytest.param(
            "conformance/golden_bundle.py",
            "import kdtr.engine",
            f"conformance/golden_bundle.py:1 imports kdtr.engine; {CONFORMANCE_ARROWS.format('')}",
            id="conformance to engine",
        ),
        pytest.param(
            "property_tests/test_tree.py",
            "pytest.importorskip('kdtr.engine')",
            "property_tests/test_tree.py:1 imports kdtr.engine; property_tests/ may import only "
            "kdtr.contract, kdtr.kdtr_format, kdtr.reference, kdtr.conformance: "
            "a law holds for every engine, so engines are loaded by name",
            id="property test to engine",
        ),
        pytest.param(
            "conformance/pytest_cases.py",
            "import pytest",
            "conformance/pytest_cases.py:1 imports pytest; conformance/ may use only the standard "
            "library, numpy, ml_dtypes, rich, pyarrow: "
            "the judge loads engines by name and takes the truth from golden bundles",
            id="pytest in conformance",
        ),
        pytest.param(
            "pytest_plugin/cases.py",
            "from kdtr.property_tests import laws",
            "pytest_plugin/cases.py:1 imports kdtr.property_tests; pytest_plugin/ may import only "
            "kdtr.contract, kdtr.conformance: "
            "it shows the judge's verdicts as tests, and makes none",
            id="plugin to the laws",
        ),
        pytest.param(
            "tests/test_gate.py",
            "from kdtr.engine import make_engine",
            "tests/test_gate.py:1 imports kdtr.engine; "
            "only tests/engine/* and benchmarks/kernels/* may, others load engines by name",
            id="test to engine",
        ),
        pytest.param(
            "tests/test_gate.py",
            "from kdtr.adapters import make_hf_engine",
            "tests/test_gate.py:1 imports kdtr.adapters; "
            "only tests/adapters/* may, others load engines by name",
            id="test to adapter",
        ),
        pytest.param(
            "adapters/session.py",
            "import torch",
            "adapters/session.py:1 imports torch; only adapters/hf_*.py may",
            id="a library outside its adapter",
        ),
        pytest.param(
            "benchmarks/rounds.py",
            "from kdtr.engine import make_engine",
            "benchmarks/rounds.py:1 imports kdtr.engine; "
            "only tests/engine/* and benchmarks/kernels/* may, others load engines by name",
            id="benchmark to engine",
        ),
        pytest.param(
            "tools/draw.py",
            "import os",
            "tools/ holds Python files, but no rule says what it may import; add one",
            id="unknown folder",
        ),
    ],
)
def test_a_wrong_import_is_reported(house, path, source, sentence):
    plant(house, path, source)

    assert [sentence] == wrong_arrows(house)


@pytest.mark.parametrize("room", [*ROOMS, "tests"])
def test_an_empty_room_is_reported(house, room):
    for file in (house / room).rglob("*.py"):
        file.unlink()

    assert (
        f"{room}/ is missing or holds no Python file; its arrows were not checked"
        in wrong_arrows(house)
    )


def test_a_grant_that_nobody_uses_is_reported(house):
    (house / "conformance/golden.py").unlink()

    assert [
        "conformance/golden*.py may import kdtr.reference, "
        "but no file in conformance/ fits; remove it"
    ] == wrong_arrows(house)


def test_a_circle_is_named_from_its_first_room_back_to_it(house):
    plant(house, "contract/tree.py", "import kdtr.kdtr_format")
    plant(house, "kdtr_format/reader.py", "import kdtr.contract")

    assert ["contract", "kdtr_format", "contract"] == circle(arrows(house))


def test_a_fresh_interpreter_reports_modules_that_are_not_installed(tmp_path):
    plant(tmp_path, "planted/__init__.py", "")
    plant(
        tmp_path, "planted/late.py", "try:\n    import no_such_card\nexcept ImportError:\n    pass"
    )

    assert {"planted", "planted.late", "no_such_card"} <= set(asked_for("planted", tmp_path))
