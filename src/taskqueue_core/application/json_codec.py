"""Encoding and decoding of values as JSON by their types, and what is wrong with values of other types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from functools import cached_property
from typing import Annotated, Any, NotRequired, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import (
    ErrorDetails,
    PydanticSerializationError,
    SchemaSerializer,
    SchemaValidator,
    to_json,
)
from pydantic_core.core_schema import CoreConfig
from typing_extensions import TypedDict, is_typeddict

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_json

_MAX_FAULTS = 10
_FAULT_TEXTS = {
    "missing": "is missing",
    "extra_forbidden": "is not a parameter",
    "json_invalid": "is not JSON",
}
_MESSAGES = frozenset(
    """
    bool_parsing bool_type bytes_type dataclass_type date_type datetime_type decimal_parsing
    decimal_type dict_type enum finite_number float_parsing float_type greater_than
    greater_than_equal int_from_float int_parsing int_type less_than less_than_equal list_type
    literal_error model_attributes_type model_type multiple_of none_required set_type
    string_pattern_mismatch string_too_long string_too_short string_type time_delta_type time_type
    too_long too_short tuple_type url_type uuid_type
    """.split()  # noqa: SIM905 - more readable than a list of strings
)
"""pydantic's error codes whose messages say what is allowed, and never quote the value, which may be confidential"""


_BASE64 = CoreConfig(ser_json_bytes="base64", val_json_bytes="base64")
_UTF8 = CoreConfig(ser_json_bytes="utf8", val_json_bytes="utf8")
_NO_SCHEMA = {"default", "metadata"}
"""the parts of a pydantic schema that contain no schema"""


class JsonCodec:
    """A validator and a serializer of a type.

    Bytes are base64, so that JSON can express them all. In the fields of a pydantic model or pydantic dataclass, its
    own configuration says how they are encoded, by default as UTF-8.
    """

    def __init__(self, kind: Any, parameters: Iterable[str] = (), *, extra: bool = False) -> None:
        """Create a codec; ``parameters`` are the fields of an object of arguments. Raises pydantic's errors.

        ``extra``: whether the object may have others, which are arguments as well.
        """
        self.adapter: TypeAdapter[Any] = TypeAdapter(kind)
        self.adapter.rebuild()  # raises an error for a name in the type that cannot be resolved
        self._parameters = frozenset(parameters)
        self.extra = extra
        config = CoreConfig(ser_json_inf_nan="constants", **_BASE64)
        schema = _with_bytes(self.adapter.core_schema)
        self.validator = SchemaValidator(schema, config)
        self.serializer = SchemaSerializer(schema, config)

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all fields, at any depth; only the parameters if the type has no JSON Schema."""
        try:
            schema = self.adapter.json_schema()
        except PydanticUserError:
            return self._parameters
        return frozenset(_names(schema))

    def validate_json(self, text: bytes) -> Any:
        """Decode JSON text. Raises pydantic's ``ValidationError``."""
        return self.validator.validate_json(text)


def arguments_codec(fields: dict[str, Any], extra: Any) -> JsonCodec:
    """Return the codec of arguments by name. ``extra``: the type of those without a field; ``None`` to refuse them."""
    if extra is None:
        shape = cast("Any", TypedDict)("Arguments", fields)
        shape.__pydantic_config__ = ConfigDict(extra="forbid")
    else:
        shape = cast("Any", TypedDict)("Arguments", fields, extra_items=extra)
    return JsonCodec(shape, fields, extra=extra is not None)


NOT_FINITE = "NaN or an infinity, which JSON cannot express"


def is_finite(value: Any) -> bool:
    """Return whether a value contains neither NaN nor an infinity, as far as pydantic can write it as JSON."""
    try:
        text = to_json(value, inf_nan_mode="constants", bytes_mode="base64")
        check_json("value", text, "decoded")
    except InvalidInput as error:
        return "not JSON" not in error.got
    except PydanticSerializationError:
        pass
    return True


def bytes_fault(error: Exception) -> str | None:
    """Return what is wrong with bytes that pydantic could not write as text; ``None`` if the error is another one."""
    if "invalid utf-8 sequence" not in str(error):  # pydantic's error has no code
        return None
    return (
        "bytes in the fields of a pydantic model must be UTF-8, unless ser_json_bytes and val_json_bytes are 'base64' "
        "in its configuration"
    )


def _with_bytes(schema: Any) -> Any:
    """Return a pydantic schema in which each type with fields says how bytes are encoded.

    Otherwise the validator and the serializer would differ: one of them uses the configuration of an outer type.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_with_bytes, schema))
    if not isinstance(schema, dict):
        return schema
    kind = schema.get("type")
    if kind == "model" or (kind == "dataclass" and is_pydantic_dataclass(schema["cls"])):
        return {**schema, "config": {**_UTF8, **schema.get("config", {})}}
    changed = {
        name: part if name in _NO_SCHEMA else _with_bytes(part) for name, part in schema.items()
    }
    if kind in ("dataclass", "typed-dict"):
        changed["config"] = {**_BASE64, **schema.get("config", {})}
    return changed


def _names(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
        for each in schema.values():
            yield from _names(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _names(each)


def _is_unknown_parameter(fault: ErrorDetails) -> bool:
    return fault["type"] == "extra_forbidden" and len(fault["loc"]) == 1


def describe(error: ValidationError, codec: JsonCodec, root: str = "payload") -> str:
    """Return what is wrong with a value of a codec, without the value itself. ``root``: the name of the whole.

    The keys of a dictionary are values, which may be confidential, too.
    """
    faults = []
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        shows_first = codec.extra or _is_unknown_parameter(fault)
        known = codec.names | {*fault["loc"][:1]} if shows_first else codec.names
        parts = [
            each if each in known or type(each) is int else "[key]" for each in fault["loc"][:4]
        ]
        path = ".".join(str(part)[:50] for part in parts) or root
        kind, message = fault["type"], fault["msg"]
        if kind in _FAULT_TEXTS:
            faults.append(f"{path} {_FAULT_TEXTS[kind]}")
        elif kind not in _MESSAGES:
            faults.append(f"{path} is invalid: {kind}")
        elif message.startswith("Input should "):
            faults.append(f"{path} {message.removeprefix('Input ')}")
        else:
            faults.append(f"{path} is invalid: {message}")
    more = len(faults) - _MAX_FAULTS
    return "; ".join(faults[:_MAX_FAULTS]) + (f"; and {more} more" if more > 0 else "")


def is_record(kind: Any) -> bool:
    """Return whether the values of a type are JSON objects with named fields."""
    while get_origin(kind) in (NotRequired, Annotated):
        kind = get_args(kind)[0]
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel) or is_dataclass(kind) or is_typeddict(kind)
    )
