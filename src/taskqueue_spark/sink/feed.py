"""One partition's tasks on their way into the store: in order, waiting for room, and again where an answer was lost."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from itertools import islice
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa
from pyspark.sql import DataFrame

from taskqueue_core.backend import Backend, Capability
from taskqueue_core.capabilities import control_of, has
from taskqueue_core.errors import (
    BackendUnavailable,
    ConfigurationError,
    IdConflict,
    PublishUnconfirmed,
    QueueFull,
)
from taskqueue_core.queue import Queue
from taskqueue_core.retry import RetryPolicy
from taskqueue_core.tasks import Confirmation, Published, Task
from taskqueue_spark.sink.options import SinkOptions

_HELD = 10_000
"""tasks that wait for room in their queues while those of other queues pass; with more nothing is read on"""
_HELD_BYTES = 64 * 1024 * 1024
"""and what their payloads may have"""
_CHUNK_BYTES = 1024 * 1024
"""what the payloads of one publish may have, unless it is of one task"""
_SLICE = 30.0
"""seconds of waiting for room after which it is looked whether there was any progress"""
_PAUSE = RetryPolicy(base=0.1, cap=5.0)
_log = logging.getLogger("taskqueue.spark")
_RESET = "queue_reset"
"""the code of the error that says that what the store held is gone"""


class Feed:
    """Publishes chunks of tasks. An async context manager, which has published all that it was given at its end.

    Tasks of one queue are stored in the order in which they came (of one tenant, where a tenant alone was refused), so
    no more than one chunk is under way; the next can be made ready meanwhile. Those that are refused for want of room
    wait, and with them what comes for their queue after them.
    """

    def __init__(self, backend: Backend, options: SinkOptions) -> None:
        """Publish to ``backend``, which the caller owns."""
        self.counts: Counter[Published] = Counter()
        """what became of the tasks; `Published.REFUSED` counts those that had to wait for room"""
        self._backend = backend
        self._queue = Queue(backend)
        self._options = options
        self._known: set[str] = set()
        self._held: dict[str, deque[Task]] = {}
        self._bytes = 0
        self._progress = asyncio.Event()
        self._under_way: asyncio.Task[None] | None = None
        self._due = 0.0

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for what is under way. One failure ends all, and is raised as it is."""
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def send(self, tasks: Sequence[Task]) -> None:
        """Have tasks published once those before them are; returns when they are on their way.

        A failure of these or of earlier ones cancels the caller: leaving the context raises it.
        """
        start = 0
        while start < len(tasks):
            chunk = _chunk(tasks, start, self._options.chunk)
            start += len(chunk)
            if self._under_way is not None:
                await self._under_way
            while sum(map(len, self._held.values())) > _HELD or self._bytes > _HELD_BYTES:
                self._progress.clear()
                await self._progress.wait()
            await self._in_time(len(chunk))
            self._under_way = self._group.create_task(self._publish(chunk))
            await asyncio.sleep(0)  # it is sent before the caller makes the next one ready

    async def _in_time(self, number: int) -> None:
        """Wait until the rate allows so many more."""
        if self._options.rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now)
        await asyncio.sleep(self._due - now)
        self._due += number / self._options.rate

    async def _publish(self, tasks: Sequence[Task]) -> None:
        for key in {task.key for task in tasks} - self._known:
            await self._meet(key)
        if self._held:
            free = [task for task in tasks if task.key not in self._held]
            for task in tasks:
                if task.key in self._held:
                    self._hold(task)
        else:
            free = list(tasks)
        for task in self._settle(free, await self._retry_until_available(free, 0)):
            if task.key not in self._held:
                self._held[task.key] = deque()
                self._group.create_task(self._wait_for_room(task.key))
            self._hold(task)

    def _hold(self, task: Task) -> None:
        self._held[task.key].append(task)
        self._bytes += len(task.payload)
        self.counts[Published.REFUSED] += 1

    async def _wait_for_room(self, key: str) -> None:
        """Publish what is held of a queue, as it lets it in."""
        held, loop = self._held[key], asyncio.get_running_loop()
        stuck = loop.time()
        while held:
            part = _chunk(held, 0, self._options.chunk)
            remaining = stuck + self._options.wait - loop.time()
            answers = await self._retry_until_available(part, max(0.0, min(_SLICE, remaining)))
            refused = self._settle(part, answers)
            for _ in part:
                held.popleft()
            held.extendleft(reversed(refused))
            self._bytes -= _size(part) - _size(refused)
            if len(refused) < len(part):
                stuck = loop.time()
                self._progress.set()
            elif remaining <= 0:
                raise _given_up(
                    next(item for item in answers if not item.stored), self._options.wait
                )
        del self._held[key]
        self._progress.set()

    async def _retry_until_available(
        self, tasks: Sequence[Task], wait: float
    ) -> Sequence[Confirmation]:
        """Publish; also through an outage that is no longer than our patience, and where answers are lost."""
        if not tasks:
            return ()
        loop = asyncio.get_running_loop()
        end, attempt = loop.time() + self._options.wait, 1
        while True:
            try:
                return await self._queue.publish_many(tasks, wait=wait)
            except (PublishUnconfirmed, BackendUnavailable) as error:
                if error.code == _RESET or loop.time() >= end:
                    raise
                if attempt == 1:
                    _log.warning(
                        "%s; trying again for %g s (option wait)", error, end - loop.time()
                    )
            await asyncio.sleep(_PAUSE.delay(attempt))
            attempt += 1

    def _settle(self, tasks: Sequence[Task], answers: Sequence[Confirmation]) -> list[Task]:
        """Count answers. Return the tasks that can be let in later; raise for those that can't be."""
        refused: list[Task] = []
        for task, answer in zip(tasks, answers, strict=True):
            if answer.status is Published.REFUSED:
                if answer.retry_after is None:
                    raise _given_up(answer, 0)
                refused.append(task)
                continue
            if answer.status is Published.CONFLICT and self._options.on_conflict == "fail":
                raise IdConflict(
                    f"id {task.id!r} is already used in queue {task.key!r} by a task with another payload; option "
                    "onConflict=count leaves such tasks as they are",
                    task_id=task.id,
                )
            self.counts[answer.status] += 1
        return refused

    async def _meet(self, key: str) -> None:
        """Look at a queue before its first task."""
        await demand_window(self._backend, key, self._options.replay_horizon)
        self._known.add(key)


