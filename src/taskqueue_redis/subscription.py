"""A consumer's view over its keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from taskqueue_core.authoring import SubscriptionBase, answer, checked_limit, checked_results
from taskqueue_core.errors import BackendUnavailable, SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Expired, Received, Settled
from taskqueue_redis.failures import AnswerLost, Failure, ScriptError
from taskqueue_redis.home import Home
from taskqueue_redis.reading import CORRUPT, deliveries_of, delivery_of
from taskqueue_redis.receipts import Receipt, readable
from taskqueue_redis.scripts import microseconds, seconds
from taskqueue_redis.translation import translated

__all__ = ["RedisSubscription"]

_HANDED_BACK_AT_ONCE = 200
_LOOK_EVERY = 8
"""receives after which keys that are not known to have work are looked at in any case"""


class RedisSubscription(SubscriptionBase):
    """Owns its deliveries while its process gives a sign of life. Registers with the store at its first call."""

    def __init__(self, home: Home, keys: tuple[str, ...], consumer: str) -> None:
        self.keys = keys
        self.consumer = consumer
        self.token = home.new_token()
        self.since = home.wakeups.now()
        self.closed = False
        self._home = home
        self._mine = frozenset(keys)
        self._partitions = home.scripts.partitions.group(keys)
        self._joined: set[str] = set()
        self._joining = asyncio.Lock()
        self._attending = False
        self._ready: dict[str, None] = {}
        """queues that are likely to have work, the next in turn first"""
        self._reads = 0
        self._turn = 0
        self._doubtful: set[str] = set()
        """partitions where a receive may have brought what nobody has seen"""
        self._unseen: list[Delivery] = []
        self._woken = asyncio.Event()
        self._woken_by: set[str] = set()
        self._revoked: list[str] = []
        self._revocation = asyncio.Event()

    # receive

    async def receive(self, limit: int, timeout: float | None) -> Received:
        """See `taskqueue_core.backend.Subscription.receive`."""
        checked_limit(limit)
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        self._home.demand_open()
        wakeups = self._home.wakeups
        end = None if timeout is None else wakeups.now() + timeout
        try:
            while True:
                await self.join()
                wakeups.sleep(self)  # first, so that no bell is missed in between
                self._woken.clear()
                received = await self._take(limit)
                if received.deliveries or received.expired or self.closed:
                    return received
                if end is not None and end <= wakeups.now():
                    return received
                await self._wait(end)
                if self.closed:
                    return Received()
        except BackendUnavailable:
            if self.closed:
                return Received()
            raise
        finally:
            wakeups.rise(self)
            for key in self._woken_by & self._ready.keys():
                wakeups.ring(key)
            self._woken_by.clear()

    async def _take(self, limit: int) -> Received:
        if self._unseen:
            taken, self._unseen = self._unseen[:limit], self._unseen[limit:]
            return Received(deliveries=tuple(taken), again=True)
        deliveries: list[Delivery] = []
        expired: list[Expired] = []
        again = False
        dues: list[float] = []
        for partition in self._in_turn():
            if len(deliveries) >= limit:
                again = True
                break
            try:
                told = await self._read(partition, limit - len(deliveries))
            except BaseException as error:
                if deliveries:  # of another partition: they are handed out, and the failure will show again
                    self._unseen += deliveries
                    if isinstance(error, Exception):
                        return await self._take(limit)
                raise
            found, late, more, due = told
            deliveries += found
            expired += late
            again = again or more
            if due is not None:
                dues.append(due)
        if self.closed:
            return Received()
        return Received(
            deliveries=tuple(deliveries),
            expired=tuple(expired),
            again=again,
            due_at=None if deliveries else min(dues, default=None),
        )

    def _in_turn(self) -> Sequence[str]:
        if len(self._partitions) == 1:
            return tuple(self._partitions)
        of = self._home.scripts.partitions.of
        return tuple(dict.fromkeys([*(of(key) for key in self._ready), *self._partitions]))

    async def _read(
        self, partition: str, limit: int
    ) -> tuple[list[Delivery], list[Expired], bool, float | None]:
        home = self._home
        if partition in self._doubtful:
            found = await self._look_again(partition)
            if found:
                self._unseen += found[limit:]
                return found[:limit], [], True, None
        keys = [key for key in self._ready if home.scripts.partitions.of(key) == partition][:limit]
        turn = self._turn
        self._reads += 1
        look = int(self._reads % _LOOK_EVERY == 0)
        try:
            with translated(ScriptError):
                told = await home.scripts.run(
                    "receive", partition, self.token, turn, limit, look, *keys, resend=False
                )
        except ScriptError as error:
            if error.code != "GONE" or self.closed:
                if self.closed:
                    return [], [], False, None
                raise BackendUnavailable("the store failed") from error
            self._begin_anew()
            return [], [], True, home.wakeups.now()
        except asyncio.CancelledError:
            self._doubt(partition)
            if not self.closed:
                home.background.start(self._hand_back_unseen(partition))
            raise
        except BackendUnavailable as error:
            if isinstance(error.__cause__, AnswerLost):
                self._doubt(partition)
            raise
        return self._read_answer(partition, keys, told)

    def _read_answer(
        self, partition: str, keys: list[str], told: Any
    ) -> tuple[list[Delivery], list[Expired], bool, float | None]:
        now, due, again, late, groups, leftover, others = told
        self._home.wakeups.told(now)
        self._home.wakeups.note_due(partition, due)
        at = seconds(now)
        lists: dict[bytes, list[Delivery]] = {}
        for key, lane, entries in groups:
            good, bad = deliveries_of(key.decode(), lane.decode(), self.token, at, entries)
            if bad:
                self._home.background.start(self._bury(bad))
            lists.setdefault(key, []).extend(good)
        deliveries = _one_each_in_turn(list(lists.values()))
        keep = self._home.receipts.keep
        for delivery in deliveries:
            keep(delivery.receipt, self)
        left = [key.decode() for key in leftover]
        for key in {*keys, *left}:
            self._ready.pop(key, None)
        for key in [*(key.decode() for key in others), *left]:
            self._ready.setdefault(key)  # what was served to the end: the keys take turns
        expired = [Expired(key.decode(), task_id.decode(), attempt) for key, task_id, attempt in late]
        return deliveries, expired, bool(again), seconds(due) if due else None

    # what an answer that was lost has brought

    def _doubt(self, partition: str) -> None:
        self._turn += 1
        self._doubtful.add(partition)

    async def _look_again(self, partition: str) -> list[Delivery]:
        with translated():
            told = await self._home.scripts.run("pending", partition, self.token, self._turn)
        self._doubtful.discard(partition)
        found: list[Delivery] = []
        at = self._home.wakeups.now()
        for key, lane, entries, tokens in told:
            for entry, token in zip(entries, tokens, strict=True):
                good, bad = deliveries_of(key.decode(), lane.decode(), token.decode(), at, [entry])
                for delivery in [*good, *bad]:
                    if not self._home.receipts.holds(delivery.receipt):
                        self._home.receipts.keep(delivery.receipt, self)
                        found.append(delivery)
        return found

    async def _hand_back_unseen(self, partition: str) -> None:
        try:
            found = await self._look_again(partition)
            if found:
                await self._home.settlements.redeliver(found, "")
        except (Failure, TaskQueueError):
            pass  # in doubt still: the next receive looks again, and a close hands back

    async def _bury(self, corrupt: list[Delivery]) -> None:
        for delivery in corrupt:
            await self._home.settlements.dead_letter(delivery, CORRUPT, "the envelope cannot be read")

    # settle

    async def ack(
        self, *deliveries: Delivery, results: Sequence[bytes | None] = ()
    ) -> tuple[Settled, ...]:
        """See `taskqueue_core.backend.Subscription.ack`."""
        checked = checked_results(deliveries, results)
        self._home.demand_open()
        return answer(await self._home.settlements.ack(deliveries, checked))

    async def redeliver(self, *deliveries: Delivery, lost: bool = False) -> tuple[Settled, ...]:
        """See `taskqueue_core.backend.Subscription.redeliver`."""
        self._home.demand_open()
        loser = self.token if lost else ""
        return answer(await self._home.settlements.redeliver(deliveries, loser))

    async def dead_letter(
        self, delivery: Delivery, reason: str, error: str | None = None
    ) -> Settled:
        """See `taskqueue_core.capabilities.DeadLettering`."""
        self._home.demand_open()
        return answer([await self._home.settlements.dead_letter(delivery, reason, error)])[0]

    async def adopt(self, *receipts: str) -> tuple[Delivery | None, ...]:
        """See `taskqueue_core.capabilities.Handover`."""
        if self.closed:
            raise SubscriptionClosed("the subscription is closed")
        self._home.demand_open()
        await self.join()
        answers: list[Delivery | None] = [None] * len(receipts)
        by_partition: dict[str, list[tuple[int, Receipt]]] = {}
        for place, text in enumerate(receipts):
            receipt = readable(text)
            if receipt is not None and self._home.scripts.partitions.of(receipt.key) in self._joined:
                partition = self._home.scripts.partitions.of(receipt.key)
                by_partition.setdefault(partition, []).append((place, receipt))
        for partition, wanted in by_partition.items():
            words = [word for _, r in wanted for word in (r.key, r.lane, r.fence, r.token)]
            with translated():
                told = await self._home.scripts.run("adopt", partition, self.token, *words)
            for (place, receipt), (fields, at) in zip(wanted, told, strict=True):
                if fields:
                    text = receipts[place]
                    answers[place] = delivery_of(receipt.key, receipt.lane, text, seconds(at), fields)
                    self._home.receipts.keep(text, self)
        return tuple(answers)

    async def revoked(self) -> tuple[str, ...]:
        """See `taskqueue_core.capabilities.Revocation`."""
        if not self.closed:
            await self.join()
        await self._revocation.wait()
        receipts, self._revoked = tuple(self._revoked), []
        if not self.closed:
            self._revocation.clear()
        return receipts

    def revoke(self, receipts: Iterable[str]) -> None:
        """Note deliveries that are no longer owned."""
        self._revoked += receipts
        if self._revoked:
            self._revocation.set()

    # come and go

    async def join(self) -> None:
        """Register with the store, if that has not been done."""
        if len(self._joined) == len(self._partitions) or self.closed:
            return
        async with self._joining:
            if not self._attending:
                with translated():
                    await self._home.wakeups.attend(self.keys)
                self._attending = True
            for partition, keys in self._partitions.items():
                if partition not in self._joined and not self.closed:
                    with translated():
                        now = await self._home.scripts.run(
                            "join", partition, self.token, self.consumer,
                            microseconds(self.since), *keys,
                        )  # fmt: skip
                    self._home.wakeups.told(now)
                    self._joined.add(partition)
                    self._home.heartbeat.add(self.token, partition)

    async def close(self) -> None:
        """See `taskqueue_core.backend.Subscription.close`."""
        if not self.closed:
            self.closed = True
            self._home.subscriptions.pop(self, None)
            self._home.heartbeat.remove(self.token)
            self._home.wakeups.rise(self)
            if self._attending:
                self._home.wakeups.leave(self.keys)
            self.wake(None)
            self._revocation.set()
            self._home.receipts.drop(self)
            await self._home.settlements.settled()
        async with self._joining:
            for partition in tuple(self._joined):
                with translated():
                    while not await self._home.scripts.run(
                        "leave", partition, self.token, _HANDED_BACK_AT_ONCE
                    ):
                        pass
                self._joined.discard(partition)

    def wake(self, key: str | None) -> None:
        """Have a waiting receive look again."""
        if key is not None:
            self._ready[key] = None
            self._woken_by.add(key)
        self._woken.set()

    async def _wait(self, end: float | None) -> None:
        timer = None if end is None else self._home.wakeups.call_at(end, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            if timer is not None:
                timer.cancel()

    def _begin_anew(self) -> None:
        """Start over as a new consumer: this one was given up, and what it held is with others."""
        self._home.heartbeat.remove(self.token)
        self.revoke(self._home.receipts.drop(self))
        self._unseen.clear()
        self._joined.clear()
        self._doubtful.clear()
        self.token = self._home.new_token()


def _one_each_in_turn(lists: list[list[Delivery]]) -> list[Delivery]:
    if len(lists) == 1:
        return lists[0]
    longest = max(map(len, lists), default=0)
    return [deliveries[n] for n in range(longest) for deliveries in lists if n < len(deliveries)]
