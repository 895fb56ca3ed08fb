"""The capability ``control`` of a server's backend, used over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import NoReturn, TypeVar

import msgspec
from msgspec import Raw
from pydantic import ValidationError

from taskqueue_core.capabilities import DeletedQueue, Maintained, QueueSettings
from taskqueue_core.errors import CapabilityMissing, ConfigurationError, TooLarge
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.server_address import path
from taskqueue_core.tasks import Delivery, Ledger, QueueStats, TaskStatus, WorkerInfo
from taskqueue_remote.client import HttpClient
from taskqueue_remote.problems import problem_of


class _Named(msgspec.Struct, frozen=True):
    key: str


class _Queues(msgspec.Struct, frozen=True):
    queues: list[_Named]
    next: str | None = None


class _Statuses(msgspec.Struct, frozen=True):
    statuses: dict[str, TaskStatus | None]


class _Results(msgspec.Struct, frozen=True):
    results: dict[str, Raw]


class _Rescheduled(msgspec.Struct, frozen=True):
    rescheduled: bool


class _Cancelled(msgspec.Struct, frozen=True):
    cancelled: bool


class Count(msgspec.Struct, frozen=True):
    """The number of tasks that a request changed. ``next`` is where the next request continues; ``None`` at the end."""

    count: int
    next: str | None = None


class _Workers(msgspec.Struct, frozen=True):
    workers: list[WorkerInfo]
    next: str | None = None


P = TypeVar("P", _Queues, _Workers)
F = TypeVar("F", _Statuses, _Results)


def batches(ids: Sequence[str]) -> Iterator[list[str]]:
    """Check task ids, and yield them in batches that fit in one request. Raises `InvalidInput` if an id is invalid."""
    for task_id in ids:
        check_name("id", task_id)
    for start in range(0, len(ids), LIMITS.batch):
        yield list(ids[start : start + LIMITS.batch])


class RemoteControl:
    """The capability ``control`` of the server's backend. Each call sends HTTP requests."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client

    async def queues(self) -> tuple[str, ...]:
        pages = [page async for page in self._pages("/v1/queues", _Queues)]
        return tuple(sorted({queue.key for page in pages for queue in page.queues}))

    async def settings(self, key: str) -> QueueSettings:
        return self._settings(await self._client.ask("GET", path("queues", key, "settings"), Raw))

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """Replace the settings. After `BackendUnavailable`, read the settings to see whether they were replaced."""
        body = Raw(settings.model_dump_json().encode())
        target = path("queues", key, "settings")
        query = {"owners_as_sent": "true"}
        return self._settings(await self._client.ask("PUT", target, Raw, body=body, query=query))

    async def ledger(self, key: str) -> Ledger:
        return await self._client.ask("GET", path("queues", key, "ledger"), Ledger)

    async def stats(self, key: str) -> QueueStats:
        return await self._client.ask("GET", path("queues", key), QueueStats)

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        known: dict[str, TaskStatus | None] = {}
        async for found in self._look_up(path("queues", key, "statuses"), _Statuses, task_ids):
            known |= found.statuses
        return tuple(known.get(task_id) for task_id in task_ids)

    async def _look_up(
        self, target: str, kind: type[F], task_ids: Sequence[str]
    ) -> AsyncIterator[F]:
        """Yield the answers to requests for tasks, with fewer ids if an answer would be too large."""
        waiting = list(batches(task_ids))
        while waiting:
            ids = waiting.pop()
            try:
                yield await self._client.ask("POST", target, kind, body={"ids": ids})
            except TooLarge:
                if len(ids) == 1:
                    raise
                half = len(ids) // 2
                waiting += (ids[:half], ids[half:])

    async def wait_for_end(self, key: str, task_id: str, seconds: float) -> TaskStatus | None:
        answer = await self._client.fetch(
            "GET", path("tasks", key, task_id), query={"wait": int(seconds)}
        )
        if answer.ok:
            return self._client.decode(answer.body, TaskStatus)
        if problem_of(answer.status, answer.body).code == "unknown_task":
            return None
        raise self._client.error(answer)

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        known: dict[str, bytes] = {}
        async for found in self._look_up(path("queues", key, "results"), _Results, task_ids):
            known |= {task_id: bytes(result) for task_id, result in found.results.items()}
        return tuple(known.get(task_id) for task_id in task_ids)

    async def progress(self, delivery: Delivery, value: float | str) -> NoReturn:  # noqa: ARG002 - the signature of `Control`
        """Raise `CapabilityMissing`, because only a worker has deliveries whose progress it can report."""
        raise CapabilityMissing(
            "the server backend has no deliveries; report progress from a handler, with Context.progress"
        )

    async def cancel(self, key: str, task_id: str) -> bool:
        """Cancel a task that has not ended.

        If the response is lost, a second call may return False, because the first call has already ended the task.
        """
        return (await self._client.ask("DELETE", path("tasks", key, task_id), _Cancelled)).cancelled

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        target = path("tasks", key, task_id, "reschedule")
        return (await self._client.ask("POST", target, _Rescheduled, body={"at": at})).rescheduled

    async def purge(self, key: str) -> int:
        target = path("queues", key, "purge")
        return (await self._client.ask("POST", target, Count, query={"confirm": key})).count

    async def delete(self, key: str) -> DeletedQueue:
        """Delete a queue. If the response is lost, a second call may report that there was no such queue."""
        target = path("queues", key)
        return await self._client.ask("DELETE", target, DeletedQueue, query={"confirm": key})

    async def workers(self) -> tuple[WorkerInfo, ...]:
        pages = [page async for page in self._pages("/v1/workers", _Workers)]
        return tuple(worker for page in pages for worker in page.workers)

    async def maintain(self) -> Maintained:
        return await self._client.ask("POST", "/v1/maintain", Maintained)

    async def _pages(self, target: str, kind: type[P]) -> AsyncIterator[P]:
        query: dict[str, str | int] = {"limit": LIMITS.batch}
        while True:
            page = await self._client.ask("GET", target, kind, query=query)
            yield page
            if page.next is None:
                return
            query["after"] = page.next

    def _settings(self, text: Raw) -> QueueSettings:
        try:
            return QueueSettings.model_validate_json(bytes(text))
        except ValidationError:
            raise ConfigurationError(
                f"the server at {self._client.address.shown} sent unknown queue settings: upgrade this client"
            ) from None
