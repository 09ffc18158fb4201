"""The messages of the stdio protocol (docs/stdio-protocol.md): one JSON object a line.

Both ends use this file: `REQUESTS` and `REPLIES` say which fields a message of each verb has, and
whatever else a line holds is refused by name. Tensors travel in KDTR files (stdio_tensors.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from kdtr.conformance.raised import shortened
from kdtr.contract import EngineError, EngineInfo, KdtrError, NumericProfile, errors

VERSION = 1
BATCH_VERBS = frozenset({"verify_batch", "commit_batch"})  # not carried by version 1
_SHOWN = 120  # characters of a refused value


class ExchangeError(EngineError):
    """A process is gone or silent, or what it said is no reply: not what a session answered."""


@dataclass(frozen=True, slots=True)
class Form:
    """What a field holds, in words and as a test."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _or_null(form: Form) -> Form:
    return Form(f"{form.expected} or null", lambda value: value is None or form.fits(value))


def _map_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


NUMBER = Form("an integer of 64 bits", _is_number)
NUMBERS = Form("a list of integers of 64 bits", _list_of(_is_number))
TEXT = Form("a text", _is_text)
TEXTS = Form("a list of texts", _list_of(_is_text))
FLAG = Form("true or false", lambda value: isinstance(value, bool))
TEXT_MAP = Form("an object of texts", _map_of(_is_text))
OBJECT = Form("an object", lambda value: isinstance(value, dict))

Fields = Mapping[str, Form]

_TREE: Fields = {"tokens": NUMBERS, "parents": NUMBERS}
_LIMIT: Fields = {"stop_tokens": NUMBERS, "max_emitted": _or_null(NUMBER)}
_FORWARD: Fields = {"session": NUMBER, "trace": FLAG, "out": TEXT}
_SESSION: Fields = {"session": NUMBER}
_WALK: Fields = {"path": NUMBERS, "bonus": NUMBER}

REQUESTS: Mapping[str, Fields] = {
    "hello": {"kdtr_stdio": NUMBER},
    "load": {"model": NUMBER, "source": TEXT},
    "unload": {"model": NUMBER},
    "open": {"model": NUMBER, "session": NUMBER, "max_len": NUMBER},
    "close": _SESSION,
    "state": _SESSION,
    "set_root": {**_SESSION, "token": NUMBER},
    "forward_tokens": {**_FORWARD, "tokens": NUMBERS, "in": TEXT},
    "prefill": {**_FORWARD, "tokens": NUMBERS},
    "decode": _FORWARD,
    "build": {**_SESSION, "budget": NUMBER, "in": TEXT},
    "verify": {**_FORWARD, **_TREE},
    "accept": {**_SESSION, **_TREE, "targets": _or_null(NUMBERS), **_LIMIT},
    "commit": {**_SESSION, **_WALK},
    "round": {**_FORWARD, **_TREE, **_LIMIT},
    "snapshot": {**_SESSION, "out": TEXT},
    "reset": _SESSION,
}

REPLIES: Mapping[str, Fields] = {
    "hello": {
        "kdtr_stdio": NUMBER,
        "name": TEXT,
        "version": TEXT,
        "device": TEXT,
        "profile": OBJECT,
        "verbs": TEXTS,
        "stages": TEXTS,
        "conventions": TEXT_MAP,
    },
    "state": {"committed_len": NUMBER, "root": _or_null(NUMBER)},
    "prefill": {"root": NUMBER},
    "decode": {"root": NUMBER},
    "build": _TREE,
    "verify": {"targets": NUMBERS},
    "accept": _WALK,
    "round": {**_WALK, "emitted": NUMBERS},
    "load": {},
    "unload": {},
    "open": {},
    "close": {},
    "set_root": {},
    "forward_tokens": {},
    "commit": {},
    "snapshot": {},
    "reset": {},
}

