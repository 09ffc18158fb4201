"""The host engine, with one fault in one verb: to be served, where the fault ends the process."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
from hostile_engines import Answer, Hostile, raising

from kdtr.conformance import load_engine
from kdtr.contract import EngineError


def make_engine(fault: str = "none", verb: str = "round") -> Any:
    print("a banner on stdout")
    os.write(1, b"another one, past Python\n")
    if fault == "none":
        return load_engine("host")
    if fault in _SHOWS:
        return Hostile(show=_SHOWS[fault])
    return Hostile({verb: _FAULTS[fault]})


def _dies(original: Any, *args: Any, **kwargs: Any) -> Any:
    os._exit(9)


def _hangs(original: Any, *args: Any, **kwargs: Any) -> Any:
    time.sleep(1000)


def _prints(original: Any, *args: Any, **kwargs: Any) -> Any:
    print("to stdout")
    os.write(1, b"to descriptor 1\n")
    assert not os.read(0, 1)
    return original(*args, **kwargs)


def _short(original: Any, *args: Any, **kwargs: Any) -> Any:
    verified = original(*args, **kwargs)
    return type(verified)(verified.logits[:-1], verified.targets)


def _wrong(original: Any, *args: Any, **kwargs: Any) -> Any:
    verified = original(*args, **kwargs)
    return type(verified)(verified.logits + np.float32(3), verified.targets)


def _after(original: Any, *args: Any, **kwargs: Any) -> Any:
    original(*args, **kwargs)
    raise ValueError("no more memory")


_FAULTS: dict[str, Answer] = {
    "dies": _dies,
    "hangs": _hangs,
    "prints": _prints,
    "short": _short,
    "wrong": _wrong,
    "raises": raising(ValueError("no more memory")),
    "raises_after": _after,
    "engine_error": raising(EngineError("no stream")),
    "leaves": raising(SystemExit(0)),
    "nothing": lambda original, *args, **kwargs: None,
}


def _twice(trace: Any, stage: str, layer: int | None, array: Any) -> None:
    trace(stage, layer, array)
    if stage == "mask":
        trace(stage, layer, array)


def _maks(trace: Any, stage: str, layer: int | None, array: Any) -> None:
    trace("maks" if stage == "mask" else stage, layer, array)


def _off_layer(trace: Any, stage: str, layer: int | None, array: Any) -> None:
    trace(stage, 7 if layer == 1 else layer, array)


def _wrong_hidden(trace: Any, stage: str, layer: int | None, array: Any) -> None:
    trace(stage, layer, np.asarray(array) + 1 if (stage, layer) == ("hidden", 0) else array)


_SHOWS = {"twice": _twice, "maks": _maks, "off_layer": _off_layer, "wrong_hidden": _wrong_hidden}
