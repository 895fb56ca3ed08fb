"""Calls to the store and the database that all sockets of an event loop make together, many with each call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from secrets import token_hex
from typing import ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

from taskqueue_core.consumer.outage import OutageRetry, close
from taskqueue_core.consumer.settle import Settler
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, State, TaskStatus
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import RECEIVER, connection_of

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """Sends items in batches. The items that are submitted while a batch is in progress are sent with the next one."""

    def __init__(
        self,
        sender: Callable[
            [], AbstractAsyncContextManager[Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]]
        ],
        size: int = LIMITS.batch,
    ) -> None:
        """Create a batcher. ``sender`` opens what consecutive batches share, such as a connection.

        It yields a function that takes up to ``size`` items and returns their answers in the same order.
        """
        self._sender = sender
        self._size = size
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Answer:
        """Send an item and return its answer. An error of a batch is raised for each of its items."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return await asyncio.shield(future)

    async def _run(self) -> None:
        while self._waiting:
            batch: list[tuple[Item, asyncio.Future[Answer]]] = []
            try:
                async with self._sender() as send:
                    while self._waiting:
                        batch = self._take_batch()
                        answers = await send([item for item, _ in batch])
                        for (_, future), answer in zip(batch, answers, strict=True):
                            future.set_result(answer)
                        batch = []
            except Exception as error:  # noqa: BLE001 - each of the callers handles it
                for _, future in batch or self._take_batch():
                    future.set_exception(error)
                    future.exception()  # a caller that was cancelled does not retrieve it

    def _take_batch(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        return batch


class SharedReceiver:
    """Receives and settles the deliveries of all sockets of a host that have the same keys.

    It has the subscription that holds the deliveries. A delivery is received only for a socket that waits for one, and
    the sockets take turns. Calls to the store are repeated during an outage.
    """

    _of_hosts: ClassVar[WeakKeyDictionary[Host, dict[tuple[str, ...], SharedReceiver]]] = (
        WeakKeyDictionary()
    )

    def __init__(self, host: Host, keys: tuple[str, ...]) -> None:
        self._host = host
        self._keys = keys
        self._users = 0
        self.outage = OutageRetry(self._log_outage)
        self.subscription = host.backend.subscribe(keys, connection_of(RECEIVER, token_hex(4)))
        self.settler = Settler(host.backend, self.subscription, self.outage)
        self._waiting: deque[asyncio.Future[Delivery]] = deque()
        """sockets that wait for a delivery, in the order in which they get one"""
        self._task: asyncio.Task[None] | None = None
        self._receiving = asyncio.Lock()
        """held during a receive, because a subscription allows one at a time"""
        self._acks: Batcher[tuple[Delivery, bytes], bool] = Batcher(
            lambda: nullcontext(self._ack_batch)
        )
        self._statuses: Batcher[tuple[str, str], TaskStatus | None] = Batcher(
            lambda: nullcontext(self._read_statuses)
        )

    @classmethod
    def join(cls, host: Host, keys: Sequence[str]) -> SharedReceiver:
        """Return the receiver of these keys. Each call must be followed by a call of `leave`."""
        receivers = cls._of_hosts.setdefault(host, {})
        name = tuple(sorted(set(keys)))
        receiver = receivers.get(name)
        if receiver is None:
            receiver = receivers[name] = cls(host, name)
        receiver._users += 1
        return receiver

    async def leave(self) -> None:
        """Close the subscription if no other socket uses it."""
        self._users -= 1
        if not self._users:
            del self._of_hosts[self._host][self._keys]
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
            async with self._receiving:  # earlier receives that were cancelled have ended
                await close(self.subscription)

    async def receive(self) -> Delivery:
        """Wait for a delivery. A cancelled call releases the delivery."""
        future: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                if future.exception() is None:
                    self._host.begin(self.settler.redeliver([future.result()]))
            elif self._next_waiting() is None and not self._task.done():
                self._task.cancel()  # no socket waits for what this call would receive
                self._task = None
            raise

    async def _run(self) -> None:
        async with self._receiving:
            await self._receive_for_all()

    async def _receive_for_all(self) -> None:
        while self._next_waiting() is not None:
            limit = min(len(self._waiting), LIMITS.batch)
            receive = partial(self.subscription.receive, limit, None)
            try:
                received = await self.outage.retry_until_available(receive)
            except Exception as error:  # noqa: BLE001 - each of the sockets handles it
                while (future := self._next_waiting()) is not None:
                    future.set_exception(error)
                return
            deliveries = list(received.deliveries)
            while deliveries and (future := self._next_waiting()) is not None:
                self._waiting.popleft()
                future.set_result(deliveries.pop(0))
            if deliveries:
                self._host.begin(self.settler.redeliver(deliveries))

    def _next_waiting(self) -> asyncio.Future[Delivery] | None:
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft()
        return self._waiting[0] if self._waiting else None

    async def ack(self, delivery: Delivery, result: bytes) -> bool:
        """Ack a delivery; return whether its receipt was still current."""
        return await self._acks.submit((delivery, result))

    async def _ack_batch(self, acks: Sequence[tuple[Delivery, bytes]]) -> list[bool]:
        results = await self.settler.ack(acks)
        return [results[delivery.receipt] for delivery, _ in acks]

    async def is_held(self, delivery: Delivery) -> bool:
        """Return whether the lease of a delivery is valid. The lease may expire while the process is suspended."""
        return is_current(
            await self._statuses.submit((delivery.task.key, delivery.task.id)), delivery
        )

    async def _read_statuses(self, tasks: Sequence[tuple[str, str]]) -> list[TaskStatus | None]:
        by_key: dict[str, list[str]] = {}
        for key, task_id in tasks:
            by_key.setdefault(key, []).append(task_id)
        found: dict[tuple[str, str], TaskStatus | None] = {}
        for key, ids in by_key.items():

            async def read(key: str = key, ids: Sequence[str] = ids) -> None:
                statuses = await self._host.control.statuses(key, *ids)
                found.update(zip(((key, task_id) for task_id in ids), statuses, strict=True))

            await self.outage.retry_until_available(read)
        return [found[task] for task in tasks]

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes this argument by position
        if ok:
            self._host.forget()
            LOG.info("store of the task queue available again")
        else:
            LOG.warning("store of the task queue unavailable: %s", reason)


def is_current(status: TaskStatus | None, delivery: Delivery) -> bool:
    """Return whether a task's status is that of its delivery, so that its lease has not expired."""
    own = State.IN_FLIGHT, delivery.attempt, delivery.losses
    return status is not None and (status.state, status.attempt, status.losses) == own