_DTYPES = ("weights", "activations", "latents", "scores", "logits", "accumulation")
_PROFILE: Fields = {
    **dict.fromkeys(_DTYPES, TEXT),
    "deterministic": FLAG,
    "batch_invariant": FLAG,
}
_ERROR: Fields = {"class": TEXT, "text": TEXT}
_CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, KdtrError)
}


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer's fields, or the refusal to raise; wrote: the request's `out` file was written."""

    fields: Mapping[str, Any]
    refusal: KdtrError | None
    wrote: bool


def encode(message: Mapping[str, Any]) -> bytes:
    """One line of ASCII.

    >>> encode({"id": 7, "ok": {"root": 3}})
    b'{"id":7,"ok":{"root":3}}\\n'
    """
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """The object in a line. ValueError, with the reason, for everything else.

    >>> decode('{"id":7}'.encode("utf-16"))
    Traceback (most recent call last):
    ValueError: it is not UTF-8: invalid start byte at byte 0
    """
    try:
        text = line.decode("utf-8")  # json.loads would take UTF-16 and UTF-32 too
        message = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(message, dict):
        raise ValueError(f"it is a {type(message).__name__}")
    return message


def decode_request(line: bytes) -> tuple[int, str, dict[str, Any]]:
    """id, verb and fields. EngineError where the line is no request of version 1."""
    try:
        message = decode(line)
    except ValueError as error:
        raise EngineError(f"the request {_shown_line(line)} is no JSON object: {error}") from None
    number, verb = message.pop("id", None), message.pop("verb", None)
    if not _is_number(number):
        raise EngineError(f"the request's id = {_shown(number)}; expected {NUMBER.expected}")
    if verb not in REQUESTS:
        raise EngineError(f"verb {_shown(verb)}; expected one of {', '.join(REQUESTS)}")
    if verb != "hello":  # its fields may be another version's: answered after a look at that
        _check_fields(f"the {verb} request", message, REQUESTS[verb])
    return number, verb, message


def read_envelope(line: bytes, number: int) -> dict[str, Any]:
    """The reply's object, when it is the one to request `number`.

    EngineError means that the stream can no longer be trusted: something else writes to it.
    """
    try:
        message = decode(line)
    except ValueError as error:
        raise EngineError(
            f"the engine wrote to stdout what is no reply: {_shown_line(line)} ({error}); expected "
            "one JSON object a line, and logs on stderr"
        ) from None
    found = message.get("id")
    if not _is_number(found) or found != number:
        raise EngineError(f"the reply has id {_shown(found)}; expected {number}, the request's")
    return message


def read_reply(verb: str, envelope: Mapping[str, Any]) -> Reply:
    """Hold a reply to the schema of its verb. EngineError names the field."""
    what = "the reply"
    wrote = envelope.get("wrote", False)
    if not isinstance(wrote, bool):
        _refuse(what, "wrote", wrote, FLAG)
    body = {name: value for name, value in envelope.items() if name not in ("id", "wrote")}
    if set(body) not in ({"ok"}, {"error"}):
        raise EngineError(
            f"the reply has the fields {_listed(envelope)}; expected id, one of ok and error, and "
            "wrote where a file was written"
        )
    ((kind, fields),) = body.items()
    if not isinstance(fields, dict):
        _refuse(what, kind, fields, OBJECT)
    if kind == "error":
        _check_fields(f"{what}'s error", fields, _ERROR)
        return Reply({}, _refusal(fields["class"], shortened(fields["text"])), wrote)
    if verb == "hello" and fields.get("kdtr_stdio") != VERSION:
        raise EngineError(
            f"the engine speaks kdtr_stdio {_shown(fields.get('kdtr_stdio'))}; expected {VERSION}"
        )
    _check_fields(what, fields, REPLIES[verb])
    return Reply(fields, None, wrote)


def info_of(fields: Mapping[str, Any]) -> EngineInfo:
    """What `hello` answered, as an EngineInfo; what the names mean is checked by the loader."""
    _check_fields("the reply's profile", fields["profile"], _PROFILE)
    batch = sorted(BATCH_VERBS & set(fields["verbs"]))
    if batch:
        raise EngineError(
            f"info.verbs names {', '.join(batch)}; kdtr_stdio {VERSION} carries no batch verbs"
        )
    return EngineInfo(
        name=fields["name"],
        version=fields["version"],
        device=fields["device"],
        profile=NumericProfile(**fields["profile"]),
        verbs=frozenset(fields["verbs"]),
        stages=frozenset(fields["stages"]),
        conventions=dict(fields["conventions"]),
    )


def info_fields(info: EngineInfo) -> dict[str, Any]:
    """The fields of a `hello` reply; the batch verbs are left out."""
    flags = ("deterministic", "batch_invariant")
    return {
        "kdtr_stdio": VERSION,
        "name": info.name,
        "version": info.version,
        "device": info.device,
        "profile": {name: getattr(info.profile, name) for name in (*_DTYPES, *flags)},
        "verbs": sorted(info.verbs - BATCH_VERBS),
        "stages": sorted(info.stages),
        "conventions": dict(info.conventions),
    }


def class_of(error: KdtrError) -> str:
    """The name under which an error travels: its own, or that of the contract's class above it."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _CLASSES)


def _refusal(kind: str, text: str) -> KdtrError:
    if kind in _CLASSES:
        return _CLASSES[kind](text)
    return EngineError(f"the engine raised {shortened(kind)}: {text}")


def _check_fields(what: str, found: Mapping[str, Any], wanted: Fields) -> None:
    for name, form in wanted.items():
        if name not in found:
            raise EngineError(f"{what} lacks {name}; expected {form.expected}")
        if not form.fits(found[name]):
            _refuse(what, name, found[name], form)
    unknown = [name for name in found if name not in wanted]
    if unknown:
        known = ", ".join(wanted) or "none"
        raise EngineError(f"{what} has the unknown field {_listed(unknown)}; expected {known}")


def _refuse(what: str, name: str, value: object, form: Form) -> NoReturn:
    raise EngineError(f"{what} has {name} = {_shown(value)}; expected {form.expected}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _listed(names: Iterable[str]) -> str:
    return _cut(", ".join(names))


def _shown(value: object) -> str:
    return _cut(json.dumps(value))


def _shown_line(line: bytes) -> str:
    return _cut(repr(line[: 2 * _SHOWN].decode(errors="replace").rstrip("\n")))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
