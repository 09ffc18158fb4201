"""The other end of the stdio protocol for an engine in Python: requests in, replies out.

It adds nothing to an engine and hides nothing of it: what `kdtr gate` would see of an engine in
its own process, it sees of the same engine behind this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np

from kdtr.conformance.host_array import Numbers, host_copy, host_integer, host_integers
from kdtr.conformance.observe import as_round, as_verified, host_cache
from kdtr.conformance.raised import RAISED, origin, told, words
from kdtr.conformance.stdio_protocol import (
    VERSION,
    class_of,
    decode_request,
    encode,
    info_fields,
)
from kdtr.conformance.stdio_tensors import ANSWERS, trace_name, write_tensors
from kdtr.contract import (
    Acceptance,
    DraftTree,
    EmitLimit,
    Engine,
    EngineError,
    KdtrError,
    Model,
    Session,
    SessionError,
    UnsupportedError,
)
from kdtr.kdtr_format import Bundle

Fields = Mapping[str, Any]
Answer = tuple[dict[str, Any], dict[str, np.ndarray]]  # fields of `ok`, tensors of the file

_NOTHING: Answer = ({}, {})
_LONGEST = 100_000  # characters of a refusal; who reads it cuts it for people


def serve(make: Callable[[], Engine], requests: IO[bytes], replies: IO[bytes]) -> None:
    """Answer until the requests end. The engine is made when `hello` asks for it.

    EngineError for a line that is no request: what follows it cannot be trusted.
    """
    server = _Server(make)
    for line in requests:
        number, verb, fields = decode_request(line)
        replies.write(encode({"id": number, **server.reply(verb, fields)}))
        replies.flush()


class _Shown:
    """The trace that an engine is given: keeps every stage for the reply's file."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}
        self.fault: EngineError | None = None

    def __call__(self, stage: str, layer: int | None, array: Any, /) -> None:
        try:
            name = trace_name(stage, layer)
            if name in self.arrays:
                at = "" if layer is None else f" of layer {layer}"
                raise EngineError(f"{stage}{at} was traced twice; expected once per forward")
            self.arrays[name] = host_copy(f"trace of {stage}", array, Numbers.ANY)
        except EngineError as error:
            self.fault = self.fault or error


class _Server:
    def __init__(self, make: Callable[[], Engine]) -> None:
        self._make = make
        self._engine: Engine | None = None
        self._models: dict[int, Model] = {}
        # A closed session stays: that it refuses every verb is the engine's own word.
        self._sessions: dict[int, tuple[int, Session]] = {}

    def reply(self, verb: str, fields: Fields) -> dict[str, Any]:
        """The reply without its id."""
        shown = _Shown()
        arrays: dict[str, np.ndarray] = {}
        try:
            ok, arrays = self._answered(verb, fields, shown)
            if shown.fault is not None:
                raise shown.fault
            body: dict[str, Any] = {"ok": ok}
        except RAISED as error:  # an engine may raise anything
            body, arrays = {"error": _told(error, refusal=verb == "hello")}, {}
        arrays = {**arrays, **shown.arrays}
        if not arrays:
            return body
        try:
            write_tensors(fields["out"], arrays)
        except KdtrError as error:
            return {"error": _told(EngineError(f"{verb}(): the tensors were not written: {error}"))}
        return {**body, "wrote": True}

    def _answered(self, verb: str, fields: Fields, shown: _Shown) -> Answer:
        if verb == "hello":
            return self._hello(fields)
        if self._engine is None:
            raise EngineError(f"{verb} before hello")
        if verb in ("load", "unload", "open"):
            self._lifetime(self._engine, verb, fields)
            return _NOTHING
        if fields["session"] not in self._sessions:
            raise SessionError(f"session {fields['session']} was never opened")
        session = self._sessions[fields["session"]][1]
        traced = {"trace": shown} if fields.get("trace") else {}
        return _VERBS[verb](session, fields, traced)

    def _hello(self, fields: Fields) -> Answer:
        if fields.get("kdtr_stdio") != VERSION:
            raise UnsupportedError(
                f"kdtr_stdio = {fields.get('kdtr_stdio')!r}; this engine speaks {VERSION}"
            )
        if self._engine is None:
            self._engine = self._make()
        return info_fields(self._engine.info), {}

    def _lifetime(self, engine: Engine, verb: str, fields: Fields) -> None:
        number = fields["model"]
        if verb == "load":
            model = engine.load(fields["source"])
            if not callable(getattr(model, "open", None)):
                kind = type(model).__name__
                raise EngineError(f"load() returned a {kind} without open(); expected a model")
            self._models[number] = model
            return
        if number not in self._models:
            raise SessionError(f"model {number} is not loaded")
        if verb == "open":
            opened = self._models[number].open(max_len=fields["max_len"])
            self._sessions[fields["session"]] = number, opened
            return
        kept = {key: entry for key, entry in self._sessions.items() if entry[0] != number}
        self._sessions = kept
        self._models.pop(number).close()


