"""Results, which are encoded and decoded by the return annotation of their function."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from functools import wraps
from typing import Any, NoReturn, TypedDict

import pytest
from pydantic import BaseModel, Field

from taskqueue_core import TaskDead, Tasks
from taskqueue_core.errors import ConfigurationError
from taskqueue_worker import Retry
from taskqueue_worker.testing import TestQueue


@dataclass
class Point:
    """A dataclass."""

    x: int
    raw: bytes = b""


class Size(BaseModel):
    """A model whose field has another name in JSON."""

    width: int = Field(alias="w")


class Row(TypedDict):
    """A typed dictionary."""

    at: datetime


class Opaque:
    """A class of which pydantic knows nothing."""


NOW = datetime(2026, 1, 2, tzinfo=UTC)


async def ended(kind: Any, value: object, batch: int | None = None) -> Any:
    """Return the result of a task whose function returns ``value``, and is annotated with ``kind``."""
    tasks = Tasks()

    async def made(items: list[Any]) -> Any:
        return [value for _ in items] if batch else value

    made.__annotations__["return"] = kind
    declared = tasks.task("made", batch=batch)(made)
    async with TestQueue(tasks, errors="record") as taskqueue:
        handle = await declared.publish([1])
        await taskqueue.drain()
        return await handle.result()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (bytes, b"\x00\xff"),
        (set[int], {1, 2}),
        (tuple[int, str], (1, "a")),
        (Point, Point(1, b"raw")),
        (list[Point], [Point(1)]),
        (Size, Size(w=3)),
        (Row, {"at": NOW}),
        (datetime | None, NOW),
        (datetime | None, None),
        (dict[int, Decimal], {1: Decimal("0.10")}),
        (int | Retry, 5),
        (None, None),
        (object, {"a": 1}),
    ],
    ids=str,
)
async def test_results_come_back(kind: Any, value: object) -> None:
    """U1: a result is encoded by the return annotation, and decoded to an equal value."""
    assert await ended(kind, value) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (list[bytes], b"\xff"),
        (list[set[int] | Exception], {1}),
        (list[int] | None, 1),
        (list, {"a": 1}),
    ],
    ids=str,
)
async def test_results_of_a_batch(kind: Any, value: object) -> None:
    """U1: each result in the list of a batch handler is encoded by the type of the items."""
    assert await ended(kind, value, batch=3) == value


@pytest.mark.parametrize(
    ("kind", "value", "fault"),
    [
        (int, "seven", "result should be a valid integer"),
        (int, None, "result should be a valid integer"),
        (Row, {}, "at is missing"),
        (list[int], [1, "secret"], "1 should be a valid integer"),
        (dict[str, object], {"a": Opaque()}, "no equivalent|an equivalent in JSON"),
        (float, float("nan"), "got NaN or an infinity, which JSON cannot express; allowed: finite"),
        (Any, {"a": [float("inf")]}, "got NaN or an infinity"),
    ],
)
async def test_a_result_of_another_type_is_a_dead_letter(
    kind: Any, value: object, fault: str
) -> None:
    """U1: the worker finds a result that does not match the annotation; the error says what, and never the value."""
    with pytest.raises(TaskDead, match=fault) as caught:
        await ended(kind, value)
    assert caught.value.reason == "invalid_result"
    assert "secret" not in str(caught.value)


async def test_a_decorator_that_does_not_await(recwarn: pytest.WarningsRecorder) -> None:
    """U1: the coroutine of an async function in a synchronous decorator is no result; the error says what to write."""

    async def inner(number: int) -> int:
        return number

    @wraps(inner)
    def outer(number: int) -> Any:
        return inner(number)

    tasks = Tasks()
    declared = tasks.task("t")(outer)
    async with TestQueue(tasks, errors="record") as taskqueue:
        handle = await declared.publish(1)
        await taskqueue.drain()
        with pytest.raises(TaskDead, match="write 'async def' for the function that the decorator"):
            await handle.result()
    gc.collect()
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


def test_a_type_without_json_is_refused_at_import() -> None:
    """U1: a return annotation of which pydantic does not know the JSON form is an error of the declaration."""

    def opaque() -> Opaque:
        return Opaque()

    def endless() -> NoReturn:
        raise ValueError

    def unknown():  # type: ignore[no-untyped-def]  # noqa: ANN202 - that is the case
        return Opaque()

    with pytest.raises(ConfigurationError, match="opaque cannot be a task handler: its result has"):
        Tasks().task(opaque)
    allowed: list[Callable[..., Any]] = [endless, unknown]
    for function in allowed:
        Tasks().task(function)
