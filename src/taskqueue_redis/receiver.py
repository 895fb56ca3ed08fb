"""Receiving for one consumer: choosing the queues to read, and recovering deliveries whose answer was lost."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.tasks import Delivery, Expired, Received
from taskqueue_redis.connection.failures import AnswerLost, ScriptError
from taskqueue_redis.context import RedisContext
from taskqueue_redis.scripts.receipts import Consumer, IssuedReceipt
from taskqueue_redis.scripts.runner import Arg, seconds
from taskqueue_redis.scripts.task_codec import CORRUPT, deliveries_of

_POLL_EVERY = 8
"""one in this many receives also checks the queues that are not known to have work"""
_ROUNDS = 5
_PENDING = 250
"""maximum number of receipts per script call"""
_PATIENCE = 0.25
"""seconds after which a receive stops waiting for silent partitions if any other partition is available"""
_RETRY_SECONDS = 0.2
"""seconds after which a partition that failed is read again"""


class ConsumerExpired(Exception):
    """The lease of this consumer has expired, and its deliveries were given to other consumers."""


class _Batch(msgspec.Struct):
    """The deliveries and other results of one receive, collected from several script calls."""

    by_key: dict[str, list[Delivery]] = {}
    expired: list[Expired] = []
    dues: list[float] = []
    again: bool = False

    def add(self, other: _Batch) -> None:
        for key, deliveries in other.by_key.items():
            self.by_key.setdefault(key, []).extend(deliveries)
        self.expired += other.expired
        self.dues += other.dues
        self.again = self.again or other.again

    @property
    def received(self) -> Received:
        lists = list(self.by_key.values())
        deliveries = lists[0] if len(lists) == 1 else _round_robin(lists)
        return Received(
            deliveries=tuple(deliveries),
            expired=tuple(self.expired),
            again=self.again,
            due_at=None if deliveries else min(self.dues, default=None),
        )


class Receiver:
    """Receives deliveries for a consumer from several partitions. Background tasks read unavailable partitions."""

    def __init__(self, context: RedisContext, consumer: Consumer) -> None:
        self._context = context
        self._consumer = consumer
        self._partitions = tuple(context.scripts.partitions.group(consumer.keys))
        self.ready: dict[str, None] = {}
        """queues that probably have work, in the order in which they are read"""
        self._reads = 0
        self._turn = 0
        self._uncertain: dict[str, bool] = {}
        """partitions whose deliveries in flight must be read: False after a lost answer, True after a failover"""
        self._unseen: list[Delivery] = []
        self._late: list[Expired] = []
        """expired tasks that no receive has reported yet"""
        self._unavailable: dict[str, asyncio.Task[None]] = {}
        """unavailable partitions, each with the background task that reads it until it answers"""
        self._expired = False

    async def take(self, limit: int) -> Received:
        """Return up to ``limit`` deliveries. Raises `ConsumerExpired`, and the errors of the backend contract."""
        if self._expired:
            raise ConsumerExpired
        many = len(self._partitions) > 1
        if self._uncertain and not many:
            await self._read_in_flight()
        if self._unseen:
            deliveries, self._unseen = self._unseen[:limit], self._unseen[limit:]
            clock, partition = self._context.clock, self._context.scripts.partitions.of
            # Skip tasks whose deadline has passed; maintenance will report them as expired.
            matches = [
                delivery
                for delivery in deliveries
                if delivery.task.deadline is None
                or delivery.task.deadline > clock.now(partition(delivery.task.key))
            ]
            return Received(deliveries=tuple(matches), again=True)
        self._reads += 1
        poll = self._reads % _POLL_EVERY == 0
        taken = _Batch(expired=self._late)
        self._late = []
        try:
            if many:
                await self._take_from_many(taken, limit, poll=poll)
            else:
                keys = tuple(self.ready)[:limit]
                taken = await self._read(self._partitions[0], limit, keys, poll=poll)
        except BaseException as error:
            self._unseen += (
                taken.received.deliveries
            )  # keep the deliveries of other partitions for the next receive
            self._late += taken.expired
            if isinstance(error, asyncio.CancelledError):
                self._context.background.start(self._release_unseen())
            raise
        return taken.received

    def mark_all_uncertain(self) -> None:
        """Let the next receive read the deliveries in flight for this consumer, because acks may have been undone."""
        for partition in self._partitions:
            self._mark_uncertain(partition, undone=True)

    def forget(self) -> None:
        """Forget what is known about queues, deliveries and partitions, and cancel the background tasks."""
        self.ready.clear()
        self._uncertain.clear()
        self._unseen.clear()
        self._expired = False
        for task in self._unavailable.values():
            task.cancel()
        self._unavailable.clear()

    async def _take_from_many(self, taken: _Batch, limit: int, *, poll: bool) -> None:
        looked = False
        for _ in range(_ROUNDS):
            remaining = limit - sum(map(len, taken.by_key.values()))
            if remaining <= 0:
                break
            ready = self._within_reach()
            uncertain = self._uncertain.keys() - self._unavailable.keys()
            if poll or uncertain or not ready:
                if looked:
                    break
                names = [name for name in self._partitions if name not in self._unavailable]
                await self._each(taken, {name: self._poll_partition(name) for name in names})
                looked, poll = True, False
                # Return recovered deliveries first, because they are older than those that a read would return.
                if self._unseen:
                    break
                continue
            chosen: dict[str, list[str]] = {}
            for key in ready[:remaining]:
                chosen.setdefault(self._context.scripts.partitions.of(key), []).append(key)
            share = max(1, remaining // max(1, sum(map(len, chosen.values()))))
            taken.again = False
            reads = {
                name: self._read(name, share * len(keys), tuple(keys), poll=False)
                for name, keys in chosen.items()
            }
            await self._each(taken, reads)
        taken.again = taken.again or bool(self._within_reach()) or bool(self._unseen)

    def _within_reach(self) -> tuple[str, ...]:
        """Return the queues that probably have work and whose partition is available."""
        if not self._unavailable:
            return tuple(self.ready)
        of = self._context.scripts.partitions.of
        return tuple(key for key in self.ready if of(key) not in self._unavailable)

    async def _each(self, taken: _Batch, reads: Mapping[str, Coroutine[Any, Any, _Batch]]) -> None:
        """Collect the results of reads.

        Leave silent and failed partitions to background tasks if another partition is available.
        """
        requested = {asyncio.create_task(read): name for name, read in reads.items()}
        late = set(requested)
        try:
            _, late = await asyncio.wait(late, timeout=_PATIENCE)
            while late and not self._others(
                {requested[waiter] for waiter in requested if not _answered(waiter)}
            ):
                _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _ended(requested)
            raise
        finally:
            for waiter in requested:
                if _answered(waiter):
                    taken.add(waiter.result())
        silent = [waiter for waiter in requested if not _answered(waiter)]
        errors = [error for waiter in silent if waiter.done() and (error := waiter.exception())]
        for error in errors:
            if not isinstance(error, BackendUnavailable):
                await _ended(late)
                raise error
        if not self._others({requested[waiter] for waiter in silent}):
            raise errors[0]
        for waiter in silent:
            self.set_aside(requested[waiter], waiter if waiter in late else None)

    def _others(self, names: set[str]) -> bool:
        """Return whether any partition that is not in ``names`` is available."""
        return len(names | self._unavailable.keys()) < len(self._partitions)

    def set_aside(self, partition: str, read: asyncio.Task[_Batch] | None = None) -> None:
        """Read a partition in the background until it answers. ``read`` is a read that is already running, if any."""
        if partition not in self._unavailable:
            asking = self._context.background.start(self._ask(partition, read))
            self._unavailable[partition] = asking

    async def _ask(self, partition: str, read: asyncio.Task[_Batch] | None) -> None:
        result: _Batch | None = None
        while result is None:
            try:
                result = await (read or self._poll_partition(partition))
            except ConsumerExpired:
                self._expired, result = True, _Batch()
            except TaskQueueError:
                read = None
                if self._context.closing.is_set():
                    result = _Batch()  # no further receive uses the result
                else:
                    await asyncio.sleep(_RETRY_SECONDS)
        self._unseen += result.received.deliveries
        self._late += result.expired
        del self._unavailable[partition]
        self._consumer.wake(None)

    async def _poll_partition(self, partition: str) -> _Batch:
        """Check which queues of a partition have work.

        If an answer from the partition was lost, read only the deliveries that it may have contained.
        """
        await self._consumer.enter(partition)
        if partition in self._uncertain:
            await self._read_in_flight(partition)
            return _Batch(again=True)
        return await self._read(partition, 0, (), poll=True)

    async def _read(
        self, partition: str, limit: int, keys: tuple[str, ...], *, poll: bool
    ) -> _Batch:
        token = self._consumer.token
        try:
            reply = await self._context.scripts.run(
                "receive", partition, token, self._turn, limit, int(poll), *keys,
                resend=False,
            )  # fmt: skip
        except asyncio.CancelledError:
            self._mark_uncertain(partition)
            raise
        except BackendUnavailable as error:
            match error.__cause__:
                case ScriptError(code="GONE") as gone:
                    raise ConsumerExpired from gone
                case AnswerLost() | ScriptError():
                    self._mark_uncertain(partition)
            raise
        if token != self._consumer.token:  # the lease has expired since
            raise ConsumerExpired
        taken = _Batch()
        self._note(taken, partition, keys, reply)
        return taken

    def _note(self, taken: _Batch, partition: str, keys: tuple[str, ...], reply: Any) -> None:
        now, due, again, late, groups, leftover, others, closed = reply
        wakeups = self._context.wakeups
        self._context.clock.learn(partition, now)
        wakeups.note_due(partition, due)
        at, keep, token = seconds(now), self._context.receipts.add, self._consumer.token
        for name, lane, entries, timeout, inputs in groups:
            key = name.decode()
            good, bad = deliveries_of(
                key, lane.decode(), token, at, entries, timeout=timeout, inputs=inputs
            )
            if bad:
                self._context.background.start(self._dead_letter_corrupt(bad))
            for delivery in good:
                keep(delivery.receipt, self._consumer)
            taken.by_key.setdefault(key, []).extend(good)
        remaining = [key.decode() for key in leftover]
        for key in {*keys, *remaining}:
            self.ready.pop(key, None)
        for key in [*[key.decode() for key in others], *remaining]:
            self.ready.setdefault(key)  # put the queue at the end, because queues take turns
        taken.expired += [Expired(key.decode(), name.decode(), n) for key, name, n in late]
        taken.again = taken.again or bool(again)
        if due:
            taken.dues.append(seconds(due))
        for name, opens_at in closed:
            if opens_at:
                wakeups.note_opening(name.decode(), seconds(opens_at))
                taken.dues.append(seconds(opens_at))

    def _mark_uncertain(self, partition: str, *, undone: bool = False) -> None:
        self._turn += 1  # the store refuses delayed receive calls that have an earlier turn number
        self._uncertain[partition] = undone or self._uncertain.get(partition, False)

    async def _read_in_flight(self, only: str = "") -> None:
        for partition in [only] if only else [*(self._uncertain.keys() - self._unavailable.keys())]:
            turn = self._turn
            try:
                await self._read_unknown(partition)
            except BackendUnavailable as error:
                match error.__cause__:
                    case ScriptError(code="GONE") as gone:
                        raise ConsumerExpired from gone
                raise
            if (
                turn == self._turn
            ):  # otherwise another answer was lost while the deliveries were read
                self._uncertain.pop(partition, None)

    async def _read_unknown(self, partition: str) -> None:
        """Keep deliveries in flight that no receive has returned; corrupt deliveries become dead letters.

        Read all receipts page by page, but the bodies only of the deliveries that are unknown.
        """
        run, token = self._context.scripts.run, self._consumer.token
        undone = self._uncertain.get(partition, False)
        position: Sequence[Arg] = ("", "")
        while position:
            args = (token, self._turn, *position, _PENDING)
            lanes, position = await run("pending", partition, *args)
            page = [
                IssuedReceipt(fence.decode(), lane.decode(), holder.decode(), key.decode())
                for key, lane, fences, tokens in lanes
                for fence, holder in zip(fences, tokens, strict=True)
            ]
            page = [receipt for receipt in page if self._is_unknown(receipt)]
            while page:
                items = chain.from_iterable((r.key, r.lane, r.fence, r.token) for r in page)
                reply = await run("adopt", partition, token, *items)
                deliveries: list[Delivery] = []
                for receipt, found in zip(page, reply, strict=False):
                    # Another call of this method may have returned the delivery in the meantime.
                    if found and self._is_unknown(receipt):
                        deliveries += self._parse(receipt, found)
                page = page[len(reply) :]
                if undone:
                    # A failover may have undone acks of these deliveries. Release them, so that they get new receipts.
                    await self._context.settlement.redeliver(deliveries, "")
                    continue
                for delivery in deliveries:
                    self._context.receipts.add(delivery.receipt, self._consumer)
                self._unseen += deliveries

    def _is_unknown(self, receipt: IssuedReceipt) -> bool:
        return not self._context.receipts.holds(receipt.text)

    def _parse(self, receipt: IssuedReceipt, found: Sequence[Any]) -> list[Delivery]:
        *entry, at, timeout, inputs = found
        good, bad = deliveries_of(
            receipt.key,
            receipt.lane,
            receipt.token,
            seconds(at),
            [receipt.fence.encode(), *entry],
            timeout=timeout,
            inputs=[(1, inputs)],
        )
        if bad:
            self._context.background.start(self._dead_letter_corrupt(bad))
        return good

    async def _release_unseen(self) -> None:
        try:
            await self._read_in_flight()
            deliveries, self._unseen = self._unseen, []
            if deliveries:
                await self._context.settlement.redeliver(deliveries, "")
        except (TaskQueueError, ConsumerExpired):
            pass  # the partitions stay uncertain: the next receive reads the deliveries, or `close` releases them

    async def _dead_letter_corrupt(self, corrupt: list[Delivery]) -> None:
        for delivery in corrupt:
            await self._context.settlement.dead_letter(
                delivery, CORRUPT, "the envelope cannot be read"
            )


def _answered(read: asyncio.Task[_Batch]) -> bool:
    return read.done() and not read.cancelled() and read.exception() is None


async def _ended(reads: Collection[asyncio.Task[_Batch]]) -> None:
    """Cancel reads and wait until they have ended."""
    for waiter in reads:
        waiter.cancel()
    if reads:
        await asyncio.wait(reads)


def _round_robin(lists: list[list[Delivery]]) -> list[Delivery]:
    longest = max(map(len, lists), default=0)
    return [deliveries[n] for n in range(longest) for deliveries in lists if n < len(deliveries)]
