"""Arguments of handlers: encoding as payloads, and decoding, with validation by the handlers' type annotations."""

from __future__ import annotations

import hashlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NotRequired, get_args, get_origin

import msgspec
from pydantic import PydanticUserError, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticSerializationError, to_json

from taskqueue_core.application.call import OPTIONS
from taskqueue_core.application.context import Context
from taskqueue_core.application.dependencies import dependencies_of
from taskqueue_core.application.errors import InvalidArguments
from taskqueue_core.application.json_codec import (
    NOT_FINITE,
    JsonCodec,
    arguments_codec,
    bytes_fault,
    describe,
    is_record,
)
from taskqueue_core.application.type_errors import (
    annotation_error,
    handler_error,
    handler_signature,
    name_error,
    named_extras,
    without_mark,
)
from taskqueue_core.errors import InvalidInput, TaskQueueError, TooLarge
from taskqueue_core.limits import LIMITS, check_digits, check_json, check_written
from taskqueue_core.policy_model import nearest_first


class InvalidPayload(TaskQueueError):
    """A payload does not match the parameters of the handler. The message names fields and errors, never values."""

    code = "invalid_payload"


class _Payload(ABC):
    """The form of the payloads of one handler."""

    fields: Mapping[str, Any]
    """the types of the parameters"""

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the payloads. Raises pydantic's ``PydanticUserError`` if there is none."""

    @cached_property
    def fingerprint(self) -> str | None:
        """A digest of the JSON Schema; ``None`` if a parameter has a type without one."""
        try:
            text = msgspec.json.encode(self.schema(), order="deterministic")
        except PydanticUserError:
            return None
        return hashlib.sha256(text).hexdigest()[:16]


