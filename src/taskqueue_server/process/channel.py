"""What the first process and those that it starts tell each other: JSON lines over a socket that only they have.

So no secret stands among anybody's arguments; and as the kernel closes the socket with either end, however that
ends, none of them outlives the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel, SecretStr

from taskqueue_core.config import Settings

LINE = 1024 * 1024
"""bytes; more than all settings take"""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Serve this backend. The first order."""

    settings: Mapping[str, Any]
    backend: str
    path: list[str]
    """where modules are found, which is not the same for every way of starting Python"""


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Go by other settings."""

    settings: Mapping[str, Any]


class StopProcess(msgspec.Struct, frozen=True, tag="end"):
    """Drain, or end at once. Repeated, it says nothing new."""

    at_once: bool = False


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """Connections are accepted."""


class ProcessFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Nothing can come of it: a `ConfigurationError`."""

    reason: str


Order = Begin | Renew | StopProcess
Message = Listening | ProcessFailed

_orders = msgspec.json.Decoder(Order)
_told = msgspec.json.Decoder(Message)


def line(message: Order | Message) -> bytes:
    """Return a message as it is sent."""
    return msgspec.json.encode(message) + b"\n"


async def orders(reader: asyncio.StreamReader) -> AsyncIterator[Order]:
    """Yield orders until the first process is gone."""
    while text := await _line(reader):
        order: Order = _orders.decode(text)
        yield order


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Message]:
    """Yield what a process tells until it is gone."""
    while text := await _line(reader):
        name: Message = _told.decode(text)
        yield name


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        text = await reader.readline()
    except ConnectionError:
        return b""
    return text if text.endswith(b"\n") else b""


def plain(settings: Settings) -> dict[str, Any]:
    """Return settings as JSON can carry them, secrets included."""
    return {name: _plain(getattr(settings, name)) for name in Settings.model_fields}


def settings_of(values: Mapping[str, Any]) -> Settings:
    """Return settings from `plain` ones. What the environment and the files say by now counts for nothing."""
    settings = Settings.__new__(Settings)
    BaseModel.__init__(settings, **values)
    return settings


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, frozenset):
        return sorted(value)
    return str(value) if isinstance(value, Path) else value
