"""Read and decode request bodies, with limits on size and time, and errors that name the invalid field."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec
from starlette.requests import Request

from taskqueue_core.limits import LIMITS
from taskqueue_server.problems import ProblemError

T = TypeVar("T")
JSON = "application/json"
NDJSON = "application/x-ndjson"

_DIGITS = len(str(LIMITS.body)) + 1
BODY_SECONDS = 30.0
"""seconds within which the whole body must arrive"""
_CLOSE = {"connection": "close"}  # because the server does not read the rest of a refused body
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `([a-z_]{1,40})`")
_decoders: dict[type, msgspec.json.Decoder[object]] = {}


async def stream(
    request: Request,
    kind: str,
    limit: int = LIMITS.body,
    seconds: float = BODY_SECONDS,
    name: str = "body",
) -> AsyncIterator[bytes]:
    """Yield the body in chunks. Raises `ProblemError` if the content type is wrong, or the body too large or late.

    ``name`` is that of the limit, for the error.
    """
    text = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if text != kind:
        raise ProblemError(415, "content_type", f"the content type must be {kind}", headers=_CLOSE)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:_DIGITS]) > limit:
        raise _too_large(limit, name)
    size = 0
    end = asyncio.get_running_loop().time() + seconds
    chunks = request.stream()
    try:
        while True:
            async with asyncio.timeout_at(end):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            size += len(chunk)
            if size > limit:
                raise _too_large(limit, name)
            yield chunk
    except TimeoutError:
        raise ProblemError(
            408, "too_slow", "the body did not arrive in time", headers=_CLOSE
        ) from None
    finally:
        await chunks.aclose()


def decode(kind: type[T], body: bytes) -> T:
    """Decode JSON into a model. Raises `ProblemError`, which may name the invalid field but never shows its value."""
    decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        return decoder.decode(body)  # type: ignore[return-value]
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        field = path[1] if path else None
        if unknown := _UNKNOWN.search(message):
            field = unknown[1] if field is None else f"{field}.{unknown[1]}"
            detail = "unknown field"
        else:
            detail = "value not allowed" if "Invalid value" in message else message
        if "unknown field" in detail:  # the message quotes a field name that the client chose
            detail = "unknown field"
        shown = field[:100] if field else None
        raise ProblemError(422, "invalid_input", detail[:200], field=shown) from None
    except (ValueError, RecursionError):
        raise ProblemError(400, "not_json", "the body must be one JSON document in UTF-8") from None


def _too_large(limit: int, name: str) -> ProblemError:
    detail = f"the body may have at most {limit} bytes (limit {name})"
    return ProblemError(413, "too_large", detail, headers=_CLOSE)
