"""``control`` and dead letters of a composite backend: sums over its parts, and calls to the part that holds a task."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import TypeVar

from msgspec import structs

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.composite.backend import CompositeBackend, Member, QueuePart
from taskqueue_core.concurrency import gather_all
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.tasks import (
    DeadLetter,
    Delivery,
    Ledger,
    QueueStats,
    State,
    TaskStatus,
    WorkerInfo,
)

T = TypeVar("T")


class JointControl(ABC):
    """Implementation of `Control` for a composite backend: combines the answers of all parts of a queue."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite

    @abstractmethod
    async def settings(self, key: str) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.settings`."""

    @abstractmethod
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.configure`."""

    async def _each(self, key: str, call: Callable[[Member, str], Awaitable[T]]) -> list[T]:
        parts = await self._composite.parts(key)
        return await gather_all(
            call(self._composite.members[part.member], part.key) for part in parts
        )

    async def queues(self) -> tuple[str, ...]:
        matches: set[str] = set()
        queues = await gather_all(member.control.queues() for member in self._composite.members)
        for number, names in enumerate(queues):
            outside = (self._composite.public_key(QueuePart(number, name)) for name in names)
            matches.update(name for name in outside if name is not None)
        return tuple(sorted(matches))

    async def ledger(self, key: str) -> Ledger:
        """Return the sum of the ledgers of all parts. Each ledger is read in one step, and balances."""
        return reduce(add, await self._each(key, lambda member, name: member.control.ledger(name)))

    async def stats(self, key: str) -> QueueStats:
        stats = await self._each(key, lambda member, name: member.control.stats(name))
        oldest = [stats.oldest_waiting for stats in stats if stats.oldest_waiting is not None]
        return QueueStats(
            key=key,
            ledger=reduce(add, (stats.ledger for stats in stats)),
            oldest_waiting=min(oldest, default=None),
            delivered=sum(stats.delivered for stats in stats),
            redelivered=sum(stats.redelivered for stats in stats),
            retried=sum(stats.retried for stats in stats),
            lost=sum(stats.lost for stats in stats),
            subscribers=max(stats.subscribers for stats in stats),
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        return tuple(pair and pair[1] for pair in await self._locate(key, task_ids))

    async def _locate(
        self, key: str, task_ids: Sequence[str]
    ) -> list[tuple[QueuePart, TaskStatus] | None]:
        """Return, for each task id, the part that has the task or had it last, with its status there; else ``None``."""
        parts = await self._composite.parts(key)
        answers = await asyncio.gather(
            *(self._statuses(part, task_ids) for part in parts), return_exceptions=True
        )
        results = [pair for pair in answers if not isinstance(pair, BaseException)]
        parts = [
            part
            for part, pair in zip(parts, answers, strict=True)
            if not isinstance(pair, BaseException)
        ]
        errors = [pair for pair in answers if isinstance(pair, BaseException)]
        matches: list[tuple[QueuePart, TaskStatus] | None] = []
        for of_task in zip(*results, strict=True) if task_ids else ():
            known = [
                (part, structs.replace(item, key=key))
                for part, item in zip(parts, of_task, strict=True)
                if item is not None
            ]
            matches.append(
                max(known, key=lambda pair: (pair[1].state.live, pair[1].updated_at), default=None)
            )
        # A part that failed may hold the tasks that were not found.
        if errors and not (matches and all(matches)):
            raise errors[0]
        return matches

    async def _statuses(
        self, part: QueuePart, task_ids: Sequence[str]
    ) -> tuple[TaskStatus | None, ...]:
        """Return the statuses from one part. Raises `BackendUnavailable` if an optional member is unavailable."""
        control = self._composite.members[part.member].control
        statuses = await self._composite.at_leisure(
            self._composite.members[part.member],
            partial(control.statuses, part.key, *task_ids),
            None,
        )
        if statuses is None:
            raise BackendUnavailable("a backend that may hold the tasks is unavailable")
        return statuses

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        wanted: dict[QueuePart, list[str]] = {}
        for task_id, pair in zip(task_ids, await self._locate(key, task_ids), strict=True):
            if pair is not None:
                wanted.setdefault(pair[0], []).append(task_id)
        outcomes = await gather_all(
            self._composite.members[part.member].control.results(part.key, *ids)
            for part, ids in wanted.items()
        )
        matches: dict[str, bytes | None] = {}
        for ids, results in zip(wanted.values(), outcomes, strict=True):
            matches.update(zip(ids, results, strict=True))
        return tuple(matches.get(task_id) for task_id in task_ids)

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        number, inner = self._composite.to_member(delivery)
        return await self._composite.members[number].control.progress(inner, value)

    async def cancel(self, key: str, task_id: str) -> bool:
        return any(await self._each(key, lambda member, name: member.control.cancel(name, task_id)))

    async def purge(self, key: str) -> int:
        return sum(await self._each(key, lambda member, name: member.control.purge(name)))

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """Return the workers of all members. A connection that exists once per member counts once."""
        results = await gather_all(member.control.workers() for member in self._composite.members)
        by_name: dict[str, list[WorkerInfo]] = {}
        for number, workers in enumerate(results):
            for worker in workers:
                positions = (
                    self._composite.public_key(QueuePart(number, key)) for key in worker.keys
                )
                keys = tuple(key for key in positions if key is not None)
                by_name.setdefault(worker.worker_id, []).append(structs.replace(worker, keys=keys))
        return tuple(_as_one(by_name[name]) for name in sorted(by_name))

    async def maintain(self) -> Maintained:
        nothing = Maintained()
        results = await gather_all(
            self._composite.at_leisure(member, member.control.maintain, nothing)
            for member in self._composite.members
        )
        expired = []
        for number, done in enumerate(results):
            for item in done.expired:
                name = self._composite.public_key(QueuePart(number, item.key))
                expired.append(structs.replace(item, key=name or item.key))
        return Maintained(
            promoted=sum(done.promoted for done in results),
            expired=tuple(expired),
            forgotten=sum(done.forgotten for done in results),
            recovered=sum(done.recovered for done in results),
            unclaimed=tuple(sorted(self._unclaimed(results))),
        )

    def _unclaimed(self, results: Sequence[Maintained]) -> set[str]:
        parts = [
            QueuePart(number, key) for number, done in enumerate(results) for key in done.unclaimed
        ]
        return {self._composite.public_key(part) or part.key for part in parts}


def _as_one(infos: list[WorkerInfo]) -> WorkerInfo:
    return WorkerInfo(
        worker_id=infos[0].worker_id,
        connections=max(info.connections for info in infos),
        keys=tuple(sorted({key for info in infos for key in info.keys})),
        in_flight=sum(info.in_flight for info in infos),
        since=min(info.since for info in infos),
    )


class JointDeadLetters:
    """Implementation of `DeadLetters` for a composite backend. The dead letters of the oldest part are listed first."""

    def __init__(self, composite: CompositeBackend) -> None:
        self._composite = composite

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        parts = list(await self._composite.parts(key))
        start = 0
        if after is not None:
            start, after = await self._page(parts, after)
        matches: list[DeadLetter] = []
        for part in parts[start:]:
            dead_letters = self._composite.members[part.member].dead_letters
            results = await dead_letters.list(part.key, limit=limit - len(matches), after=after)
            after = None
            matches += [
                structs.replace(dead_letter, task=self._composite.renamed(part, dead_letter.task))
                for dead_letter in results
            ]
            if len(matches) >= limit:
                break
        return tuple(matches)

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        for part in await self._composite.parts(key):
            dead_letter = await self._composite.members[part.member].dead_letters.get(
                part.key, task_id
            )
            if dead_letter is not None:
                return structs.replace(
                    dead_letter, task=self._composite.renamed(part, dead_letter.task)
                )
        return None

    async def _page(self, parts: Sequence[QueuePart], after: str) -> tuple[int, str | None]:
        """Return the index of the part that holds the dead letter ``after``, and the id to continue after."""
        for number, part in enumerate(parts):
            (status,) = await self._composite.members[part.member].control.statuses(part.key, after)
            if status is not None and status.state is State.DEAD:
                return number, after
        return 0, None

    async def redrive(self, key: str, *task_ids: str) -> int:
        parts = await self._composite.parts(key)
        members = self._composite.members
        return sum(
            await gather_all(
                members[p.member].dead_letters.redrive(p.key, *task_ids) for p in parts
            )
        )

    async def discard(self, key: str, *task_ids: str) -> int:
        parts = await self._composite.parts(key)
        members = self._composite.members
        return sum(
            await gather_all(
                members[p.member].dead_letters.discard(p.key, *task_ids) for p in parts
            )
        )
