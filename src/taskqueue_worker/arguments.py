"""Decoding of payloads into the arguments of handlers, with validation by the handlers' type annotations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NotRequired, cast, get_args, get_origin

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import TypedDict

from taskqueue_core.application.context import Context
from taskqueue_core.errors import ConfigurationError, TaskQueueError

_MAX_FAULTS = 10
_FAULT_TEXTS = {
    "missing": "is missing",
    "extra_forbidden": "is not a parameter",
    "json_invalid": "is not JSON",
}


class InvalidPayload(TaskQueueError):
    """A payload does not match the parameters of the handler. The message names fields and errors, never values."""

    code = "invalid_payload"


class Arguments:
    """A decoder from payloads to the arguments of one handler. It inspects the handler's signature once.

    A payload that is a JSON object provides arguments by name. Any other JSON value is the argument of the handler's
    only parameter. If the handler has no parameters, or more than one, ``null`` means no arguments. Arguments for
    parameters with a default are optional. A parameter annotated with `Context` receives the context and no part of the
    payload. Values are validated in pydantic's lax mode for JSON.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Inspect the signature of ``function``. Raises `ConfigurationError` if it is not valid for a handler."""
        self._contexts: list[str] = []
        fields: dict[str, Any] = {}
        extra = False
        for name, parameter in _signature(function).parameters.items():
            if parameter.annotation is Context:
                self._contexts.append(name)
            elif parameter.kind is parameter.VAR_KEYWORD:
                extra = True
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise _handler_error(function, f"parameter {name!r} cannot be passed by name")
            else:
                fields[name] = self._annotation(function, parameter)
        try:
            self._by_name = _by_name(fields, allow_extra=extra)
            self._single_parameter = (
                _single_parameter(fields) if len(fields) == 1 and not extra else None
            )
        except (PydanticUserError, TypeError, NameError) as error:
            raise _handler_error(function, f"its annotations cannot be checked: {error}") from error

    def read(self, payload: bytes) -> dict[str, Any]:
        """Decode one payload. Raises `InvalidPayload` if it does not match the parameters."""
        try:
            if self._single_parameter is not None and payload.lstrip()[:1] != b"{":
                name, adapter = self._single_parameter
                return {name: adapter.validate_json(payload)}
            if self._single_parameter is None and payload.strip() == b"null":
                return self._by_name.validate_json(b"{}")
            return self._by_name.validate_json(payload)
        except ValidationError as error:
            raise InvalidPayload(_describe(error)) from None

    def of(self, values: list[dict[str, Any]], contexts: list[Context]) -> dict[str, Any]:
        """Return the keyword arguments of the handler for one decoded payload and its context."""
        return values[0] | dict.fromkeys(self._contexts, contexts[0])

    @staticmethod
    def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
        if isinstance(parameter.default, FieldInfo):
            raise _handler_error(
                function,
                f"parameter {parameter.name!r} has Field(...) as default: use Annotated[..., Field(...)]",
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        return kind if parameter.default is parameter.empty else NotRequired[kind]


class BatchArguments:
    """A decoder from payloads to the arguments of one batch handler. It inspects the handler's signature once.

    A parameter annotated ``list[T]`` receives the payloads, each validated as ``T`` in pydantic's lax mode for JSON.
    With the annotation ``list``, or without an annotation, the parameter receives payloads of any type. A parameter
    annotated ``list[Context]`` receives the contexts, in the same order.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Inspect the signature of ``function``. Raises `ConfigurationError` if it is not valid for a batch handler."""
        self._contexts: list[str] = []
        payloads: list[str] = []
        item: Any = Any
        for name, parameter in _signature(function).parameters.items():
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise _handler_error(function, f"parameter {name!r} cannot be passed by name")
            kind = _item_type(parameter.annotation)
            if kind is Context:
                self._contexts.append(name)
            elif kind is None:
                raise _handler_error(
                    function, f"annotate parameter {name!r} of the batch handler as list[...]"
                )
            else:
                payloads.append(name)
                item = kind
        if len(payloads) != 1:
            raise _handler_error(
                function,
                f"a batch handler needs exactly one parameter for payloads, but has {len(payloads)}",
            )
        self._payloads = payloads[0]
        try:
            self._adapter: TypeAdapter[Any] = TypeAdapter(item)
        except (PydanticUserError, TypeError, NameError) as error:
            raise _handler_error(function, f"its annotations cannot be checked: {error}") from error

    def read(self, payload: bytes) -> Any:
        """Decode one payload. Raises `InvalidPayload` if it does not match the type of the items."""
        try:
            return self._adapter.validate_json(payload)
        except ValidationError as error:
            raise InvalidPayload(_describe(error)) from None

    def of(self, values: list[Any], contexts: list[Context]) -> dict[str, Any]:
        """Return the keyword arguments of the handler for decoded payloads and their contexts."""
        return {self._payloads: values, **dict.fromkeys(self._contexts, contexts)}


def _item_type(annotation: Any) -> Any:
    """Return the item type of a list annotation, `Any` if none is given, or ``None`` for another annotation."""
    if annotation in (inspect.Parameter.empty, Any, list, Sequence):
        return Any
    if get_origin(annotation) in (list, Sequence):
        return get_args(annotation)[0]
    return None


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        raise _handler_error(function, f"its signature cannot be read: {error}") from error


def _handler_error(function: Callable[..., Any], what: str) -> ConfigurationError:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return ConfigurationError(f"{name} cannot be a task handler: {what}")


def _by_name(fields: dict[str, Any], *, allow_extra: bool) -> TypeAdapter[dict[str, Any]]:
    shape = cast("Any", TypedDict)("Arguments", fields)
    shape.__pydantic_config__ = ConfigDict(extra="allow" if allow_extra else "forbid")
    return TypeAdapter(shape)


def _single_parameter(fields: dict[str, Any]) -> tuple[str, TypeAdapter[Any]]:
    ((name, kind),) = fields.items()
    bare = kind.__args__[0] if getattr(kind, "__origin__", None) is NotRequired else kind
    return name, TypeAdapter(bare)


def _describe(error: ValidationError) -> str:
    # Show only pydantic's error codes, because some of its messages quote the value, which may be confidential.
    faults = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part)[:50] for part in fault["loc"][:4]) or "payload"
        kind = fault["type"]
        faults.append(f"{path} {_FAULT_TEXTS.get(kind) or f'is invalid: {kind}'}")
    more = len(faults) - _MAX_FAULTS
    return "; ".join(faults[:_MAX_FAULTS]) + (f"; and {more} more" if more > 0 else "")
