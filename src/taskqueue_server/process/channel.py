"""Messages between the supervisor and its server processes: JSON lines over a private socket.

Secrets therefore never appear in command-line arguments. The kernel closes the socket when either process ends, so
each server process notices the end of the supervisor, drains and exits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, SecretStr

from taskqueue_core.config import Settings

T = TypeVar("T")
LINE = 1024 * 1024
"""maximum size of a message in bytes, which is more than any settings need"""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The first order to a server process: serve this backend with these settings."""

    settings: Mapping[str, Any]
    backend: str
    path: list[str]
    """``sys.path`` of the supervisor, which depends on how Python was started"""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """An order to apply changed settings."""

    settings: Mapping[str, Any]


class StopProcess(msgspec.Struct, frozen=True, tag="end"):
    """An order to drain and exit, or to stop at once. Idempotent."""

    at_once: bool = False


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """A report that the process accepts connections."""


class ProcessFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A report that the process cannot start because of a `ConfigurationError`."""

    reason: str


Order = Begin | Renew | StopProcess
Message = Listening | ProcessFailed

ORDERS: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
MESSAGES: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def line(message: Order | Message) -> bytes:
    """Return a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"


async def received(
    reader: asyncio.StreamReader, decoder: msgspec.json.Decoder[T]
) -> AsyncIterator[T]:
    """Yield the messages of the other process until it ends; ``decoder`` is `ORDERS` or `MESSAGES`."""
    with contextlib.suppress(ConnectionError):
        while (text := await reader.readline()).endswith(b"\n"):
            yield decoder.decode(text)


def plain(settings: Settings) -> dict[str, Any]:
    """Return settings as JSON values, including secrets."""
    return {name: _plain(getattr(settings, name)) for name in Settings.model_fields}


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return the settings that `plain` encoded, without reading the environment or files again."""
    settings = Settings.__new__(Settings)
    BaseModel.__init__(settings, **values)
    return settings


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value
