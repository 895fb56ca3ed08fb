"""Listing all tasks of a queue without changing them, in small steps between which Redis serves other clients."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from typing import Any, NamedTuple

from taskqueue_core.tasks import State
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.errors import contract_error
from taskqueue_redis.connection.failures import Failure, NoScript, ScriptError
from taskqueue_redis.journal.reader import StoreReader
from taskqueue_redis.scripts.assembly import script_digest, source
from taskqueue_redis.scripts.runner import Arg, Partitions
from taskqueue_redis.scripts.task_record import TaskRecord, record_of

_AT_ONCE = 300
"""approximate number of records that one step reads; each has about fifty bytes"""
_LOOKED_UP = 100
"""maximum number of tasks whose status one script call reads"""
_STATUS = "status"
_GROUP = "g"
_ALL = (0, 2**63)
_NONE = (1, 0)


class Listed(NamedTuple):
    """A task as it was when its queue was listed."""

    task_id: str
    state: State
    attempt: int
    losses: int
    priority: int
    tenant: str | None
    ordering_key: str | None
    since: int
    """time of the last change of the task's record, in microseconds; a delivery does not change the record"""
    as_of: int
    """time at which the task was read, in microseconds of the store's clock"""


class TaskLister(StoreReader):
    """Lists tasks of an installation."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._partitions: Partitions | None = None

    async def queues(self) -> tuple[str, ...]:
        """Return the names of the queues of all partitions, sorted; a shard counts as a queue."""
        names: set[str] = set()
        for partition in (await self._installed()).names:
            reply = await self._ask(partition, "SMEMBERS", f"{partition}:queues")
            names.update(name.decode() for name in reply)
        return tuple(sorted(names))

    async def read(self, key: str, states: Collection[State]) -> AsyncIterator[list[Listed]]:
        """Yield the tasks of a queue that are in one of ``states``, in batches, in no particular order.

        A task that is in one of these states during the whole listing is yielded at least once. It may be yielded
        again if the queue grows or shrinks.
        """
        partition = (await self._installed()).of(key)
        name = f"{partition}:q:{key}"
        epoch = await self._ask(partition, "HGET", f"{partition}:meta", "epoch")
        cursor = b"0"
        in_flight: dict[str, tuple[int, int]] = {}
        while epoch is not None:
            seconds, more = await self._ask(partition, "TIME")
            # Read which entries are in flight before the records are read, so that a task that was already delivered is
            # reported as in flight.
            for stream in in_flight:
                in_flight[stream] = await self._pending(partition, f"{name}/{stream}")
            args = "HSCAN", f"{name}/t", cursor, "COUNT", _AT_ONCE
            cursor, reply = await self._ask(partition, *args)
            records = {reply[n].decode(): record_of(reply[n + 1]) for n in range(0, len(reply), 2)}
            uncertain = [
                item
                for item, record in records.items()
                if record is None or _may_be_in_flight(record, in_flight)
            ]
            current = records | await self._look_up(partition, epoch, key, uncertain)
            as_of = int(seconds) * 1_000_000 + int(more)
            listed = [
                Listed(item, *record[:7], as_of)
                for item, record in current.items()
                if record is not None and record.state in states
            ]
            for record in records.values():
                if record is not None and record.stream is not None:
                    in_flight.setdefault(record.stream, _ALL)
            if listed:
                yield listed
            if cursor == b"0":
                return

    async def _installed(self) -> Partitions:
        if self._partitions is None:
            self._partitions = await self.installed()
        return self._partitions

    async def _pending(self, partition: str, stream: str) -> tuple[int, int]:
        """Return the lowest and the highest sequence number in flight in a stream; an empty range if there is none."""
        try:
            reply = await self._client.command(partition, "XPENDING", stream, _GROUP)
        except ScriptError:  # the consumer group does not exist, because nothing was ever delivered
            return _NONE
        except Failure as failure:
            raise contract_error(failure) from failure
        number, first, last, _ = reply
        if not number:
            return _NONE
        return int(first.partition(b"-")[0]), int(last.partition(b"-")[0])

    async def _look_up(
        self, partition: str, epoch: bytes, key: str, ids: list[str]
    ) -> dict[str, TaskRecord | None]:
        """Return the records of tasks, each read atomically; None for a task that no longer exists."""
        records: dict[str, TaskRecord | None] = {}
        while len(records) < len(ids):
            batch = ids[len(records) : len(records) + _LOOKED_UP]
            answers = await self._fetch(partition, epoch, key, batch)
            for name, answer in zip(batch, answers, strict=False):
                record = record_of(answer[0]) if answer else None
                if record is not None and answer[1]:
                    record = record._replace(state=State.IN_FLIGHT)
                records[name] = record
        return records

    async def _fetch(self, partition: str, epoch: bytes, key: str, ids: list[str]) -> Any:
        args: list[Arg] = [2, partition, f"{partition}:nothing", epoch, "", key, *ids]
        try:
            return await self._client.command(partition, "EVALSHA", script_digest(_STATUS), *args)
        except NoScript:
            return await self._ask(partition, "EVAL", source(_STATUS), *args)
        except Failure as failure:
            raise contract_error(failure) from failure


def _may_be_in_flight(record: TaskRecord, in_flight: Mapping[str, tuple[int, int]]) -> bool:
    """Return whether a task may be in flight, so that its status must be read."""
    if record.state is not State.WAITING or record.stream is None:
        return False
    low, high = in_flight.get(record.stream, _ALL)
    return low <= record.fence <= high
