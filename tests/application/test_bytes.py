"""Bytes in arguments and results come back as they were, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import pytest
from pydantic import BaseModel, ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass

from taskqueue_core import InvalidArguments, Tasks
from taskqueue_core.application.errors import TaskFailed
from taskqueue_worker.testing import TestQueue


@dataclass
class Plain:
    """A dataclass."""

    raw: bytes


class Row(TypedDict):
    """A dictionary with known keys, which may contain another one."""

    raw: bytes
    next: Row | None


class Pair(NamedTuple):
    """A tuple with named items."""

    raw: bytes
    number: int


class Base64(BaseModel):
    """A model whose bytes are base64."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    raw: bytes


class Text(BaseModel):
    """A model with pydantic's own configuration."""

    raw: bytes


@pydantic_dataclass
class Checked:
    """A dataclass of pydantic."""

    raw: bytes


@dataclass
class Outer:
    """A dataclass of values with fields."""

    inner: Plain
    rows: list[Row]
    model: Base64


RAW = [b"", b"abcd", b"caf\xc3\xa9", b"\xff\x00"]
"""bytes that are UTF-8, and base64 as well; UTF-8 only; neither"""
KINDS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "bytes": (bytes, lambda raw: raw),
    "list": (list[bytes], lambda raw: [raw, raw]),
    "dict": (dict[str, bytes | None], lambda raw: {"a": raw, "b": None}),
    "dataclass": (Plain, Plain),
    "dataclasses": (list[Plain | None], lambda raw: [Plain(raw), None]),
    "typed-dict": (Row, lambda raw: {"raw": raw, "next": {"raw": raw, "next": None}}),
    "named-tuple": (Pair, lambda raw: Pair(raw, 1)),
    "model": (Base64, lambda raw: Base64(raw=raw)),
    "nested": (
        Outer,
        lambda raw: Outer(Plain(raw), [{"raw": raw, "next": None}], Base64(raw=raw)),
    ),
}
TEXTS: dict[str, tuple[Any, Callable[[bytes], Any]]] = {
    "model": (Text, lambda raw: Text(raw=raw)),
    "dataclass": (Checked, Checked),
}


def echo(kind: Any) -> tuple[Tasks, Any]:
    """Return a registry with a task that returns its argument."""
    tasks = Tasks()

    def same(value: Any) -> Any:
        return value

    same.__annotations__ = {"value": kind, "return": kind}
    return tasks, tasks.task(same)


async def returned(kind: Any, value: object) -> object:
    """Return the result of a task that was published with a value and returns it."""
    tasks, same = echo(kind)
    async with TestQueue(tasks) as taskqueue:
        handle = await same.publish(value)
        await taskqueue.drain()
        taskqueue.assert_published(same, value=value)
        return await handle.result()


@pytest.mark.parametrize("raw", RAW, ids=["empty", "base64", "utf8", "binary"])
@pytest.mark.parametrize("name", KINDS)
async def test_any_bytes_come_back(name: str, raw: bytes) -> None:
    """U1, U6: arguments and results are written and read alike: in fields of types that are no models, as base64."""
    kind, made = KINDS[name]
    assert await returned(kind, made(raw)) == made(raw)


@pytest.mark.parametrize("name", TEXTS)
async def test_bytes_of_a_model(name: str) -> None:
    """U1, U6: a model of pydantic encodes bytes as it is configured: as UTF-8. The error for other bytes says so."""
    kind, made = TEXTS[name]
    for raw in RAW[:-1]:
        assert await returned(kind, made(raw)) == made(raw)
    need = "must be UTF-8, unless ser_json_bytes and val_json_bytes are 'base64'"
    tasks, same = echo(kind)
    with pytest.raises(InvalidArguments, match=need):
        same.call(made(RAW[-1]))

    def make() -> Any:
        return made(RAW[-1])

    make.__annotations__ = {"return": kind}
    task = tasks.task(make)
    async with TestQueue(tasks) as taskqueue:
        await task.publish()
        with pytest.raises(TaskFailed, match=need):
            await taskqueue.drain()


async def test_both_alphabets_are_read() -> None:
    """U1: a publisher in another language may write base64 in either alphabet."""
    tasks, same = echo(Plain)
    async with TestQueue(tasks) as taskqueue:
        for text in ("//79", "__79"):
            await taskqueue.queue.publish("same", {"value": {"raw": text}})
        await taskqueue.drain()
        found = [each.arguments["value"] for each in taskqueue.published(same)]
    assert found == [Plain(b"\xff\xfe\xfd")] * 2