class Arguments(_Payload):
    """An encoder and decoder for the arguments of one handler. It inspects the handler's signature once.

    `write` encodes arguments as a JSON object, by name. `read` accepts that. Any other JSON value is the argument of
    the handler's only parameter. If this parameter is a model, a dataclass or a ``TypedDict``, `read` also accepts its
    fields without the name. If the handler has no parameters, or more than one, ``null`` means no arguments. Arguments
    for parameters with a default are optional. A parameter annotated with `Context` receives the context and no part
    of the payload; so does one whose default is a dependency. Values are validated in pydantic's lax mode.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Inspect the signature of ``function``. Raises `ConfigurationError` if it is not valid for a handler."""
        self._contexts: list[str] = []
        fields: dict[str, Any] = {}
        extra: Any = None
        signature = handler_signature(function)
        parameters: list[inspect.Parameter] = []
        self.dependencies = dependencies_of(function, signature)
        """the names of the parameters that a worker provides, and not the publisher"""
        by_name = False
        for name, parameter in signature.parameters.items():
            if name in self.dependencies:
                by_name = True
                continue
            _check_annotated(function, parameter, is_first=not self._contexts and not parameters)
            if _is_context(parameter.annotation):
                self._contexts.append(name)
                continue
            # Positions after a dependency differ from those in the function, so these arguments are passed by name.
            after = by_name and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            parameters.append(
                parameter.replace(kind=parameter.KEYWORD_ONLY) if after else parameter
            )
            if parameter.kind is parameter.VAR_KEYWORD:
                named = named_extras(function, parameter.annotation)
                fields |= named or {}
                extra = None if named is not None else self._annotation(function, parameter)
            elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
                raise name_error(function, parameter)
            else:
                fields[name] = self._annotation(function, parameter)
        self._partial: dict[frozenset[str], JsonCodec] = {}
        self.fields = fields
        self._extra = extra
        self.signature = inspect.Signature(
            [each.replace(annotation=each.empty) for each in parameters]
        )
        """the signature without contexts and annotations"""
        self._names = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        try:
            self._by_name = arguments_codec(fields, extra)
            self._read_by_name: Callable[[bytes], dict[str, Any]]
            self._read_by_name = self._by_name.validator.validate_json
            self._single_parameter = (
                _single_parameter(fields) if len(fields) == 1 and extra is None else None
            )
            self._is_record = len(fields) == 1 and extra is None and is_record(*fields.values())
        except (PydanticUserError, TypeError, NameError) as error:
            extras = {} if extra is None else {parameters[-1].name: extra}
            raise annotation_error(function, fields | extras, error) from error

    def write(
        self, task: str, args: tuple[Any, ...], kwargs: dict[str, Any], limit: str = "payload"
    ) -> bytes:
        """Encode arguments as a payload. ``task``: the name of the task, for errors; ``limit``: the name of the limit.

        Raises `InvalidArguments` if they do not match the parameters or have no JSON, and `TooLarge`.
        """
        values = self.bind(task, args, kwargs)
        try:
            return _encode(task, self._by_name, values, values, limit)
        except InvalidArguments as error:
            raise _invalid(task, error.got + self._hint(values)) from None

    def write_without(
        self, task: str, values: dict[str, Any], missing: frozenset[str], limit: str
    ) -> bytes:
        """Encode arguments without some of them, which the caller adds. Raises `InvalidArguments` and `TooLarge`."""
        try:
            self.signature.bind(**values, **dict.fromkeys(missing))
        except TypeError as error:
            raise _invalid(task, str(error) + self._hint(values)) from None
        if (codec := self._partial.get(missing)) is None:
            fields = {name: kind for name, kind in self.fields.items() if name not in missing}
            codec = arguments_codec(fields, self._extra)
            self._partial[missing] = codec
        return _encode(task, codec, values, values, limit)

    def bind(self, task: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return arguments by name. Raises `InvalidArguments` if they do not match the parameters."""
        values = dict(kwargs)
        for name, value in zip(self._names, args, strict=False):
            values[name] = value  # noqa: PERF403 - faster than a dict of these, updated with the others
        if self.dependencies and not self.dependencies.isdisjoint(kwargs):
            name = min(self.dependencies & kwargs.keys())
            raise _invalid(task, f"{name} is a dependency, which the worker provides")
        if len(values) != len(args) + len(kwargs):
            try:
                self.signature.bind(*args, **kwargs)  # raises an error, which names the fault
            except TypeError as error:
                raise _invalid(task, str(error)) from None
        return values

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether a value is allowed as an argument."""
        kind = self.fields.get(name, self._extra or Any)
        try:
            JsonCodec(without_mark(kind)).validator.validate_python(value)
        except ValidationError:
            return False
        return True

    def _hint(self, values: dict[str, Any]) -> str:
        """Return what to write in place of an argument that is not a parameter, if there is one."""
        known = self.signature.parameters
        unknown = next((name for name in values if name not in known), None)
        if unknown is None or any(each.kind is each.VAR_KEYWORD for each in known.values()):
            return ""
        if unknown in OPTIONS:
            return f"; {unknown} is an option: write using({unknown}=...).publish(...)"
        return f"; it has {nearest_first(unknown, known)}" if known else "; it has none"

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the payloads."""
        return self._by_name.adapter.json_schema()

    def read(self, payload: bytes) -> dict[str, Any]:
        """Decode one payload. Raises `InvalidPayload` if it does not match the parameters."""
        try:
            if self._single_parameter is not None and payload.lstrip()[:1] != b"{":
                name, adapter = self._single_parameter
                return {name: adapter.validate_json(payload)}
            if self._single_parameter is None and payload.strip() == b"null":
                payload = b"{}"
            return self._read_by_name(payload)
        except ValidationError as error:
            if (
                self._single_parameter is None
                or not self._is_record
                or payload.lstrip()[:1] != b"{"
            ):
                raise InvalidPayload(describe(error, self._by_name)) from None
            faults = describe(error, self._by_name)
        name, adapter = self._single_parameter
        try:
            return {name: adapter.validate_json(payload)}
        except ValidationError as error:
            raise InvalidPayload(
                f"it is neither an object with the argument {name!r} ({faults}), "
                f"nor the argument itself ({describe(error, adapter)})"
            ) from None

    def of(self, values: list[dict[str, Any]], contexts: list[Context[Any]]) -> dict[str, Any]:
        """Return the keyword arguments of the handler for one decoded payload and its context."""
        (arguments,) = values
        for name in self._contexts:
            arguments[name] = contexts[0]
        return arguments

    @staticmethod
    def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
        if isinstance(parameter.default, FieldInfo):
            raise handler_error(
                function,
                f"parameter {parameter.name!r} has Field(...) as default: use Annotated[..., Field(...)]",
            )
        kind = Any if parameter.annotation is parameter.empty else parameter.annotation
        return kind if parameter.default is parameter.empty else NotRequired[kind]


class BatchArguments(_Payload):
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
        signature = handler_signature(function)
        self.dependencies = dependencies_of(function, signature, batch=True)
        """the names of the parameters that a worker provides, and not the publisher"""
        for name, parameter in signature.parameters.items():
            if name in self.dependencies:
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise name_error(function, parameter)
            kind = _item_type(parameter.annotation)
            if _is_context(kind):
                self._contexts.append(name)
            elif kind is None:
                raise handler_error(
                    function, f"annotate parameter {name!r} of the batch handler as list[...]"
                )
            else:
                payloads.append(name)
                item = kind
        if len(payloads) != 1:
            raise handler_error(
                function,
                f"a batch handler needs exactly one parameter for payloads, but has {len(payloads)}",
            )
        self._payloads = payloads[0]
        self.fields = {payloads[0]: item}
        self.signature = inspect.Signature(
            [inspect.Parameter(payloads[0], inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        )
        try:
            self._codec = JsonCodec(item)
        except (PydanticUserError, TypeError, NameError) as error:
            raise annotation_error(function, {payloads[0]: item}, error) from error

    def write(
        self, task: str, args: tuple[Any, ...], kwargs: dict[str, Any], limit: str = "payload"
    ) -> bytes:
        """Encode a list with the payload of one task. Raises `InvalidArguments` and `TooLarge`."""
        try:
            (items,) = self.signature.bind(*args, **kwargs).arguments.values()
        except TypeError as error:
            raise _invalid(task, str(error)) from None
        if not isinstance(items, list | tuple) or len(items) != 1:
            raise _invalid(
                task, f"{self._payloads} must be a list with one item: each task has one payload"
            )
        return _encode(task, self._codec, items[0], {self._payloads: items[0]}, limit)

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the payloads."""
        return self._codec.adapter.json_schema()

    def read(self, payload: bytes) -> Any:
        """Decode one payload. Raises `InvalidPayload` if it does not match the type of the items."""
        try:
            return self._codec.validate_json(payload)
        except ValidationError as error:
            raise InvalidPayload(describe(error, self._codec)) from None

    def of(self, values: list[Any], contexts: list[Context[Any]]) -> dict[str, Any]:
        """Return the keyword arguments of the handler for decoded payloads and their contexts."""
        return {self._payloads: values, **dict.fromkeys(self._contexts, contexts)}


def _invalid(task: str, faults: str) -> InvalidArguments:
    return InvalidArguments(task, faults, "what the signature of its function allows")


def _encode(
    task: str, codec: JsonCodec, value: Any, arguments: Mapping[str, Any], limit: str
) -> bytes:
    """Encode a value. ``arguments``: the same by parameter, for the error."""
    try:
        text = codec.serializer.to_json(codec.validator.validate_python(value), by_alias=True)
        check_written("arguments", text, limit)
    except ValidationError as error:
        raise _invalid(task, describe(error, codec)) from None
    except TooLarge:
        raise
    except (PydanticSerializationError, InvalidInput) as error:
        raise _invalid(task, bytes_fault(error) or _without_json(arguments)) from None
    return text


def _without_json(arguments: Mapping[str, Any]) -> str:
    """Return which argument has no JSON text that a worker can read. The arguments match their parameters."""
    for name, value in arguments.items():
        try:
            text = to_json({name: value}, inf_nan_mode="constants", bytes_mode="base64")
            check_digits(name, text)
            check_json(name, text, "decoded")
        except InvalidInput as error:
            if "not JSON" in error.got:
                return f"{name} has {NOT_FINITE}"
            if "nested" in error.got:
                return f"{name} is nested too deeply: all arguments may have {LIMITS.depth} levels"
            return f"{name} has {error.got}; allowed: {error.allowed}"
        except PydanticSerializationError:  # such as a cycle, a lone surrogate, or an unknown type
            return (
                f"{name} has no equivalent in JSON: annotate its parameter with its type; cycles and lone surrogates "
                "have none"
            )
    return "an argument has no equivalent in JSON: annotate its parameter with its type"


def _item_type(annotation: Any) -> Any:
    """Return the item type of a list annotation, `Any` if none is given, or ``None`` for another annotation."""
    if annotation in (inspect.Parameter.empty, Any, list, Sequence):
        return Any
    if get_origin(annotation) in (list, Sequence):
        return get_args(annotation)[0]
    return None


def _check_annotated(
    function: Callable[..., Any], parameter: inspect.Parameter, *, is_first: bool
) -> None:
    """Raise `ConfigurationError` for a parameter without an annotation that is probably no argument."""
    name = parameter.name
    if parameter.annotation is not parameter.empty:
        return
    if name == "context" or (name == "ctx" and is_first):
        raise handler_error(
            function,
            f"parameter {name!r} has no annotation: write '{name}: Context' to get the context, or annotate it with "
            "its type to make it an argument",
        )
    if name == "self" and is_first:
        raise handler_error(
            function,
            f"it is a method, whose parameter {name!r} no worker can provide: declare a function, or a method of an "
            "object, as in tasks.task(mailer.send)",
        )


def _is_context(annotation: Any) -> bool:
    """Return whether an annotation is ``Context`` or ``Context[State]``."""
    return annotation is Context or get_origin(annotation) is Context


def _single_parameter(fields: dict[str, Any]) -> tuple[str, JsonCodec]:
    ((name, kind),) = fields.items()
    return name, JsonCodec(without_mark(kind))
