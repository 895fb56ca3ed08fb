"""Calls to the store and the database that all sockets of an event loop make together, many with each call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import datetime
from functools import cache, partial
from secrets import token_hex
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from taskqueue_core.consumer.outage import OutageRetry, close
from taskqueue_core.consumer.settle import Settler, settle
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Rejected, ScheduleRetry
from taskqueue_core.tasks import Delivery, State, TaskStatus
from taskqueue_prefect import task_runs
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import RECEIVER, connection_of
from taskqueue_prefect.task_runs import AcceptedRun, RunReader, StoredRun

Item = TypeVar("Item")
Answer = TypeVar("Answer")
_QUERY_SIZE = 100
"""maximum number of runs that one query reads"""
_CONNECTION_LINGER_SECONDS = 0.1
"""seconds for which an unused connection is kept for the next query"""
_COMMIT_POLL_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6)
"""seconds to wait before each further read of the database for a run whose transaction is being committed"""
_MAX_CHECKS = 4
"""number of deliveries after which a run that is still not in the database is dropped"""
_DATABASE_RETRY_SECONDS = 1.0
"""seconds between reads of the database while it is unavailable"""
_UNCHECKED_SECONDS = 0.25
"""seconds from the start of a receive in which its deliveries need no check: a receive renews the consumer's lease,
which lasts longer"""
_BAD_TASK_RUN = "bad_task_run"


class Batcher(Generic[Item, Answer]):
    """Sends items in batches. The items that are submitted while a batch is in progress are sent with the next one."""

    def __init__(
        self,
        sender: Callable[
            [], AbstractAsyncContextManager[Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]]]
        ],
        size: int = LIMITS.batch,
        linger: float = 0.0,
    ) -> None:
        """Create a batcher. ``sender`` opens what consecutive batches share, such as a connection.

        It yields a function that takes up to ``size`` items and returns their answers in the same order. It is closed
        when no item has been submitted for ``linger`` seconds.
        """
        self._sender = sender
        self._size = size
        self._linger = linger
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._submitted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """Send an item; return a future for its answer. An error of a batch is the answer to each of its items."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        self._submitted.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._waiting:
            batch: list[tuple[Item, asyncio.Future[Answer]]] = []
            try:
                async with self._sender() as send:
                    while await self._has_more():
                        batch = self._take_batch()
                        answers = await send([item for item, _ in batch])
                        for (_, future), answer in zip(batch, answers, strict=True):
                            if not future.done():
                                future.set_result(answer)
                        batch = []
            except Exception as error:  # noqa: BLE001 - each of the callers handles it
                for _, future in batch or self._take_batch():
                    if not future.done():
                        future.set_exception(error)
                        future.exception()  # a caller that was cancelled does not retrieve it

    async def _has_more(self) -> bool:
        if not self._waiting and self._linger:
            self._submitted.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._linger):
                    await self._submitted.wait()
        return bool(self._waiting)

    def _take_batch(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        return batch


_readers: WeakKeyDictionary[asyncio.AbstractEventLoop, Batcher[str, StoredRun | None]] = (
    WeakKeyDictionary()
)


async def read_runs(run_ids: Sequence[str]) -> list[StoredRun | None]:
    """Return runs as they are in the database now; ``None`` for each that does not exist.

    Calls that are made while the database is being read share the next query.
    """
    loop = asyncio.get_running_loop()
    reader = _readers.get(loop)
    if reader is None:
        reader = _readers[loop] = Batcher(_connected, _QUERY_SIZE, _CONNECTION_LINGER_SECONDS)
    return await asyncio.gather(*map(reader.submit, run_ids))


@asynccontextmanager
async def _connected() -> AsyncIterator[
    Callable[[Sequence[str]], Awaitable[list[StoredRun | None]]]
]:
    """Connect to the database for several queries. Getting a connection takes as long as two queries."""
    from prefect.server.database import provide_database_interface

    engine = await provide_database_interface().engine()
    if engine.dialect.name == "postgresql":  # saves BEGIN and ROLLBACK, which SQLite does not need
        engine = engine.execution_options(isolation_level="AUTOCOMMIT")
    async with engine.connect() as connection:
        yield partial(_run_reader(engine.dialect.name).read, connection)


@cache
def _run_reader(dialect: str) -> RunReader:
    return RunReader(dialect)


Ready = tuple[Delivery, StoredRun]
"""a run that may be sent to a worker, and its delivery"""


class SharedReceiver:
    """Receives, checks and settles the deliveries of all sockets of a host that have the same keys.

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
        self._waiting: deque[asyncio.Future[Ready]] = deque()
        """requests without a run, in the order in which they get one"""
        self._uncommitted: set[asyncio.Task[None]] = set()
        """tasks that wait until a delivered run is in the database; each needs one of the waiting requests"""
        self._task: asyncio.Task[None] | None = None
        self._is_receiving = False
        self._receiving = asyncio.Lock()
        """held during a receive, because a subscription allows one at a time"""
        self._acks: Batcher[tuple[Delivery, AcceptedRun], None] = Batcher(
            lambda: nullcontext(self._ack_batch)
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
        """Close the subscription if no other socket uses it, which releases its deliveries."""
        self._users -= 1
        if not self._users:
            del self._of_hosts[self._host][self._keys]
            tasks = [*self._uncommitted, *([] if self._task is None else [self._task])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            async with self._receiving:  # earlier receives that were cancelled have ended
                await close(self.subscription)

    def request(self, after: asyncio.Future[Any]) -> asyncio.Future[Ready]:
        """Return a future for a run that may be sent to a worker. Nothing is received for it before ``after`` is done.

        An error of ``after`` is its result. A request that is no longer needed must be passed to `withdraw`.
        """
        future: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        if after.done():
            self._add(future, after)
        else:
            after.add_done_callback(partial(self._add, future))
        return future

    def withdraw(self, request: asyncio.Future[Ready]) -> Delivery | None:
        """End a request. Return its delivery if it has one, which the caller must release."""
        if not request.cancel():
            return None if request.cancelled() or request.exception() else request.result()[0]
        if request in self._waiting:
            self._waiting.remove(request)
        if not self._waiting and self._is_receiving and self._task is not None:
            self._task.cancel()  # no socket waits for what this call would receive
            self._task = None
        return None

    def _add(self, request: asyncio.Future[Ready], after: asyncio.Future[Any]) -> None:
        if request.done():
            return
        if after.cancelled():
            request.cancel()
        elif (error := after.exception()) is not None:
            request.set_exception(error)
        else:
            self._waiting.append(request)
            self._start()

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._receiving:
            try:
                while (room := len(self._waiting) - len(self._uncommitted)) > 0:
                    receive = partial(self.subscription.receive, min(room, LIMITS.batch), None)
                    begun = monotonic()
                    self._is_receiving = True
                    try:
                        received = await self.outage.retry_until_available(receive)
                    finally:
                        self._is_receiving = False
                    # Not at the same time as the next receive, because fewer and larger batches cost less.
                    await self._check(received.deliveries, begun)
            except Exception as error:  # noqa: BLE001 - each of the sockets handles it
                self._fail(error)

    def _on_waited(self, task: asyncio.Task[None]) -> None:
        self._uncommitted.discard(task)
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            self._fail(error)
        self._start()

    def _fail(self, error: BaseException) -> None:
        while self._waiting:
            self._waiting.popleft().set_exception(error)

    async def _check(self, deliveries: Sequence[Delivery], begun: float) -> None:
        """Look up the runs of deliveries, and deliver those that may be sent. ``begun`` is when the receive began."""
        try:
            wanted: list[tuple[Delivery, str, datetime]] = []
            for delivery in deliveries:
                try:
                    wanted.append((delivery, *task_runs.state_of(delivery.task)))
                except ValueError as error:
                    await self._send_to_dead_letters(delivery, str(error))
            runs = await self._read([delivery.task.id for delivery, *_ in wanted])
            found: list[Ready] = []
            for (delivery, state, at), run in zip(wanted, runs, strict=True):
                if run is not None and run.has_reached(state, at):
                    found.append((delivery, run))
                else:
                    task = asyncio.create_task(self._wait_for_commit(delivery, state, at, begun))
                    self._uncommitted.add(task)
                    task.add_done_callback(self._on_waited)
            await self._deliver(found, begun)
        except Exception:
            self._host.begin(self.settler.redeliver(deliveries))
            raise

    async def _wait_for_commit(
        self, delivery: Delivery, state: str, at: datetime, begun: float
    ) -> None:
        """Deliver a run once the database has the run in this state, or in a later one.

        If it does not appear within about a second, in which its transaction should be committed, check it later.
        """
        run: StoredRun | None = None
        try:
            for pause in _COMMIT_POLL_SECONDS:
                await asyncio.sleep(pause)
                (run,) = await self._read([delivery.task.id])
                if run is not None and run.has_reached(state, at):
                    await self._deliver([(delivery, run)], begun)
                    return
            if delivery.attempt < _MAX_CHECKS:
                await self._schedule_check(delivery)
            else:
                await self.ack(delivery, AcceptedRun(state=""))
        except Exception:
            self._host.begin(self.settler.redeliver([delivery]))
            raise

    async def _deliver(self, found: Sequence[Ready], begun: float) -> None:
        """Give runs that may be sent to the sockets that wait. Settle the deliveries of the others."""
        sendable: list[Ready] = []
        for delivery, run in found:
            if run.fault is not None:
                await self._send_to_dead_letters(delivery, run.fault)
            elif run.deferred:
                sendable.append((delivery, run))
            else:
                self.ack(delivery, AcceptedRun(state=run.state_id))
        if monotonic() - begun > _UNCHECKED_SECONDS:
            sendable = await self._held(sendable)
        surplus: list[Delivery] = []
        for ready in sendable:
            if self._waiting:
                self._waiting.popleft().set_result(ready)
            else:
                surplus.append(ready[0])
        if surplus:
            self._host.begin(self.settler.redeliver(surplus))

    async def _read(self, run_ids: Sequence[str]) -> list[StoredRun | None]:
        logged = False
        while True:
            try:
                return await read_runs(run_ids)
            except Exception:  # noqa: BLE001 - a database error must not lose a run
                if not logged:
                    LOG.exception("could not read task runs from the database")
                logged = True
                await asyncio.sleep(_DATABASE_RETRY_SECONDS)

    async def _schedule_check(self, delivery: Delivery) -> None:
        later = ScheduleRetry(float(delivery.attempt), "the run's transaction is not committed")
        settled = partial(settle, self._host.backend, self.subscription, delivery, later)
        with suppress(LeaseLost):
            await self.outage.retry_until_available(settled)

    async def _send_to_dead_letters(self, delivery: Delivery, reason: str) -> None:
        LOG.error(
            "run %s cannot be sent to a worker, and becomes a dead letter: %s",
            delivery.task.id,
            reason,
        )
        await self.settler.settle_outcomes([(delivery, Rejected(_BAD_TASK_RUN, reason))])

    def ack(self, delivery: Delivery, run: AcceptedRun) -> asyncio.Future[None]:
        """Ack a delivery. Return a future that is done when the store has answered."""
        return self._acks.submit((delivery, run))

    async def _ack_batch(self, acks: Sequence[tuple[Delivery, AcceptedRun]]) -> list[None]:
        done = [(delivery, msgspec.json.encode(run)) for delivery, run in acks]
        current = await self.settler.ack(done)
        for delivery, run in acks:
            if run.worker is not None and not current[delivery.receipt]:
                LOG.warning(
                    "an acknowledgement came too late: run %s will be delivered again",
                    delivery.task.id,
                )
        return [None] * len(acks)

    async def _held(self, sendable: Sequence[Ready]) -> list[Ready]:
        """Return the runs whose leases have not expired, as they do while the process is suspended."""
        held: list[Ready] = []
        for key in dict.fromkeys(delivery.task.key for delivery, _ in sendable):
            of_key = [ready for ready in sendable if ready[0].task.key == key]
            read = partial(self._host.control.statuses, key, *(one.task.id for one, _ in of_key))
            found = zip(of_key, await self.outage.retry_until_available(read), strict=True)
            held += [ready for ready, status in found if is_current(status, ready[0])]
        return held

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
