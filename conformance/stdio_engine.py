"""The client of the stdio protocol: an engine in another process, behind the contract's interface.

One process serves all models and sessions. When it is gone (a crash, no reply in time, noise on
its stdout) its sessions are lost, and the next `load` or `open` starts another one: `open` loads
its model there again, so that one bad case does not take the others with it. A model that does not
come back is given up. Refusals arrive in the engine's own class and words.

With `isolate` each session has a process of its own, which ends with it: nothing that a case leaves
behind (a cache, a stale page, a half-dead device context) reaches the next.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from kdtr.conformance import stdio_inputs as inputs
from kdtr.conformance.stdio_connection import Connection
from kdtr.conformance.stdio_session import StdioSession
from kdtr.conformance.stdio_tensors import Scratch
from kdtr.contract import EngineError, EngineInfo, KdtrError, ModelConfig, ModelSource
from kdtr.kdtr_format import config_tensors, open_model, write_bundle

TIMEOUT_S = 60.0


class StdioEngine:
    """`command` is started at once and asked what it offers. Also a context manager.

    timeout_s  for each request, `load` too
    isolate    a process for each session
    """

    def __init__(
        self, command: str, *, timeout_s: float = TIMEOUT_S, isolate: bool = False
    ) -> None:
        self._command = _words(command)
        self._timeout_s = _seconds(timeout_s)
        self.isolate = _flag(isolate)
        self._others: WeakSet[Connection] = WeakSet()
        self._models = 0
        self._closed = False
        self._connection = self._started()
        self.info: EngineInfo = self._connection.info

    def load(self, source: ModelSource) -> StdioModel:
        """A path is passed on as it is; a pair is written once, as a KDTR file."""
        connection = self.connected()
        self._models += 1
        return StdioModel(self, connection, self._models, source)

    def connected(self) -> Connection:
        """The living process, a new one where the last is gone."""
        if self._closed:
            raise EngineError("the engine is closed; make another one")
        if self._connection.is_gone:
            self._connection = self._started_again()
        return self._connection

    def another(self) -> Connection:
        """A process more, for one session."""
        if self._closed:
            raise EngineError("the engine is closed; make another one")
        connection = self._started_again()
        self._others.add(connection)
        return connection

    def close(self) -> None:
        """End the process; again is harmless. Also done when the engine is forgotten, and at exit.

        Sessions and models keep it alive.
        """
        self._closed = True
        for connection in (self._connection, *self._others):
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _started_again(self) -> Connection:
        connection = self._started()
        if connection.info != self.info:
            connection.close()
            raise EngineError("the engine, started again, says other things of itself")
        return connection

    def _started(self) -> Connection:
        try:
            return Connection(self._command, self._timeout_s)
        except EngineError as error:
            raise EngineError(f"engine stdio:{shlex.join(self._command)}: {error}") from None


class StdioModel:
    """Weights in the engine's process, or in the process after it."""

    def __init__(
        self, engine: StdioEngine, connection: Connection, number: int, source: ModelSource
    ) -> None:
        self._engine = engine
        self._number = number
        self._source = source
        self._scratch: Scratch | None = None
        self._config: ModelConfig | None = None
        self._lost: EngineError | None = None
        self._connection = connection
        self._had_session = False
        try:
            self._path = self._written(source)
            self._load(connection)
        except BaseException:
            self._forget()
            raise

    @property
    def config(self) -> ModelConfig:
        if self._config is None:
            self._config = open_model(self._source).config
        return self._config

    @property
    def _width(self) -> int | None:
        return None if self._config is None else self._config.vocab_size

    def open(self, *, max_len: int) -> StdioSession:
        slots = inputs.number("max_len", max_len)
        alone = self._engine.isolate
        if alone and self._had_session:
            self._load_again(self._engine.another)
        elif self._connection.is_gone:
            self._load_again(self._engine.connected)
        self._had_session = True
        number = self._connection.new_session()
        fields = {"model": self._number, "session": number, "max_len": slots}
        self._connection.ask("open", fields)
        return StdioSession(self._connection, number, self._width, alone=alone)

    def close(self) -> None:
        """Nothing to do where the process is gone."""
        self._forget()
        if not self._connection.is_gone:
            self._connection.ask("unload", {"model": self._number})

    def _load(self, connection: Connection) -> None:
        connection.ask("load", {"model": self._number, "source": self._path})
        self._connection = connection

    def _load_again(self, connect: Callable[[], Connection]) -> None:
        if self._lost is not None:
            raise self._lost
        try:
            self._load(connect())
        except KdtrError as error:
            text = f"the engine was started again, but {error}; the model is given up"
            self._lost = EngineError(text)
            raise self._lost from None

    def _written(self, source: ModelSource) -> str:
        if isinstance(source, str | PathLike):
            return fspath(source)
        model = open_model(source)  # refuses what is no model
        self._config = model.config
        self._scratch = Scratch(in_memory=False)  # weights may be large
        weights = {f"weights/{name}": array for name, array in model.tensors.items()}
        path = self._scratch.path / "model.kdtr"
        write_bundle(path, {**config_tensors(model.config), **weights}, {})
        return str(path)

    def _forget(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()


def make_stdio_engine(command: str, options: Mapping[str, Any]) -> StdioEngine:
    """For `stdio:COMMAND`: the client's options are few, all others belong into the command."""
    unknown = [name for name in options if name not in ("timeout_s", "isolate")]
    if unknown:
        raise EngineError(
            f"engine stdio:{command}: the client has no option {', '.join(unknown)}; expected "
            "timeout_s, isolate, or the engine's own options within the command"
        )
    return StdioEngine(command, **options)


def check_command(command: str) -> None:
    """The program of `stdio:COMMAND` is there and may be run. Raises EngineError."""
    program = _words(command)[0]
    if shutil.which(program) is None:
        raise EngineError(
            f"engine stdio:{command}: there is no program {program} that can be run; expected one "
            "of PATH, or the path of one"
        )


def _words(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise EngineError(f"engine stdio:{command}: {error}") from None
    if not words:
        raise EngineError("engine 'stdio:'; expected stdio:COMMAND WITH ARGUMENTS")
    return words


def _seconds(timeout_s: object) -> float:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:  # type: ignore[operator]  # a number here
        raise EngineError(f"timeout_s = {timeout_s!r}; expected a number of seconds above 0")
    return float(timeout_s)  # type: ignore[arg-type]


def _flag(isolate: object) -> bool:
    if not isinstance(isolate, bool):
        raise EngineError(f"isolate = {isolate!r}; expected True or False")
    return isolate
