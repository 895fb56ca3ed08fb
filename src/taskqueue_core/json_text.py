"""Encoding of values as JSON text that programs in any language can read."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel

from taskqueue_core.errors import InvalidInput
from taskqueue_core.limits import check_encoded, kind_of

_EXPRESSIBLE = "a value that JSON can express (no NaN, no bytes, no cycles; keys must be text)"
_BYTES = (bytes, bytearray, memoryview)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def encode_json(field: str, value: object, limit: str = "payload") -> bytes:
    """Encode ``value`` as JSON text that decodes to an equivalent value.

    Tuples and sets become arrays, dataclasses become objects, and dates and UUIDs become text. Raises `InvalidInput`,
    which names ``field``, if the text is too long or too deeply nested, or if the value has no equivalent in JSON: NaN,
    infinity, bytes, keys that are not text, cycles, lone surrogates.
    """
    try:
        text = _encoder.encode(value)
        check_encoded(field, text, limit)  # decoding the text below proves that it is JSON
        # The encoder silently writes NaN as null, bytes as base64, and keys of other types as text.
        decoded = _decoder.decode(text)
        said = decoded == value or _same(decoded, msgspec.to_builtins(value, builtin_types=_BYTES))
    except InvalidInput:
        raise
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidInput(field, kind_of(value), _EXPRESSIBLE) from error
    if not said:
        raise InvalidInput(field, kind_of(value), _EXPRESSIBLE)
    return text


def _same(value: object, meant: object) -> bool:
    if isinstance(value, dict) and isinstance(meant, dict):
        return value.keys() == meant.keys() and all(_same(value[key], meant[key]) for key in value)
    if isinstance(value, list) and isinstance(meant, list | tuple):
        return len(value) == len(meant) and all(map(_same, value, meant))
    return value == meant


def to_builtins(value: object) -> object:
    """Return a value in which pydantic models are converted to JSON types."""
    match value:
        case BaseModel():
            return value.model_dump(mode="json")
        case dict():
            return {key: to_builtins(item) for key, item in value.items()}
        case list() | tuple():
            return [to_builtins(item) for item in value]
    return value
