"""Delivering runs to one worker's socket: the next run is received only when the last one was acknowledged.

The socket's handler is Prefect's. Its calls show the following:

===================================== ===============================================================
it makes a `MultiQueue`               a worker has subscribed; the task that runs now is the handler
it observes the worker                first: the worker's id. After a run was sent: *the worker acknowledged it*
it asks for a run                     the previous run is acknowledged; receive the next one
it asks whether the socket is up      there is no run: read from the socket, to notice that the worker leaves
it passes a run to ``retry``          the socket broke before the acknowledgement
its task ends, in any way             release the run that was sent
===================================== ===============================================================
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from taskqueue_core.backend import Subscription
from taskqueue_core.consumer.outage import OutageRetry, close
from taskqueue_core.consumer.settle import Settler, settle
from taskqueue_core.errors import LeaseLost
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Rejected, ScheduleRetry
from taskqueue_core.tasks import Delivery, State, Task
from taskqueue_prefect import task_runs
from taskqueue_prefect.context import LOG, Host
from taskqueue_prefect.names import connection_of, name_of
from taskqueue_prefect.task_runs import AcceptedRun

if TYPE_CHECKING:
    from prefect.server.schemas.core import TaskRun


_DISCONNECT = "websocket.disconnect"


class Socket(Protocol):
    """The part of Starlette's websocket that is used here."""

    def receive(self) -> Awaitable[MutableMapping[str, Any]]:
        """Return the next message. Cancelling it loses none."""


class ClientListener:
    """Reads from a worker's socket while the handler does not, to notice that the worker leaves."""

    def __init__(self, on_disconnect: Callable[[], None]) -> None:
        """Call ``on_disconnect`` when the worker leaves while this listens."""
        self._on_disconnect = on_disconnect
        self._received: asyncio.Task[MutableMapping[str, Any]] | None = None

    def is_up(self, socket: Socket) -> bool:
        """Start listening; return whether the worker is connected. Unexpected messages are dropped."""
        if self.is_down:
            return False
        if self._received is None or self._received.done():
            self._received = asyncio.ensure_future(socket.receive())
            self._received.add_done_callback(self._log_outage)
        return True

    @property
    def is_down(self) -> bool:
        """Whether the worker was seen to leave."""
        heard = self._received
        if heard is None or not heard.done() or heard.cancelled():
            return False
        return heard.exception() is not None or heard.result()["type"] == _DISCONNECT

    def _log_outage(self, _: object) -> None:
        if self.is_down:
            self._on_disconnect()

    async def stop(self) -> None:
        """Stop listening, so that the handler reads the worker's answer. `is_down` remains true."""
        if self._received is None or self.is_down:
            return
        self._received.cancel()
        await asyncio.wait([self._received])
        if not self.is_down:
            self._received = None


_UNKNOWN_CLIENT = "unknown"
_COMMIT_POLL_SECONDS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6)
"""seconds between reads of the database for a run whose transaction is being committed"""
_MAX_CHECKS = 4
"""deliveries, seconds apart, after which a run that is not in the database is dropped"""
_DATABASE_RETRY_SECONDS = 1.0
"""seconds between reads while the database is unavailable"""
_BAD_TASK_RUN = "bad_task_run"
_VIOLATION = 4001
_current: ContextVar[SharedQueueDelivery | None] = ContextVar(
    "taskqueue_prefect_socket", default=None
)


