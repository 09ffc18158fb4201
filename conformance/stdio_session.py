"""One sequence of an engine in another process; lost with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kdtr.conformance import stdio_inputs as inputs
from kdtr.conformance.stdio_connection import Connection
from kdtr.contract import (
    NO_LIMIT,
    SILENT,
    Acceptance,
    Array,
    DraftTree,
    EmitLimit,
    EngineError,
    InputError,
    KdtrError,
    LogicalCache,
    Round,
    SessionError,
    Trace,
    UnsupportedError,
    Verified,
)


class StdioSession:
    """A `Session` of the contract.

    width  of the logits, where it is known without reading the model's source
    alone  whether the process is this session's own, and ends with it
    """

    def __init__(
        self, connection: Connection, number: int, width: int | None, *, alone: bool = False
    ) -> None:
        self._width = width
        self._alone = alone
        self._closed = False
        self._connection = connection
        self._number = number

    @property
    def committed_len(self) -> int:
        return self._ask("state")[0]["committed_len"]

    @property
    def root(self) -> int | None:
        return self._ask("state")[0]["root"]

    def set_root(self, token: int) -> None:
        self._offered("set_root")
        self._ask("set_root", {"token": inputs.number("token", token)})

    def forward_tokens(
        self, tokens: Sequence[int], positions: Array, mask: Array, *, trace: Trace = SILENT
    ) -> Array:
        self._offered("forward_tokens")
        ids = inputs.numbers("tokens", tokens)
        sends = {
            "positions": inputs.host_array("positions", positions),
            "mask": inputs.host_array("mask", mask),
        }
        _, found = self._forward("forward_tokens", {"tokens": ids}, trace, sends)
        return self._logits("forward_tokens", found["logits"], len(ids))

    def prefill(self, tokens: Sequence[int], *, trace: Trace = SILENT) -> int:
        self._offered("prefill")
        fields, _ = self._forward("prefill", {"tokens": inputs.numbers("tokens", tokens)}, trace)
        return fields["root"]

    def decode(self, *, trace: Trace = SILENT) -> int:
        self._offered("decode")
        return self._forward("decode", {}, trace)[0]["root"]

    def build(self, draft_logits: Array, budget: int) -> DraftTree:
        self._offered("build")
        sends = {"draft_logits": inputs.host_array("draft_logits", draft_logits)}
        fields, _ = self._ask("build", {"budget": inputs.number("budget", budget)}, sends=sends)
        try:
            return DraftTree(tuple(fields["tokens"]), tuple(fields["parents"]))
        except KdtrError as error:
            raise EngineError(f"build(): the reply is no tree: {error}") from None

    def verify(self, tree: DraftTree, *, trace: Trace = SILENT) -> Verified:
        self._offered("verify")
        fields, found = self._forward("verify", inputs.tree_fields(tree), trace)
        logits, targets, n = found.get("logits"), tuple(fields["targets"]), len(tree)
        if logits is not None:
            logits = self._logits("verify", logits, n)
        if len(targets) != n:
            raise EngineError(
                f"verify() returned {len(targets)} targets, the tree has {n} nodes; expected {n}"
            )
        return Verified(logits, targets)

    def accept(
        self, tree: DraftTree, targets: Sequence[int] | None = None, *, limit: EmitLimit = NO_LIMIT
    ) -> Acceptance:
        self._offered("accept")
        fields = {
            **inputs.tree_fields(tree),
            "targets": None if targets is None else inputs.numbers("targets", targets),
            **inputs.limit_fields(limit),
        }
        return _acceptance("accept", self._ask("accept", fields)[0])

    def commit(self, acceptance: Acceptance) -> None:
        self._offered("commit")
        self._ask("commit", inputs.walk_fields(acceptance))

    def round(
        self, tree: DraftTree, *, limit: EmitLimit = NO_LIMIT, trace: Trace = SILENT
    ) -> Round:
        self._offered("round")
        request = {**inputs.tree_fields(tree), **inputs.limit_fields(limit)}
        fields, _ = self._forward("round", request, trace)
        return Round(tree, _acceptance("round", fields), tuple(fields["emitted"]))

    def snapshot(self) -> LogicalCache:
        self._offered("snapshot")
        _, found = self._ask("snapshot", writes=True)
        for name, axes in (("tokens", "t"), ("positions", "t"), ("c_kv", "ltc"), ("k_pe", "ltr")):
            shape = list(found[name].shape)
            if len(shape) != len(axes):
                raise EngineError(f"snapshot() {name} is {shape}; expected [{', '.join(axes)}]")
        return LogicalCache(**found)

    def reset(self) -> None:
        self._offered("reset")
        self._ask("reset")

    def close(self) -> None:
        """Nothing to do where the process is gone."""
        if not self._connection.is_gone:
            self._ask("close")
        if self._alone:
            self._closed = True
            self._connection.close()

    def _offered(self, verb: str) -> None:
        if verb not in self._connection.info.verbs:
            raise UnsupportedError(f"{self._connection.info.name} does not offer {verb}()")

    def _ask(
        self, verb: str, fields: Mapping[str, Any] | None = None, **files: Any
    ) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        if self._closed:  # the engine that would say so is gone too
            raise SessionError("the session is closed; open another")
        return self._connection.ask(verb, {"session": self._number, **(fields or {})}, **files)

    def _forward(
        self,
        verb: str,
        fields: Mapping[str, Any],
        trace: Trace,
        sends: Mapping[str, np.ndarray] | None = None,
    ) -> tuple[Mapping[str, Any], dict[str, np.ndarray]]:
        if not callable(trace):
            raise InputError(f"trace is {type(trace).__name__}; expected a function, or SILENT")
        asked = {**fields, "trace": trace is not SILENT}
        return self._ask(verb, asked, sends=sends, writes=True, trace=trace)

    def _logits(self, verb: str, logits: np.ndarray, n: int) -> np.ndarray:
        shape = list(logits.shape)
        if len(shape) != 2 or shape[0] != n or self._width not in (None, shape[1]):
            raise EngineError(
                f"{verb}() returned logits {shape}; expected [{n}, {self._width or 'vocab_size'}]"
            )
        return logits


def _acceptance(verb: str, fields: Mapping[str, Any]) -> Acceptance:
    try:
        return Acceptance(tuple(fields["path"]), fields["bonus"])
    except KdtrError as error:
        raise EngineError(f"{verb}(): the reply is no acceptance: {error}") from None
