"""Publishing the tasks of one partition in order, waiting for full queues and retrying failed calls."""

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
"""while more tasks than this wait for full queues, no further rows are read"""
_HELD_BYTES = 64 * 1024 * 1024
"""while the payloads of the waiting tasks have more bytes than this in total, no further rows are read"""
_CHUNK_BYTES = 1024 * 1024
"""maximum size in bytes of the payloads in one publish; a single larger task is published alone"""
_SLICE = 30.0
"""seconds of waiting for a full queue before progress is checked"""
_PAUSE = RetryPolicy(base=0.1, cap=5.0)
_log = logging.getLogger("taskqueue.spark")
_RESET = "queue_reset"
"""error code of a store that has lost its data"""


class Feed:
    """A publisher of chunks of tasks. Leaving its context (``async with``) waits until all tasks are published.

    The tasks of a queue are stored in the order in which they arrive. If a tenant's limit is reached, this is true only
    among the tasks of one tenant. To keep the order, only one chunk is published at a time, while the caller prepares
    the next one. If a full queue refuses tasks, they wait, and so do later tasks of the same queue.
    """

    def __init__(self, backend: Backend, options: SinkOptions) -> None:
        """Create a publisher for ``backend``, which the caller must close."""
        self.counts: Counter[Published] = Counter()
        """number of tasks by result; `Published.REFUSED` counts tasks that had to wait for a full queue"""
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
        """Wait until all tasks are published. The first failure stops everything, and is raised."""
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def send(self, tasks: Sequence[Task]) -> None:
        """Publish tasks after all earlier tasks. Return once publishing the last chunk has begun.

        If publishing these or earlier tasks fails, the caller is cancelled, and leaving the context raises the error.
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
            await self._wait_for_rate(len(chunk))
            self._under_way = self._group.create_task(self._publish(chunk))
            # Let the call begin before the caller prepares the next chunk.
            await asyncio.sleep(0)

    async def _wait_for_rate(self, number: int) -> None:
        if self._options.rate is None:
            return
        now = asyncio.get_running_loop().time()
        self._due = max(self._due, now)
        await asyncio.sleep(self._due - now)
        self._due += number / self._options.rate

    async def _publish(self, tasks: Sequence[Task]) -> None:
        for key in {task.key for task in tasks} - self._known:
            await check_window(self._backend, key, self._options.replay_horizon)
            self._known.add(key)
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
        """Publish the waiting tasks of a full queue, as soon as the queue accepts them."""
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
        """Publish tasks. Retry during an outage and after a lost response, for the seconds of the option ``wait``."""
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
                        "%s; retrying for up to %g s (option wait)", error, end - loop.time()
                    )
            await asyncio.sleep(_PAUSE.delay(attempt))
            attempt += 1

    def _settle(self, tasks: Sequence[Task], answers: Sequence[Confirmation]) -> list[Task]:
        """Count the results. Return the refused tasks to retry; raise an error if a task will never be accepted."""
        refused: list[Task] = []
        for task, answer in zip(tasks, answers, strict=True):
            if answer.status is Published.REFUSED:
                if answer.retry_after is None:
                    raise _given_up(answer, 0)
                refused.append(task)
                continue
            if answer.status is Published.CONFLICT and self._options.on_conflict == "fail":
                raise IdConflict(
                    f"id {task.id!r} is already used in queue {task.key!r} by a task with another payload; to "
                    "count such rows instead of failing, set the option onConflict=count",
                    task_id=task.id,
                )
            self.counts[answer.status] += 1
        return refused


async def check_window(backend: Backend, key: str, horizon: float | None) -> None:
    """Raise `ConfigurationError` if a queue forgets ids before ``horizon`` seconds have passed."""
    if horizon is None or not has(backend, Capability.CONTROL):
        return
    window = (await control_of(backend).settings(key)).dedupe_window
    if window < horizon:
        raise ConfigurationError(
            f"queue {key!r} remembers the ids of ended tasks for {window:g} s, less than option replayHorizon "
            f"({horizon:g} s); increase its dedupe_window, or lower the option"
        )


def _chunk(tasks: Sequence[Task], start: int, number: int) -> list[Task]:
    """Return the next chunk: one to ``number`` tasks from the index ``start`` on."""
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
    """Call ``write`` with every partition, and return its results, which are dataclasses of numbers and texts."""

    def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([asdict(write(batches))])

    names = [(field.name, _TYPES[str(field.type)]) for field in fields(kind)]  # type: ignore[arg-type]
    rows = df.mapInArrow(each, ", ".join(f"{name} {type_}" for name, type_ in names)).collect()
    return [kind(**row.asDict()) for row in rows]