def _told(error: BaseException, *, refusal: bool = False) -> dict[str, str]:
    """Refusals in their own class; everything else as the judge would tell it of its process.

    refusal  an EngineError is one, of an option of the factory; else it is what broke
    """
    place = origin(error)
    if isinstance(error, KdtrError) and (
        refusal or not isinstance(error, EngineError) or not place
    ):
        return {"class": class_of(error), "text": words(error, _LONGEST)}
    at = f" (at {place})" if place else ""
    return {"class": "EngineError", "text": f"the engine raised {told(error)}{at}"}


def _state(session: Session, fields: Fields, traced: Fields) -> Answer:
    root = session.root
    return {
        "committed_len": host_integer("committed_len", session.committed_len),
        "root": None if root is None else host_integer("root", root),
    }, {}


def _set_root(session: Session, fields: Fields, traced: Fields) -> Answer:
    session.set_root(fields["token"])
    return _NOTHING


def _forward_tokens(session: Session, fields: Fields, traced: Fields) -> Answer:
    sent = _sent(fields)
    logits = session.forward_tokens(fields["tokens"], sent["positions"], sent["mask"], **traced)
    return {}, {"logits": host_copy("forward_tokens() logits", logits, Numbers.FLOATING)}


def _prefill(session: Session, fields: Fields, traced: Fields) -> Answer:
    return {"root": host_integer("prefill()", session.prefill(fields["tokens"], **traced))}, {}


def _decode(session: Session, fields: Fields, traced: Fields) -> Answer:
    return {"root": host_integer("decode()", session.decode(**traced))}, {}


def _build(session: Session, fields: Fields, traced: Fields) -> Answer:
    tree = session.build(_sent(fields)["draft_logits"], fields["budget"])
    _expect("build()", tree, DraftTree)
    return {"tokens": list(tree.tokens), "parents": list(tree.parents)}, {}


def _verify(session: Session, fields: Fields, traced: Fields) -> Answer:
    verified = as_verified(session.verify(_tree(fields), **traced))
    arrays = {}
    if verified.logits is not None:
        arrays["logits"] = host_copy("verify() logits", verified.logits, Numbers.FLOATING)
    return {"targets": host_integers("verify() targets", verified.targets).tolist()}, arrays


def _accept(session: Session, fields: Fields, traced: Fields) -> Answer:
    targets = () if fields["targets"] is None else (fields["targets"],)
    acceptance = session.accept(_tree(fields), *targets, **_limited(fields))
    return _walk("accept()", acceptance), {}


def _commit(session: Session, fields: Fields, traced: Fields) -> Answer:
    session.commit(Acceptance(tuple(fields["path"]), fields["bonus"]))
    return _NOTHING


def _round(session: Session, fields: Fields, traced: Fields) -> Answer:
    done = as_round(session.round(_tree(fields), **_limited(fields), **traced))
    walk = _walk("round()", done.acceptance)
    return {**walk, "emitted": host_integers("round() emitted", done.emitted).tolist()}, {}


def _snapshot(session: Session, fields: Fields, traced: Fields) -> Answer:
    cache = host_cache(session.snapshot())
    return {}, {name: getattr(cache, name) for name in ANSWERS["snapshot"]}


def _reset(session: Session, fields: Fields, traced: Fields) -> Answer:
    session.reset()
    return _NOTHING


def _close(session: Session, fields: Fields, traced: Fields) -> Answer:
    session.close()
    return _NOTHING


_VERBS: Mapping[str, Callable[[Session, Fields, Fields], Answer]] = {
    "state": _state,
    "set_root": _set_root,
    "forward_tokens": _forward_tokens,
    "prefill": _prefill,
    "decode": _decode,
    "build": _build,
    "verify": _verify,
    "accept": _accept,
    "commit": _commit,
    "round": _round,
    "snapshot": _snapshot,
    "reset": _reset,
    "close": _close,
}


def _sent(fields: Fields) -> dict[str, np.ndarray]:
    """The request's tensors, as copies: an engine may write into what it is given."""
    with Bundle.open(fields["in"]) as bundle:
        return {name: bundle[name].copy() for name in bundle.names()}


def _tree(fields: Fields) -> DraftTree:
    return DraftTree(tuple(fields["tokens"]), tuple(fields["parents"]))


def _limited(fields: Fields) -> dict[str, Any]:
    """The keyword for a limit, where there is one: an engine need not know it otherwise."""
    if not fields["stop_tokens"] and fields["max_emitted"] is None:
        return {}
    return {"limit": EmitLimit(frozenset(fields["stop_tokens"]), fields["max_emitted"])}


def _walk(verb: str, acceptance: Any) -> dict[str, Any]:
    _expect(verb, acceptance, Acceptance)
    return {"path": list(acceptance.path), "bonus": acceptance.bonus}


def _expect(verb: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        found = "None" if value is None else f"a {type(value).__name__}"
        article = "an" if kind is Acceptance else "a"
        raise EngineError(f"{verb} returned {found}; expected {article} {kind.__name__}")
