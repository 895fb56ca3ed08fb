"""Errors about functions that cannot be handlers, and about types of parameters and results without JSON."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NotRequired, Required, get_args, get_origin, get_type_hints

import typing_extensions
from pydantic import PydanticUserError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

from taskqueue_core.application.json_codec import JsonCodec
from taskqueue_core.errors import ConfigurationError, InvalidInput
from taskqueue_core.limits import check_name

_UNPACK = (typing.Unpack, typing_extensions.Unpack)  # they differ before Python 3.12


def check_declared_name(name: str, what: str) -> None:
    """Raise `ConfigurationError` for a name that is not allowed. ``what`` it is the name of."""
    try:
        check_name(what, name)
    except InvalidInput as error:
        raise ConfigurationError(str(error)) from error


def check_prefix(prefix: object) -> None:
    """Raise `ConfigurationError` if a name cannot begin with ``prefix``."""
    if not isinstance(prefix, str):
        raise ConfigurationError(
            f"prefix: got a {type(prefix).__name__}; expected text, such as 'shop.'"
        )
    check_declared_name(prefix + "x", "prefix")


def annotation_error(
    function: Callable[..., Any], fields: Mapping[Any, Any], error: Exception
) -> ConfigurationError:
    """Return the error for a type without JSON. ``fields``: types by parameter; ``None``: that of the result."""
    for name, annotation in fields.items():
        kind = without_mark(annotation)
        subject = "its result" if name is None else f"parameter {name!r}"
        try:
            JsonCodec(kind)
        except PydanticUndefinedAnnotation as unknown:
            return handler_error(
                function,
                f"the type of {subject} refers to {unknown.name!r}, which cannot be looked up. If that is the type "
                f"itself, write 'type {unknown.name} = ...', or TypeAliasType before Python 3.12; otherwise define it "
                "before the task",
            )
        except PydanticSchemaGenerationError:
            return handler_error(
                function,
                f"{subject} has the type {_shown(kind)}, of which pydantic does not know the JSON form; use a model, "
                "a dataclass, a TypedDict or a type of the standard library",
            )
        except (PydanticUserError, TypeError, NameError) as fault:
            return handler_error(
                function, f"the type of {subject} cannot be checked: {_first_line(fault)}"
            )
    return handler_error(function, f"its annotations cannot be checked: {error}")


def schema_error(task: str, fields: Mapping[str, Any], error: Exception) -> ConfigurationError:
    """Return the error for parameters without a JSON Schema, of which at least one has a type without one."""
    for name, kind in fields.items():
        try:
            JsonCodec(without_mark(kind)).adapter.json_schema()
        except PydanticUserError:
            return ConfigurationError(
                f"the task {task!r} has no JSON Schema, because the type {_shown(kind)} of its parameter {name!r} has "
                "none: annotate it with a model, or with WithJsonSchema of pydantic"
            )
    return ConfigurationError(f"the task {task!r} has no JSON Schema: {_first_line(error)}")


def without_mark(kind: Any) -> Any:
    """Return the type of a parameter, which may have a default."""
    return get_args(kind)[0] if get_origin(kind) is NotRequired else kind


def _shown(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def handler_signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature, with evaluated annotations. Raises `ConfigurationError`."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, TypeError, ValueError, SyntaxError, AttributeError) as error:
        why = f"its signature cannot be read: {error}"
        if isinstance(error, NameError):
            why += "; import it in the module, and not only for type checkers"
        raise handler_error(function, why) from error


def handler_error(function: Callable[..., Any], what: str) -> ConfigurationError:
    """Return the error for a function that cannot be a handler."""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return ConfigurationError(f"{name} cannot be a task handler: {what}")


def named_extras(function: Callable[..., Any], annotation: Any) -> dict[str, Any] | None:
    """Return the types of keyword arguments annotated as ``**name: Unpack[...]``; ``None`` for another annotation.

    Raises `ConfigurationError`.
    """
    if get_origin(annotation) not in _UNPACK:
        return None
    (shape,) = get_args(annotation)
    try:
        kinds = get_type_hints(shape, include_extras=True)
    except (NameError, TypeError) as error:
        raise handler_error(
            function, f"the type of its ** parameter cannot be read: {error}"
        ) from error
    return {
        name: kind
        if name in shape.__required_keys__ or get_origin(kind) in (Required, NotRequired)
        else NotRequired[kind]
        for name, kind in kinds.items()
    }


def name_error(function: Callable[..., Any], parameter: inspect.Parameter) -> ConfigurationError:
    """Return the error for a parameter to which arguments cannot be passed by name."""
    name = parameter.name
    kinds = {each.kind for each in handler_signature(function).parameters.values()}
    if parameter.kind is parameter.POSITIONAL_ONLY:
        advice = "remove the '/'"
    elif kinds == {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}:
        return handler_error(
            function,
            "its only parameters are * and **, as those of a function that a decorator returns: write "
            "@functools.wraps(function) above that function, so that it has the parameters of the one it calls; if it "
            "is no such function, give it parameters with names",
        )
    elif parameter.kind is parameter.VAR_POSITIONAL:
        advice = f"write '{name}: list[...]' without the '*'"
    else:
        advice = f"write '{name}: dict[str, ...]' without the '**'"
    return handler_error(function, f"parameter {name!r} cannot be passed by name: {advice}")
