"""An engine as the judge calls it: every call of its code goes through an EngineCall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kdtr.conformance.engine_call import EngineCall


def noted(engine: Any) -> Any:
    """The same engine to whoever uses it, and so its models and their sessions."""
    return engine if isinstance(engine, _Engine) else _Engine(engine)


class _Noted:
    """Passes everything on. An attribute may be a property, which is the engine's code too."""

    __slots__ = ("_inner",)

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if callable(getattr(type(self._inner), name, None)):  # a method: nothing runs yet
            return self._called(name, getattr(self._inner, name))
        with EngineCall(name):
            value = getattr(self._inner, name)
        return self._called(name, value) if callable(value) else value

    def _called(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with EngineCall(f"{name}()"):
                answer = method(*args, **kwargs)
            return self._wrapped(name, answer)

        return call

    def _wrapped(self, name: str, answer: Any) -> Any:
        return answer


class _Engine(_Noted):
    def _wrapped(self, name: str, answer: Any) -> Any:
        """What is no model is returned as it is: the judge says so."""
        is_model = name == "load" and callable(getattr(answer, "open", None))
        return _Model(answer) if is_model else answer


class _Model(_Noted):
    def _wrapped(self, name: str, answer: Any) -> Any:
        return _Noted(answer) if name == "open" else answer
