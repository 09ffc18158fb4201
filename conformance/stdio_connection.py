"""One process of an engine, and the directory through which its tensors travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kdtr.conformance.stdio_process import EngineProcess
from kdtr.conformance.stdio_protocol import VERSION, ExchangeError, info_of
from kdtr.conformance.stdio_tensors import (
    Scratch,
    Traced,
    check_answers,
    delete,
    read_tensors,
    write_tensors,
)
from kdtr.contract import SILENT, EngineError, KdtrError, Trace


class Connection:
    """Started and asked what it is: `info`. EngineError, and nothing is left, where that fails."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._scratch = Scratch(in_memory=True)
        try:
            self._process = EngineProcess(command, timeout_s)
        except BaseException:
            self._scratch.remove()
            raise
        self._sessions = 0
        try:
            fields, _ = self.ask("hello", {"kdtr_stdio": VERSION})
            self.info = info_of(fields)
        except BaseException:
            self.close()
            raise

    @property
    def is_gone(self) -> bool:
        return self._process.ended is not None

    def close(self) -> None:
        self._process.close()
        self._scratch.remove()

    def new_session(self) -> int:
        self._sessions += 1
        return self._sessions

    def ask(
        self,
        verb: str,
        fields: Mapping[str, Any],
        *,
        sends: Mapping[str, np.ndarray] | None = None,
        writes: bool = False,
        trace: Trace = SILENT,
    ) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        """The reply's fields and tensors, after its stages have been shown to `trace`.

        sends   tensors of the request
        writes  whether the engine may answer with tensors
        """
        files = {}
        if sends and not self.is_gone:
            files["in"] = self._scratch.new_path()
            write_tensors(files["in"], sends)
        if writes:
            files["out"] = self._scratch.new_path()
        try:
            paths = {name: str(path) for name, path in files.items()}
            reply = self._process.ask(verb, {**fields, **paths})
            found: dict[str, np.ndarray] = {}
            stages: Traced = []
            if reply.wrote and not writes:
                refuse(verb, "the reply says wrote, but the request named no file to write")
            if reply.wrote:
                found, stages = self._read(verb, files["out"], trace, reply.refusal)
        finally:
            for path in files.values():
                delete(path)
            if self.is_gone:
                self._scratch.remove()
        for stage, layer, array in stages:
            trace(stage, layer, array)
        if reply.refusal is not None:
            raise reply.refusal
        try:
            check_answers(verb, found)
        except EngineError as error:
            refuse(verb, str(error))
        return reply.fields, found

    @staticmethod
    def _read(
        verb: str, path: Path, trace: Trace, refusal: KdtrError | None
    ) -> tuple[dict[str, np.ndarray], Traced]:
        try:
            return read_tensors(verb, path, traced=trace is not SILENT, answered=refusal is None)
        except EngineError as error:
            refuse(verb, str(error))


def refuse(verb: str, text: str) -> NoReturn:
    raise ExchangeError(f"{verb}(): {text}")