async def demand_window(backend: Backend, key: str, horizon: float | None) -> None:
    """Raise `ConfigurationError` where a queue is known to forget its tasks before the last replay may come."""
    if horizon is None or not has(backend, Capability.CONTROL):
        return
    window = (await control_of(backend).settings(key)).dedupe_window
    if window < horizon:
        raise ConfigurationError(
            f"queue {key!r} remembers ids for {window:g} s after their end, less than option replayHorizon "
            f"({horizon:g} s); increase its dedupe_window, or lower the option"
        )


def _chunk(tasks: Sequence[Task], start: int, number: int) -> list[Task]:
    """Return what is published at once, from a place on: at least one task."""
    chunk: list[Task] = []
    remaining = _CHUNK_BYTES
    for task in islice(tasks, start, start + number):
        remaining -= len(task.payload)
        if chunk and remaining < 0:
            break
        chunk.append(task)
    return chunk


def _size(tasks: Sequence[Task]) -> int:
    return sum(len(task.payload) for task in tasks)


def _given_up(refused: Confirmation, wait: float) -> QueueFull:
    waited = f" for {wait:g} s without any progress (option wait)" if wait else ""
    return QueueFull(
        f"queue {refused.key!r} refused tasks{waited}: {refused.reason}",
        task_id=refused.task_id,
        code=refused.code,
        depth=refused.depth,
    )


M = TypeVar("M")
_TYPES = {"int": "long", "str": "string"}


def messages_of(
    df: DataFrame, write: Callable[[Iterator[pa.RecordBatch]], Any], kind: type[M]
) -> list[M]:
    """Write every partition, and return the messages: dataclasses of a kind, of numbers and text."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(write(batches))])

    names = [(field.name, _TYPES[str(field.type)]) for field in fields(kind)]  # type: ignore[arg-type]
    rows = df.mapInArrow(each, ", ".join(f"{name} {type_}" for name, type_ in names)).collect()
    return [kind(**row.asDict()) for row in rows]
