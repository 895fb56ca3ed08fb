"""The ``control`` of a composite backend: it adds up the figures of all parts, or calls the part that holds a task."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import reduce
from operator import add
from typing import TypeVar

from msgspec import structs

from taskqueue_core.capabilities import Control, DeletedQueue, Maintained
from taskqueue_core.composite.backend import CompositeBackend, QueuePart
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable, SettingsConflict
from taskqueue_core.tasks import Delivery, Ledger, QueueStats, TaskStatus, WorkerInfo

T = TypeVar("T")


class JointControl(ABC):
    """Implementation of `Control` for a composite backend, except for the methods that read or change settings."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite
        self._repaired = 0

    async def _each(self, key: str, call: Callable[[Control, str], Awaitable[T]]) -> list[T]:
        parts = await self._composite.parts(key)
        members = self._composite.members
        return await gather_all(call(members[part.member].control, part.key) for part in parts)

    async def queues(self) -> tuple[str, ...]:
        results = await gather_all(member.control.queues() for member in self._composite.members)
        parts = [QueuePart(number, name) for number, names in enumerate(results) for name in names]
        public = {self._composite.public_key(part) for part in parts}
        return tuple(sorted(name for name in public if name is not None))

    async def ledger(self, key: str) -> Ledger:
        return reduce(add, await self._each(key, lambda control, name: control.ledger(name)))

    async def stats(self, key: str) -> QueueStats:
        parts = await self._each(key, lambda control, name: control.stats(name))
        oldest = [stats.oldest_waiting for stats in parts if stats.oldest_waiting is not None]
        return QueueStats(
            key=key,
            ledger=reduce(add, (stats.ledger for stats in parts)),
            oldest_waiting=min(oldest, default=None),
            delivered=sum(stats.delivered for stats in parts),
            redelivered=sum(stats.redelivered for stats in parts),
            retried=sum(stats.retried for stats in parts),
            lost=sum(stats.lost for stats in parts),
            subscribers=max(stats.subscribers for stats in parts),
            blocked_on_dead=sum(stats.blocked_on_dead for stats in parts),
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        return tuple(pair and pair[1] for pair in await self._composite.locate(key, task_ids))

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        wanted: dict[QueuePart, list[str]] = {}
        located = await self._composite.locate(key, task_ids)
        for task_id, pair in zip(task_ids, located, strict=True):
            if pair is not None:
                wanted.setdefault(pair[0], []).append(task_id)
        found: dict[str, bytes | None] = {}

        async def read(part: QueuePart, ids: list[str]) -> None:
            control = self._composite.members[part.member].control
            found.update(zip(ids, await control.results(part.key, *ids), strict=True))

        await gather_all(read(part, ids) for part, ids in wanted.items())
        return tuple(found.get(task_id) for task_id in task_ids)

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        number, inner = self._composite.to_member(delivery)
        return await self._composite.members[number].control.progress(inner, value)

    async def cancel(self, key: str, task_id: str) -> bool:
        return any(await self._each(key, lambda control, name: control.cancel(name, task_id)))

    async def reschedule(self, key: str, task_id: str, at: float) -> bool:
        return any(
            await self._each(key, lambda control, name: control.reschedule(name, task_id, at))
        )

    async def purge(self, key: str) -> int:
        return sum(await self._each(key, lambda control, name: control.purge(name)))

    async def delete(self, key: str) -> DeletedQueue:
        parts = await self._each(key, lambda control, name: control.delete(name))
        return DeletedQueue(
            deleted=any(part.deleted for part in parts),
            forgotten=sum(part.forgotten for part in parts),
        )

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers of all members. A connection with subscriptions at several members counts once."""
        results = await gather_all(member.control.workers() for member in self._composite.members)
        by_name: dict[str, list[WorkerInfo]] = {}
        for number, workers in enumerate(results):
            for worker in workers:
                names = (self._composite.public_key(QueuePart(number, key)) for key in worker.keys)
                keys = tuple(name for name in names if name is not None)
                by_name.setdefault(worker.worker_id, []).append(structs.replace(worker, keys=keys))
        return tuple(
            WorkerInfo(
                worker_id=name,
                connections=max(info.connections for info in infos),
                keys=tuple(sorted({key for info in infos for key in info.keys})),
                in_flight=sum(info.in_flight for info in infos),
                since=min(info.since for info in infos),
            )
            for name, infos in sorted(by_name.items())
        )

    async def maintain(self) -> Maintained:
        """Run maintenance in every member, then complete changes of queue settings that were interrupted."""
        composite = self._composite
        results = await gather_all(
            composite.at_leisure(member, member.control.maintain, Maintained())
            for member in composite.members
        )
        # If a repair fails here, a later maintenance pass completes it.
        with contextlib.suppress(BackendUnavailable, SettingsConflict, TimeoutError):
            await self._repair()
        members = list(enumerate(results))
        pauses = [done.again_in for done in results if done.again_in is not None]
        return Maintained(
            promoted=sum(done.promoted for done in results),
            expired=tuple(
                structs.replace(item, key=composite.public_name(number, item.key))
                for number, done in members
                for item in done.expired
            ),
            forgotten=sum(done.forgotten for done in results),
            recovered=sum(done.recovered for done in results),
            removed=sum(done.removed for done in results),
            unclaimed=tuple(
                sorted(
                    {composite.public_name(n, key) for n, done in members for key in done.unclaimed}
                )
            ),
            behind=max((d.behind for d in results if d.behind is not None), default=None),
            again_in=sum(pauses) if pauses else None,
        )

    @abstractmethod
    async def _repair(self) -> None:
        """Repair the settings of some queues; each maintenance pass continues where the last pass stopped."""

    def _next_keys(self, keys: Sequence[str], number: int) -> Sequence[str]:
        """Return the next ``number`` keys, or fewer at the end of ``keys``; the call after that starts over."""
        start, self._repaired = self._repaired, self._repaired + number
        if self._repaired >= len(keys):
            self._repaired = 0
        return keys[start : start + number]
