"""Loading an engine by name.

`package.module:factory`, an entry point of the group `kdtr.engines`, or `stdio:COMMAND`: another
process that speaks the stdio protocol (docs/stdio-protocol.md).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtr.conformance import running
from kdtr.conformance.engine_call import EngineCall
from kdtr.conformance.engine_options import option_words
from kdtr.conformance.raised import RAISED, told
from kdtr.conformance.stdio_engine import check_command, make_stdio_engine
from kdtr.conformance.tolerance import UNIT_ROUNDOFF
from kdtr.contract import TRACED, VERBS, Engine, EngineError, EngineInfo, KdtrError, NumericProfile

ENTRY_POINTS = "kdtr.engines"
SUMMED_IN = ("float64", "float32")  # what reference/noisy.py can emulate
STDIO = "stdio:"


def load_engine(name: str, options: Mapping[str, Any] | None = None) -> Engine:
    """Import the factory, call it with the options, and hold what it returns to the interface.

    With `stdio:COMMAND` the process is started, and `timeout_s` is the one option.

    Raises EngineError saying which of these failed and how.
    """
    options = dict(options or {})
    _note(name, options)
    if name.startswith(STDIO):
        process = make_stdio_engine(name.removeprefix(STDIO), options)
        try:
            _check_engine(name, process)
        except BaseException:
            process.close()
            raise
        return process
    factory = _factory_for(name, options)
    try:
        with EngineCall("the factory"):
            engine = factory(**options)
    except KdtrError:
        raise  # the engine's own refusal, for example of an option
    except RAISED as error:
        raise EngineError(
            f"engine {name}: the factory, called with {options or 'no options'}, raised "
            f"{told(error)}"
        ) from error
    _check_engine(name, engine)
    checked: Engine = engine
    return checked


def check_engine_name(name: str, options: Mapping[str, Any] | None = None) -> None:
    """What can be told before an engine is made: its factory is there and takes the options.

    Imports its module, and makes nothing. Of `stdio:COMMAND` the program is looked for.
    Raises EngineError, as `load_engine` would.
    """
    _note(name, dict(options or {}))
    if name.startswith(STDIO):
        check_command(name.removeprefix(STDIO))
    else:
        _factory_for(name, dict(options or {}))


@contextmanager
def importable_here() -> Iterator[None]:
    """Engines of the current directory can be imported; after all else, so that it hides none."""
    before, here = list(sys.path), os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        yield
    finally:
        sys.path[:] = before


def option_names(name: str) -> frozenset[str]:
    """The options that a loaded engine's factory names; empty where it names none."""
    known = None if name.startswith(STDIO) else _named_options(_factory(name))
    return frozenset(known or ())


def _note(name: str, options: Mapping[str, Any]) -> None:
    running.load(shlex.join([name, *option_words(options)]))


def _factory_for(name: str, options: Mapping[str, Any]) -> Any:
    factory = _factory(name)
    _check_options(name, factory, options)
    return factory


def _factory(name: str) -> Any:
    module_name, colon, attribute = name.partition(":")
    if not colon:
        return _entry_point(name)
    if not module_name or not attribute:
        raise EngineError(f"engine {name!r}; expected package.module:factory")
    if module_name.endswith(".py"):
        raise EngineError(
            f"engine {name}: {module_name} is a file; expected its module, without .py: "
            f"{Path(module_name).stem}:{attribute}"
        )
    try:
        with EngineCall(f"import {module_name}"):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EngineError(f"engine {name}: {_not_found(module_name, error)}") from error
    except RAISED as error:  # an engine's module may raise anything on import
        raise EngineError(f"engine {name}: importing {module_name} raised {told(error)}") from error
    if not hasattr(module, attribute):
        where = getattr(module, "__file__", None) or "built in"
        has = [one for one in vars(module) if one.startswith("make_")]
        raise EngineError(
            f"engine {name}: module {module_name} ({where}) has no {attribute}; expected a "
            "function that returns an engine" + (f", such as its {', '.join(has)}" if has else "")
        )
    factory = getattr(module, attribute)
    if not callable(factory):
        raise EngineError(
            f"engine {name}: {attribute} is a {type(factory).__name__}; expected a function that "
            "returns an engine"
        )
    return factory


