"""Every refusal of an engine that cannot be loaded, with its text."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdtr.conformance import load_engine
from kdtr.conformance.engine_loader import check_engine_name
from kdtr.conformance.user_interrupts import user_interrupts
from kdtr.contract import VERBS, EngineError, EngineInfo, NumericProfile

INFO = EngineInfo("n", "v", "cpu", NumericProfile(), frozenset({"verify"}), frozenset({"mask"}))
DTYPES = "float64, float32, float16, bfloat16"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """module(source, **values): the name of an importable module with this text and attributes."""
    monkeypatch.syspath_prepend(tmp_path)
    name = "engine_under_test"

    def write(source: str = "", **values: Any) -> str:
        (tmp_path / f"{name}.py").write_text(source)
        if values:
            sys.modules[name] = SimpleNamespace(**values)  # type: ignore[assignment]
        return name

    yield write
    sys.modules.pop(name, None)


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(EngineError) as refused:
        load_engine(name, options)
    return str(refused.value)


def engine(info: Any = INFO, **attributes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"load": lambda source: None, "info": info, **attributes})


def test_registered_names_are_loaded_and_given_their_options() -> None:
    assert "kdtr.engine" == load_engine("host").info.name
    assert "reference (fast, append)" == load_engine("reference", {"arithmetic": "fast"}).info.name
    assert "kdtr.engine" == load_engine("kdtr.engine:make_engine", {"page_size": 2}).info.name


def test_a_name_that_is_not_registered() -> None:
    known = importlib.metadata.entry_points(group="kdtr.engines").names

    assert (
        f"no engine is registered as 'hots' (registered: {', '.join(sorted(known))}); expected "
        "one of these, package.module:factory, or stdio:COMMAND for a program"
    ) == refusal("hots")
    assert refusal("").startswith("no engine is registered as ''")


@pytest.mark.parametrize("name", [":", "a.b:", ":make_engine"])
def test_a_half_name(name: str) -> None:
    assert f"engine {name!r}; expected package.module:factory" == refusal(name)


def test_a_module_that_there_is_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = importlib.metadata.entry_points(group="kdtr.engines").names
    todo = (
        f"the packages of {sys.executable}; start kdtr in the directory that holds it, name that "
        "directory in PYTHONPATH, install its package, or name a registered engine: "
        f"{', '.join(sorted(known))}"
    )

    assert f"engine no.such:make: no module no in {todo}" == refusal("no.such:make")
    assert "engine json.such:make: no module json.such in " in refusal("json.such:make")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert f"engine no:make: no module no in {tmp_path} and {todo}" == refusal("no:make")


def test_a_module_that_imports_what_there_is_not(module: Callable[..., str]) -> None:
    name = module("import no_such_library")

    assert (
        f"engine {name}:make: importing {name} raised ModuleNotFoundError: No module named "
        "'no_such_library'; install what it imports into the Python that runs kdtr, "
        f"{sys.executable}"
    ) == refusal(f"{name}:make")


@pytest.mark.parametrize(
    ("source", "raised"),
    [
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import sys; sys.exit()", "SystemExit: "),
    ],
)
def test_a_module_that_raises(module: Callable[..., str], source: str, raised: str) -> None:
    name = module(source)

    assert f"engine {name}:make: importing {name} raised {raised}" == refusal(f"{name}:make")


def test_a_module_with_a_syntax_error(module: Callable[..., str]) -> None:
    name = module("def")

    assert refusal(f"{name}:make").startswith(
        f"engine {name}:make: importing {name} raised SyntaxError: invalid syntax ("
    )


def test_an_interrupt_on_import_is_the_user_s(module: Callable[..., str]) -> None:
    name = module("raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        load_engine(f"{name}:make")


def test_an_interrupt_that_nobody_pressed_is_the_module_s(module: Callable[..., str]) -> None:
    name = module("raise KeyboardInterrupt('x')")

    with user_interrupts():
        said = refusal(f"{name}:make")

    assert f"engine {name}:make: importing {name} raised KeyboardInterrupt: x" == said


def test_a_module_without_the_factory(module: Callable[..., str]) -> None:
    name = module("make_engin = 1")

    said = refusal(f"{name}:make")
    assert said.startswith(f"engine {name}:make: module {name} (")
    assert said.endswith(
        f"{name}.py) has no make; expected a function that returns an engine, such as its "
        "make_engin"
    )


def test_a_file_instead_of_its_module() -> None:
    assert (
        "engine my_engine.py:make: my_engine.py is a file; expected its module, without .py: "
        "my_engine:make"
    ) == refusal("my_engine.py:make")


def test_a_factory_that_is_none(module: Callable[..., str]) -> None:
    name = module("make = 1")

    assert (
        f"engine {name}:make: make is a int; expected a function that returns an engine"
    ) == refusal(f"{name}:make")


@pytest.mark.parametrize("options", [{}, {"page_size": 3}])
@pytest.mark.parametrize("error", [OSError("no device"), SystemExit(0)])
def test_a_factory_that_raises(
    module: Callable[..., str], options: dict[str, Any], error: BaseException
) -> None:
    def make(**options: Any) -> Any:
        raise error

    name = module(make=make)

    assert (
        f"engine {name}:make: the factory, called with {options or 'no options'}, raised "
        f"{type(error).__name__}: {error}"
    ) == refusal(f"{name}:make", **options)


def test_an_option_that_the_factory_does_not_know() -> None:
    assert (
        "engine host: the factory has no option paeg_size; expected some of dtype, "
        "summation, summation_seed, page_size, split_size"
    ) == refusal("host", paeg_size=3)


def test_an_option_for_a_factory_that_takes_none(module: Callable[..., str]) -> None:
    name = module(make=lambda: engine())

    assert (
        f"engine {name}:make: the factory has no option page_size; expected none, it takes no "
        "options"
    ) == refusal(f"{name}:make", page_size=3)


def test_the_engine_s_own_refusal_of_an_option_stands() -> None:
    assert "page_size = 0; expected at least 1" == refusal("host", page_size=0)
    assert "graphs = 1; expected True or False" == refusal("cuda", graphs=1)


@pytest.mark.parametrize("thing", [None, 1, object(), "engine"])
def test_a_thing_without_load(module: Callable[..., str], thing: Any) -> None:
    name = module(make=lambda: thing)

    assert (
        f"engine {name}:make: the factory returned a {type(thing).__name__} without load(); "
        "expected an engine (contract/interface.py)"
    ) == refusal(f"{name}:make")


class InfoRaises:
    def load(self, source: Any) -> Any: ...

    @property
    def info(self) -> Any:
        raise LookupError("which?")


def test_info_raises(module: Callable[..., str]) -> None:
    name = module(make=InfoRaises)

    assert f"engine {name}:make: info raised LookupError: which?" == refusal(f"{name}:make")


@pytest.mark.parametrize("info", [None, {}, "kdtr"])
def test_info_of_another_type(module: Callable[..., str], info: Any) -> None:
    name = module(make=lambda: engine(info))

    assert (
        f"engine {name}:make: info is a {type(info).__name__}; expected an EngineInfo"
    ) == refusal(f"{name}:make")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"verbs": frozenset({"verify", "speculate", "Round"})},
            "info.verbs names Round, speculate; expected some of " + ", ".join(sorted(VERBS)),
        ),
        ({"verbs": ["verify"]}, "info.verbs is a list; expected a frozenset"),
        ({"verbs": None}, "info.verbs is a NoneType; expected a frozenset"),
        ({"verbs": frozenset({1})}, "info.verbs names 1; expected some of "),
        ({"stages": "mask"}, "info.stages is a str; expected a frozenset"),
        ({"stages": frozenset({"maks"})}, "info.stages names maks; expected some of attn_out, "),
        (
            {"stages": frozenset({"cache_c_kv"})},
            "info.stages names cache_c_kv; expected some of attn_out, ",
        ),
        ({"profile": None}, "info.profile is a NoneType; expected a NumericProfile"),
        (
            {"profile": NumericProfile(latents="fp8")},
            f"profile.latents = 'fp8'; expected one of {DTYPES}",
        ),
        (
            {"profile": NumericProfile(accumulation=["float32"])},  # type: ignore[arg-type]
            f"profile.accumulation = ['float32']; expected one of {DTYPES}",
        ),
        (
            {"profile": NumericProfile(deterministic="yes")},  # type: ignore[arg-type]
            "profile.deterministic = 'yes'; expected True or False",
        ),
        (
            {"profile": NumericProfile(batch_invariant=1)},  # type: ignore[arg-type]
            "profile.batch_invariant = 1; expected True or False",
        ),
        (
            {"conventions": ["latent_norm_eps"]},
            "info.conventions is a list; expected a mapping of texts to texts, as "
            '{"latent_norm_eps": "1e-5"}',
        ),
        ({"conventions": None}, "info.conventions is a NoneType; expected a mapping of texts"),
        (
            {"conventions": {"latent_norm_eps": 1e-5}},
            "info.conventions has 'latent_norm_eps': 1e-05; expected a text for a text",
        ),
        ({"conventions": {1: "x"}}, "info.conventions has 1: 'x'; expected a text for a text"),
        ({"name": None}, "info.name = None; expected a text"),
        ({"device": 0}, "info.device = 0; expected a text"),
    ],
    ids=map(str, range(18)),
)
def test_info_that_claims_what_there_is_not(
    module: Callable[..., str], changes: dict[str, Any], text: str
) -> None:
    name = module(make=lambda: engine(replace(INFO, **changes)))

    assert refusal(f"{name}:make").startswith(f"engine {name}:make: {text}")


def test_an_entry_point_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("broken", "no.such:make", "kdtr.engines")
    entries = importlib.metadata.EntryPoints([entry])
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)

    assert (
        "engine broken: loading no.such:make raised ModuleNotFoundError: No module named 'no'"
    ) == refusal("broken")


def test_a_command_takes_the_client_s_option_alone() -> None:
    assert (
        "engine stdio:true: the client has no option page_size; expected timeout_s, isolate, "
        "or the engine's own options within the command"
    ) == refusal("stdio:true", page_size=3, timeout_s=3)


@pytest.mark.parametrize("timeout_s", [0, -1, True, "3", float("nan"), float("inf"), None])
def test_a_time_that_is_none(timeout_s: object) -> None:
    assert (f"timeout_s = {timeout_s!r}; expected a number of seconds above 0") == refusal(
        "stdio:true", timeout_s=timeout_s
    )


@pytest.mark.parametrize("isolate", [1, "yes", None])
def test_an_isolate_that_is_no_flag(isolate: object) -> None:
    assert f"isolate = {isolate!r}; expected True or False" == refusal(
        "stdio:true", isolate=isolate
    )


def test_a_command_that_ends_at_once() -> None:
    assert refusal("stdio:true").startswith(
        "engine stdio:true: hello(): the engine exited with code 0 before it re"
    )


@pytest.mark.parametrize(
    "name", ["hots", "no_such_module:make", "json:no_such_factory", "stdio:", "stdio:./no-such"]
)
def test_a_name_is_refused_before_anything_is_made(name: str) -> None:
    with pytest.raises(EngineError) as refused:
        check_engine_name(name)

    if "./" not in name:
        assert refusal(name) == str(refused.value)


def test_a_program_that_there_is_not_is_named_once_more_at_most() -> None:
    with pytest.raises(EngineError) as refused:
        check_engine_name("stdio:./no-such --fast")

    assert (
        "engine stdio:./no-such --fast: there is no program ./no-such that can be run; expected "
        "one of PATH, or the path of one"
    ) == str(refused.value)
    assert (
        "engine stdio:./no-such: ./no-such cannot be started: No such file or directory"
    ) == refusal("stdio:./no-such")
