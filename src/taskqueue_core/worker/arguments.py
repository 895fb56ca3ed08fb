"""From a payload's bytes to a handler's arguments, checked against its annotations in one pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NotRequired, cast

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from taskqueue_core.errors import ConfigurationError, TaskQueueError
from taskqueue_core.worker.context import Context

__all__ = ["Arguments", "InvalidPayload"]

_NAMED_FAULTS = 10
_PLAIN = {
    "missing": "is missing",
    "extra_forbidden": "is not a parameter",
    "json_invalid": "is not JSON",
}


class InvalidPayload(TaskQueueError):
    """A payload does not fit the handler. The message names fields and faults, never values."""

    code = "invalid_payload"


class Arguments:
    """How one handler is called. Made once, at registration.

    An object is spread over the parameters by name; anything else goes to the only parameter, and ``null`` also means
    no arguments where there is not exactly one. Parameters with a default may be left out. A parameter annotated with
    `Context` gets the context instead. Values are read in pydantic's lax mode for JSON.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Look at a signature. Raises `ConfigurationError` where it cannot be served."""
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        self._contexts: list[str] = []
        fields: dict[str, Any] = {}
        extra = False
        for name, parameter in self._signature(function).parameters.items():
            if parameter.annotation is Context:
                self._contexts.append(name)
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = True
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise self._fault(f"parameter {name!r} cannot be given by name")
            else:
                fields[name] = self._annotation(parameter)
        try:
            self._by_name = _by_name(fields, allow_extra=extra)
            self._only = _only(fields) if len(fields) == 1 and not extra else None
        except (PydanticUserError, TypeError, NameError) as error:
            raise self._fault(f"its annotations cannot be checked: {error}") from error

    def read(self, payload: bytes, context: Context) -> dict[str, Any]:
        """Return the keyword arguments, or raise `InvalidPayload`."""
        try:
            if self._only is not None and payload.lstrip()[:1] != b"{":
                name, adapter = self._only
                values = {name: adapter.validate_json(payload)}
            elif self._only is None and payload.strip() == b"null":
                values = self._by_name.validate_json(b"{}")
            else:
                values = self._by_name.validate_json(payload)
        except ValidationError as error:
            raise InvalidPayload(_describe(error)) from None
        for name in self._contexts:
            values[name] = context
        return values

    def _signature(self, function: Callable[..., Any]) -> inspect.Signature:
        try:
            return inspect.signature(function, eval_str=True)
        except (NameError, TypeError, ValueError, SyntaxError, AttributeError) as error:
            raise self._fault(f"its signature cannot be read: {error}") from error

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        if isinstance(parameter.default, FieldInfo):
            raise self._fault(f"write Annotated[..., Field(...)] for {parameter.name!r}")
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        return kind if parameter.default is parameter.empty else NotRequired[kind]

    def _fault(self, what: str) -> ConfigurationError:
        return ConfigurationError(f"{self._name} cannot be a task's handler: {what}")


def _by_name(fields: dict[str, Any], *, allow_extra: bool) -> TypeAdapter[dict[str, Any]]:
    shape = cast("Any", TypedDict)("Arguments", fields)
    shape.__pydantic_config__ = ConfigDict(extra="allow" if allow_extra else "forbid")
    return TypeAdapter(shape)


def _only(fields: dict[str, Any]) -> tuple[str, TypeAdapter[Any]]:
    ((name, kind),) = fields.items()
    bare = kind.__args__[0] if getattr(kind, "__origin__", None) is NotRequired else kind
    return name, TypeAdapter(bare)


def _describe(error: ValidationError) -> str:
    # Only pydantic's short codes are used: some of its messages quote the value.
    faults = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part)[:50] for part in fault["loc"][:4]) or "payload"
        kind = fault["type"]
        faults.append(f"{path} {_PLAIN.get(kind) or f'does not fit: {kind}'}")
    more = len(faults) - _NAMED_FAULTS
    return "; ".join(faults[:_NAMED_FAULTS]) + (f"; and {more} more" if more > 0 else "")