class SharedQueueDelivery:
    """Delivers runs to one worker, for as long as the asyncio task that created it is running."""

    def __init__(self, host: Host, task_keys: object) -> None:
        """Receive nothing yet. Closes the socket with 4001 if ``task_keys`` is not a list of keys."""
        self._host = host
        self._keys = _names(task_keys)
        self._connection_mark = token_hex(4)
        self._client = _UNKNOWN_CLIENT
        self._connection = connection_of(_UNKNOWN_CLIENT, self._connection_mark)
        self._subscription: Subscription | None = None
        self._outage = OutageRetry(self._log_outage)
        self._sent: Delivery | None = None
        """the run that was sent and is not acknowledged"""
        self._state = ""
        self._settle_task: asyncio.Task[None] | None = None
        self._take_task: asyncio.Task[tuple[Delivery, TaskRun]] | None = None
        self._changed = asyncio.Event()
        """set when a run was received, or the worker has left"""
        self._listener = ClientListener(self._changed.set)
        _current.set(self)
        if (handler := asyncio.current_task()) is not None:
            handler.add_done_callback(lambda _: host.begin(self._end()))

    @classmethod
    def of_this_context(cls) -> SharedQueueDelivery | None:
        """Return the delivery of the socket whose handler calls this, if any."""
        return _current.get()

    def observed(self, client_id: object) -> None:
        """Note that the handler has heard from its worker. Closes the socket with 4001 for an invalid id."""
        if not isinstance(client_id, str):
            raise _violation(f"client_id: a {type(client_id).__name__}; allowed: text")
        if client_id != self._client:
            self._client = client_id
            self._connection = connection_of(client_id, self._connection_mark)
        if self._sent is not None:
            self._accept()

    def is_connected(self, socket: Socket) -> bool:
        """Return whether the worker is connected; listen to it until the next run is sent."""
        return self._listener.is_up(socket)

    async def next(self) -> TaskRun:
        """Return the next run. If cancelled, it continues in the background, and the next call returns the run.

        Raises `TimeoutError` if the worker has left.
        """
        if self._sent is not None:  # the handler asks for more only after the acknowledgement
            self._accept()
        if self._take_task is None:
            self._take_task = asyncio.create_task(self._take())
            self._take_task.add_done_callback(lambda _: self._changed.set())
        # The run counts as sent only when this returns: the handler gives up waiting every second.
        while not (self._take_task.done() or self._listener.is_down):
            self._changed.clear()
            await self._changed.wait()
        await self._listener.stop()
        if self._listener.is_down:
            raise TimeoutError  # then the handler asks whether the worker is connected
        take_task, self._take_task = self._take_task, None
        self._sent, run = take_task.result()
        self._state = task_runs.state_id(run)
        return run

    async def release(self) -> None:
        """Release the run that was sent."""
        delivery, self._sent = self._sent, None
        if delivery is not None:
            await self._settlements.redeliver([delivery])

    # Receiving

    @property
    def _settlements(self) -> Settler:
        return Settler(self._host.backend, self._open_subscription(), self._outage)

    def _open_subscription(self) -> Subscription:
        if self._subscription is None:
            self._subscription = self._host.backend.subscribe(self._keys, self._connection)
        return self._subscription

    async def _take(self) -> tuple[Delivery, TaskRun]:
        if self._settle_task is not None:
            await self._settle_task
        subscription = self._open_subscription()
        while True:
            received = await self._outage.retry_until_available(
                partial(subscription.receive, 1, None)
            )
            for delivery in received.deliveries:
                run = await self._runnable_run(delivery)
                if run is not None and await self._is_still_held(delivery):
                    return delivery, run

    async def _is_still_held(self, delivery: Delivery) -> bool:
        """Return whether a delivery still belongs to this socket: not if the process was suspended for a lease."""
        task = delivery.task
        poll = partial(self._host.control.statuses, task.key, task.id)
        (status,) = await self._outage.retry_until_available(poll)
        own = State.IN_FLIGHT, delivery.attempt, delivery.losses
        return status is not None and (status.state, status.attempt, status.losses) == own

    async def _runnable_run(self, delivery: Delivery) -> TaskRun | None:
        """Return the run of a delivery; settle it and return ``None`` if it must not be run."""
        reason = task_runs.foreign_reason(delivery.task)
        run = None if reason else await self._current_run(delivery.task)
        if run is not None and task_runs.is_scheduled(run):
            reason = task_runs.unsendable_reason(run)
            if reason is None:
                return run
        if reason is not None:
            await self._send_to_dead_letters(delivery, reason)
            return None
        if run is None and delivery.attempt < _MAX_CHECKS:
            await self._schedule_check(delivery)
        else:
            state = "" if run is None else task_runs.state_id(run)
            await self._ack(delivery, AcceptedRun(state=state))
        return None

    async def _current_run(self, task: Task) -> TaskRun | None:
        """Read a run from the database, which may not have it yet, or may have a later state.

        A run has one entry, published for one state. A later state reschedules the entry.
        """
        state, at = task_runs.state_of(task)
        for pause in _COMMIT_POLL_SECONDS:
            await asyncio.sleep(pause)
            run = await self._read(task.id)
            if run is not None and (
                task_runs.state_id(run) == state or task_runs.state_time(run) > at
            ):
                return run
        return None

    async def _schedule_check(self, delivery: Delivery) -> None:
        later = ScheduleRetry(float(delivery.attempt), "its transaction is not committed")
        backend, subscription = self._host.backend, self._open_subscription()
        with contextlib.suppress(LeaseLost):
            await self._outage.retry_until_available(
                partial(settle, backend, subscription, delivery, later)
            )

    async def _read(self, run_id: str) -> TaskRun | None:
        logged = False
        while True:
            try:
                return await task_runs.read(run_id)
            except Exception:  # noqa: BLE001 - no error of the database may give up a run
                if not logged:
                    LOG.exception("could not read a task run from the database")
                logged = True
                await asyncio.sleep(_DATABASE_RETRY_SECONDS)

    # Settling

    def _accept(self) -> None:
        delivery, self._sent = self._sent, None
        if delivery is not None:
            run = AcceptedRun(worker=self._connection, state=self._state)
            self._settle_task = asyncio.create_task(self._ack(delivery, run))

    async def _ack(self, delivery: Delivery, run: AcceptedRun) -> None:
        results = await self._settlements.ack([(delivery, msgspec.json.encode(run))])
        if run.worker is not None and not all(results.values()):
            LOG.warning(
                "an acknowledgement came too late: run %s is delivered again", delivery.task.id
            )

    async def _send_to_dead_letters(self, delivery: Delivery, reason: str) -> None:
        LOG.error(
            "run %s cannot be sent to a worker and is now a dead letter: %s",
            delivery.task.id,
            reason,
        )
        await self._settlements.settle_outcomes([(delivery, Rejected(_BAD_TASK_RUN, reason))])

    async def _end(self) -> None:
        """Settle what was acknowledged, and release the rest."""
        await self._listener.stop()
        if self._take_task is not None:
            self._take_task.cancel()
            await asyncio.gather(self._take_task, return_exceptions=True)
        if self._settle_task is not None:
            await asyncio.wait([self._settle_task])
        if self._subscription is not None:
            await close(self._subscription)

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - as `OutageRetry` calls it
        if ok:
            self._host.forget()
            LOG.info("store of the task queue available again")
        else:
            LOG.warning("store of the task queue unavailable: %s", reason)


def _names(task_keys: object) -> list[str]:
    max_keys = LIMITS.keys
    if not isinstance(task_keys, list) or not 0 < len(task_keys) <= max_keys:
        received = (
            len(task_keys) if isinstance(task_keys, list) else f"a {type(task_keys).__name__}"
        )
        raise _violation(f"keys: {received}; allowed: a list of 1 to {max_keys}")
    for key in task_keys:
        if not isinstance(key, str):
            raise _violation(f"keys: one is a {type(key).__name__}; allowed: text")
    return [name_of(key) for key in task_keys]


def _violation(what: str) -> Exception:
    from starlette.exceptions import WebSocketException

    LOG.warning("subscription of a task worker refused: %s", what)
    return WebSocketException(_VIOLATION, f"Protocol violation: {what}")
