"""The operator's side of several places: sums over them, and whatever has to be asked where the task is."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import TypeVar

from msgspec import structs

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.composite.backend import Joint, Place, Side
from taskqueue_core.concurrency import together
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

__all__ = ["JointControl", "JointDeadLetters"]

T = TypeVar("T")


class JointControl(ABC):
    """See `taskqueue_core.capabilities.Control`."""

    def __init__(self, joint: Joint) -> None:
        """Ask the places of ``joint``."""
        self._joint = joint

    @abstractmethod
    async def settings(self, key: str) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.settings`."""

    @abstractmethod
    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        """See `taskqueue_core.capabilities.Control.configure`."""

    async def _each(self, key: str, call: Callable[[Side, str], Awaitable[T]]) -> list[T]:
        places = await self._joint.places(key)
        return await together(call(self._joint.sides[place.side], place.key) for place in places)

    async def queues(self) -> tuple[str, ...]:
        """See `taskqueue_core.capabilities.Control.queues`."""
        found: set[str] = set()
        told = await together(side.control.queues() for side in self._joint.sides)
        for number, names in enumerate(told):
            outside = (self._joint.outside(Place(number, name)) for name in names)
            found.update(name for name in outside if name is not None)
        return tuple(sorted(found))

    async def ledger(self, key: str) -> Ledger:
        """See `taskqueue_core.capabilities.Control.ledger`. Each place is read in one step, and each balances."""
        return reduce(add, await self._each(key, lambda side, name: side.control.ledger(name)))

    async def stats(self, key: str) -> QueueStats:
        """See `taskqueue_core.capabilities.Control.stats`."""
        told = await self._each(key, lambda side, name: side.control.stats(name))
        oldest = [one.oldest_waiting for one in told if one.oldest_waiting is not None]
        return QueueStats(
            key=key,
            ledger=reduce(add, (one.ledger for one in told)),
            oldest_waiting=min(oldest, default=None),
            delivered=sum(one.delivered for one in told),
            redelivered=sum(one.redelivered for one in told),
            retried=sum(one.retried for one in told),
            lost=sum(one.lost for one in told),
            subscribers=max(one.subscribers for one in told),
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        """See `taskqueue_core.capabilities.Control.statuses`."""
        return tuple(one and one[1] for one in await self._found(key, task_ids))

    async def _found(
        self, key: str, task_ids: Sequence[str]
    ) -> list[tuple[Place, TaskStatus] | None]:
        """Return where each task is, or was last, and what is known of it there."""
        places = await self._joint.places(key)
        answers = await asyncio.gather(
            *(self._statuses(place, task_ids) for place in places), return_exceptions=True
        )
        told = [one for one in answers if not isinstance(one, BaseException)]
        places = [
            place
            for place, one in zip(places, answers, strict=True)
            if not isinstance(one, BaseException)
        ]
        errors = [one for one in answers if isinstance(one, BaseException)]
        found: list[tuple[Place, TaskStatus] | None] = []
        for of_task in zip(*told, strict=True) if task_ids else ():
            known = [
                (place, structs.replace(one, key=key))
                for place, one in zip(places, of_task, strict=True)
                if one is not None
            ]
            found.append(
                max(known, key=lambda pair: (pair[1].state.live, pair[1].updated_at), default=None)
            )
        if errors and not (found and all(found)):  # who did not answer may know the rest
            raise errors[0]
        return found

    async def _statuses(
        self, place: Place, task_ids: Sequence[str]
    ) -> tuple[TaskStatus | None, ...]:
        """Ask a place; a side that can be done without has its time."""
        control = self._joint.sides[place.side].control
        told = await self._joint.at_leisure(
            self._joint.sides[place.side],
            partial(control.statuses, place.key, *task_ids),
            None,
        )
        if told is None:
            raise BackendUnavailable("a side that may know the tasks is out of reach")
        return told

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        """See `taskqueue_core.capabilities.Control.results`."""
        wanted: dict[Place, list[str]] = {}
        for task_id, one in zip(task_ids, await self._found(key, task_ids), strict=True):
            if one is not None:
                wanted.setdefault(one[0], []).append(task_id)
        told = await together(
            self._joint.sides[place.side].control.results(place.key, *ids)
            for place, ids in wanted.items()
        )
        found: dict[str, bytes | None] = {}
        for ids, results in zip(wanted.values(), told, strict=True):
            found.update(zip(ids, results, strict=True))
        return tuple(found.get(task_id) for task_id in task_ids)

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        """See `taskqueue_core.capabilities.Control.progress`."""
        number, inner = self._joint.inward(delivery)
        return await self._joint.sides[number].control.progress(inner, value)

    async def cancel(self, key: str, task_id: str) -> bool:
        """See `taskqueue_core.capabilities.Control.cancel`."""
        return any(await self._each(key, lambda side, name: side.control.cancel(name, task_id)))

    async def purge(self, key: str) -> int:
        """See `taskqueue_core.capabilities.Control.purge`."""
        return sum(await self._each(key, lambda side, name: side.control.purge(name)))

    async def workers(self) -> tuple[WorkerInfo, ...]:
        """See `taskqueue_core.capabilities.Control.workers`. A connection to each side counts once."""
        told = await together(side.control.workers() for side in self._joint.sides)
        by_name: dict[str, list[WorkerInfo]] = {}
        for number, workers in enumerate(told):
            for worker in workers:
                places = (self._joint.outside(Place(number, key)) for key in worker.keys)
                keys = tuple(key for key in places if key is not None)
                by_name.setdefault(worker.worker_id, []).append(structs.replace(worker, keys=keys))
        return tuple(_as_one(by_name[name]) for name in sorted(by_name))

    async def maintain(self) -> Maintained:
        """See `taskqueue_core.capabilities.Control.maintain`."""
        nothing = Maintained()
        told = await together(
            self._joint.at_leisure(side, side.control.maintain, nothing)
            for side in self._joint.sides
        )
        expired = []
        for number, done in enumerate(told):
            for one in done.expired:
                name = self._joint.outside(Place(number, one.key))
                expired.append(structs.replace(one, key=name or one.key))
        return Maintained(
            promoted=sum(done.promoted for done in told),
            expired=tuple(expired),
            forgotten=sum(done.forgotten for done in told),
            recovered=sum(done.recovered for done in told),
            unclaimed=tuple(sorted(self._unclaimed(told))),
        )

    def _unclaimed(self, told: Sequence[Maintained]) -> set[str]:
        places = [Place(number, key) for number, done in enumerate(told) for key in done.unclaimed]
        return {self._joint.outside(place) or place.key for place in places}


def _as_one(infos: list[WorkerInfo]) -> WorkerInfo:
    return WorkerInfo(
        worker_id=infos[0].worker_id,
        connections=max(one.connections for one in infos),
        keys=tuple(sorted({key for one in infos for key in one.keys})),
        in_flight=sum(one.in_flight for one in infos),
        since=min(one.since for one in infos),
    )


class JointDeadLetters:
    """See `taskqueue_core.capabilities.DeadLetters`. The oldest place comes first, and each has its own in order."""

    def __init__(self, joint: Joint) -> None:
        """Look after the dead in the places of ``joint``."""
        self._joint = joint

    async def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        """See `taskqueue_core.capabilities.DeadLetters.list`."""
        places = list(await self._joint.places(key))
        start = 0
        if after is not None:
            start, after = await self._page(places, after)
        found: list[DeadLetter] = []
        for place in places[start:]:
            letters = self._joint.sides[place.side].dead_letters
            told = await letters.list(place.key, limit=limit - len(found), after=after)
            after = None
            found += [
                structs.replace(one, task=self._joint.renamed(place, one.task)) for one in told
            ]
            if len(found) >= limit:
                break
        return tuple(found)

    async def get(self, key: str, task_id: str) -> DeadLetter | None:
        """See `taskqueue_core.capabilities.DeadLetters.get`."""
        for place in await self._joint.places(key):
            found = await self._joint.sides[place.side].dead_letters.get(place.key, task_id)
            if found is not None:
                return structs.replace(found, task=self._joint.renamed(place, found.task))
        return None

    async def _page(self, places: Sequence[Place], after: str) -> tuple[int, str | None]:
        """Return in which place a page ended, and where in it."""
        for number, place in enumerate(places):
            (one,) = await self._joint.sides[place.side].control.statuses(place.key, after)
            if one is not None and one.state is State.DEAD:
                return number, after
        return 0, None

    async def redrive(self, key: str, *task_ids: str) -> int:
        """See `taskqueue_core.capabilities.DeadLetters.redrive`."""
        places = await self._joint.places(key)
        sides = self._joint.sides
        return sum(
            await together(sides[p.side].dead_letters.redrive(p.key, *task_ids) for p in places)
        )

    async def discard(self, key: str, *task_ids: str) -> int:
        """See `taskqueue_core.capabilities.DeadLetters.discard`."""
        places = await self._joint.places(key)
        sides = self._joint.sides
        return sum(
            await together(sides[p.side].dead_letters.discard(p.key, *task_ids) for p in places)
        )