def _not_found(module_name: str, error: ModuleNotFoundError) -> str:
    """Which module there is not: the engine's own, or one that it imports; and what to do."""
    missing = error.name or ""
    if f"{module_name}.".startswith(f"{missing}."):
        here = Path.cwd()
        looked = f"{here} and " if {"", str(here)} & set(sys.path) else ""
        return (
            f"no module {missing} in {looked}the packages of {sys.executable}; start kdtr in the "
            "directory that holds it, name that directory in PYTHONPATH, install its package, or "
            f"name a registered engine: {_registered()}"
        )
    return (
        f"importing {module_name} raised {told(error)}; install what it imports into the Python "
        f"that runs kdtr, {sys.executable}"
    )


def _check_options(name: str, factory: Any, options: Mapping[str, Any]) -> None:
    """Refuse keywords that the factory does not take, where it says which it takes."""
    known = _named_options(factory)
    if known is None:  # the call itself will tell
        return
    unknown = [key for key in options if key not in known]
    if unknown:
        raise EngineError(
            f"engine {name}: the factory has no option {', '.join(unknown)}; expected "
            + (f"some of {', '.join(known)}" if known else "none, it takes no options")
        )


def _named_options(factory: Any) -> list[str] | None:
    """Keywords that the factory takes; None where it takes any, or does not say."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _entry_point(name: str) -> Any:
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        raise EngineError(
            f"no engine is registered as {name!r} (registered: {_registered()}); expected one of "
            "these, package.module:factory, or stdio:COMMAND for a program"
        )
    try:
        with EngineCall(f"import {found[name].module}"):
            return found[name].load()
    except RAISED as error:
        raise EngineError(
            f"engine {name}: loading {found[name].value} raised {told(error)}"
        ) from error


def _registered() -> str:
    return ", ".join(sorted(importlib.metadata.entry_points(group=ENTRY_POINTS).names)) or "none"


def _check_engine(name: str, engine: Any) -> None:
    if not callable(getattr(engine, "load", None)):
        raise EngineError(
            f"engine {name}: the factory returned a {type(engine).__name__} without load(); "
            "expected an engine (contract/interface.py)"
        )
    try:
        with EngineCall("info"):
            info = engine.info
    except RAISED as error:
        raise EngineError(f"engine {name}: info raised {told(error)}") from error
    if not isinstance(info, EngineInfo):
        raise EngineError(f"engine {name}: info is a {type(info).__name__}; expected an EngineInfo")
    for what, names, known in (
        ("verbs", info.verbs, frozenset(VERBS)),
        ("stages", info.stages, TRACED),
    ):
        if not isinstance(names, frozenset | set):
            raise EngineError(
                f"engine {name}: info.{what} is a {type(names).__name__}; expected a frozenset"
            )
        unknown = sorted(str(one) for one in names - known)
        if unknown:
            raise EngineError(
                f"engine {name}: info.{what} names {', '.join(unknown)}; expected some of "
                f"{', '.join(sorted(known))}"
            )
    for what in ("name", "version", "device"):
        if not isinstance(getattr(info, what), str):
            raise EngineError(
                f"engine {name}: info.{what} = {getattr(info, what)!r}; expected a text"
            )
    _check_conventions(name, info.conventions)
    _check_profile(name, info.profile)


def _check_conventions(name: str, conventions: object) -> None:
    if not isinstance(conventions, Mapping):
        raise EngineError(
            f"engine {name}: info.conventions is a {type(conventions).__name__}; expected a "
            'mapping of texts to texts, as {"latent_norm_eps": "1e-5"}'
        )
    for key, value in conventions.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise EngineError(
                f"engine {name}: info.conventions has {key!r}: {value!r}; expected a text for a "
                "text"
            )


def _check_profile(name: str, profile: NumericProfile) -> None:
    if not isinstance(profile, NumericProfile):
        raise EngineError(
            f"engine {name}: info.profile is a {type(profile).__name__}; expected a NumericProfile"
        )
    for field in ("weights", "activations", "latents", "scores", "logits", "accumulation"):
        dtype = getattr(profile, field)
        if not isinstance(dtype, str) or dtype not in UNIT_ROUNDOFF:
            raise EngineError(
                f"engine {name}: profile.{field} = {dtype!r}; expected one of "
                f"{', '.join(UNIT_ROUNDOFF)}"
            )
    for flag in ("deterministic", "batch_invariant"):
        if not isinstance(getattr(profile, flag), bool):
            raise EngineError(
                f"engine {name}: profile.{flag} = {getattr(profile, flag)!r}; expected True or "
                "False"
            )
    if profile.accumulation not in SUMMED_IN:
        raise EngineError(
            f"engine {name}: profile.accumulation = {profile.accumulation!r}; bounds are known for "
            f"sums in {' and '.join(SUMMED_IN)} alone"
        )
