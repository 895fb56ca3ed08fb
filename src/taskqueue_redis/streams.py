"""The events of running tasks in the Redis backend. Concurrent calls are sent to the store together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from taskqueue_core.authoring.event_streams import page_of, wait_for_events
from taskqueue_core.authoring.helpers import check_size
from taskqueue_core.capabilities import (
    Event,
    EventPage,
    NewEvents,
    Position,
    checked_page,
)
from taskqueue_core.concurrency import gather_all
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.coalescer import Coalescer, split
from taskqueue_redis.scripts.receipts import IssuedReceipt, parse_receipt
from taskqueue_redis.scripts.runner import Arg
from taskqueue_redis.tails import event_of
from taskqueue_redis.wakeups import RedisRoomSignal, channel_of

_AT_ONCE = 250
"""maximum number of tasks per script call"""


class _Append(NamedTuple):
    receipt: IssuedReceipt
    item: NewEvents


class _Read(NamedTuple):
    key: str
    task_id: str
    after: Position
    limit: int


class RedisStreams:
    """The capability ``streams`` of the Redis backend."""

    def __init__(self, context: RedisContext) -> None:
        self._context = context
        self._scripts = context.scripts
        self._appends: Coalescer[_Append, bool] = Coalescer(self._append)
        self._reads: Coalescer[_Read, Any] = Coalescer(self._read)

    async def append(self, *items: NewEvents) -> tuple[bool, ...]:
        self._context.ensure_open()
        check_size("items", items)
        answers = [False] * len(items)
        by_partition: dict[str, tuple[list[int], list[_Append]]] = {}
        for index, item in enumerate(items):
            receipt = parse_receipt(item.delivery.receipt)
            if receipt is None or receipt.key != item.delivery.task.key:
                continue
            partition = self._scripts.partitions.of(receipt.key)
            indexes, appends = by_partition.setdefault(partition, ([], []))
            indexes.append(index)
            appends.append(_Append(receipt, item))

        async def send(partition: str, indexes: list[int], appends: list[_Append]) -> None:
            replies = await self._appends.submit(partition, appends)
            for index, answer in zip(indexes, replies, strict=True):
                answers[index] = answer

        await gather_all(send(name, *batch) for name, batch in by_partition.items())
        return tuple(answers)

    async def events(
        self,
        key: str,
        task_id: str,
        *,
        after: str | None = None,
        limit: int = 100,
        wait: float = 0,
    ) -> EventPage | None:
        place = checked_page(after, limit, wait)
        self._context.ensure_open()
        partition = self._scripts.partitions.of(key)
        start = place or Position(0, 0)
        asked = _Read(key, task_id, start, limit)
        if not wait:
            return await self._page(partition, asked)
        name = channel_of(partition, "events", f"{key}/{task_id}")
        wakeups = self._context.wakeups
        known = wakeups.tail_page(name, start, limit)
        if known is not None and known.events:
            return known

        async def read() -> EventPage | None:
            page = wakeups.tail_page(name, start, limit)
            return await self._page(partition, asked) if page is None else page

        return await wait_for_events(read, RedisRoomSignal(wakeups, (name,)), wait)

    async def _append(self, partition: str, appends: Sequence[_Append]) -> Sequence[bool]:
        answers: list[bool] = []
        for part in split(appends, _AT_ONCE, lambda append: append.item.size):
            items = [_arguments(append) for append in part]
            answers += map(
                bool, await self._scripts.run_each("stream_append", partition, (), items)
            )
        return answers

    async def _page(self, partition: str, asked: _Read) -> EventPage | None:
        (answer,) = await self._reads.submit(partition, [asked])
        return _page(answer)

    async def _read(self, partition: str, reads: Sequence[_Read]) -> Sequence[Any]:
        items = [(r.key, r.task_id, r.after.attempt, r.after.number, r.limit) for r in reads]
        return await self._scripts.run_each("stream_read", partition, (), items)


def _arguments(append: _Append) -> Sequence[Arg]:
    receipt, item = append
    events: chain[Arg] = chain.from_iterable((each.channel, each.value) for each in item.events)
    head: tuple[Arg, ...] = receipt.key, item.delivery.task.id, receipt.fence, receipt.token
    return *head, item.first, len(item.events), *events


def _page(answer: Sequence[Any]) -> EventPage | None:
    if not answer:
        return None
    ended, attempt, number, *entries = answer
    start = Position(int(attempt), int(number))
    if entries:
        return page_of(map(_event, entries), start)
    return EventPage(next=start.id if start.number else None, ended=bool(ended))


def _event(entry: Sequence[Any]) -> Event:
    place, (_, meta, _, value) = entry
    return event_of(place, meta, value)
