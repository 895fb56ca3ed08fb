"""The task source of a local worker, which uses a backend's subscription in the worker's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import (
    Control,
    NewEvent,
    control_of,
    has,
    revocation_of,
    streams_of,
)
from taskqueue_core.consumer.event_queue import EventQueue
from taskqueue_core.consumer.maintenance import run_maintenance
from taskqueue_core.consumer.outage import OUTAGE_ERRORS, OutageRetry, close, release_as_lost
from taskqueue_core.consumer.settlement_queue import SettlementQueue
from taskqueue_core.limits import LIMITS
from taskqueue_core.protocol.outgoing_events import MOST_EVENTS
from taskqueue_core.retry import HandBack, Outcome
from taskqueue_core.tasks import Delivery
from taskqueue_worker.prefetch import Prefetcher, Receiver
from taskqueue_worker.run import WorkerRun
from taskqueue_worker.threads import ThreadsafeInbox

_log = logging.getLogger("taskqueue.worker")


class LocalTaskSource:
    """A task source that receives from a backend, and also runs the store's maintenance. It cannot be started again.

    ``uniform`` returns a random number from 0 to 1, for the jitter of retries.
    """

    result_limit = LIMITS.result

    def __init__(
        self,
        backend: Backend,
        subscription: Subscription,
        run: WorkerRun,
        *,
        concurrency: int,
        capacity: int,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        self._backend = backend
        self._control = control_of(backend) if has(backend, Capability.CONTROL) else None
        self._subscription = subscription
        self._run = run
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._outage = OutageRetry(self._log_outage)
        self._held: dict[str, Delivery] = {}
        self._revoked_early: set[str] = set()
        self._settlements = SettlementQueue(
            backend, subscription, self._outage, self._on_settled, capacity, uniform=uniform
        )
        self._receiver = self._create_receiver(concurrency, capacity)
        self._leaving: asyncio.Future[float] = self._loop.create_future()
        self._progress: dict[str, float | str] = {}
        self._reported = asyncio.Event()
        self._inbox = ThreadsafeInbox[tuple[str, float | str]](self._loop, self._note_progress)
        self._events: EventQueue | None = None
        if has(backend, Capability.STREAMS):
            self._events = EventQueue(streams_of(backend), self._outage, on_stale=self._drop_stale)
        self._streamed = ThreadsafeInbox[tuple[str, NewEvent | Callable[[], None]]](
            self._loop, self._note_events
        )
        self._streams = False
        """whether a handler has streamed anything"""
        self._warned = False

    def _create_receiver(self, concurrency: int, capacity: int) -> Receiver:
        return Prefetcher(
            self._subscription,
            self._outage,
            concurrency,
            capacity,
            deliver=self._deliver,
            refuse=self._refuse,
            return_waiting=lambda: self._run.runner.return_waiting(),  # noqa: PLW0108 - the runner is created later
            wait_for_room=self._settlements.room,
            on_answer=lambda: self._run.set_connected(True),
        )

    def start(self) -> None:
        self.ended: Future[None] = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)

    def resize(self, capacity: int) -> None:
        self._receiver.resize(capacity)

    def leave(self, seconds: float) -> None:
        if not self._leaving.done():
            self._leaving.set_result(seconds)

    def settle(self, receipt: str, outcome: Outcome) -> None:
        if self._streams:
            self._streamed.flush()  # what the handler has streamed last
        delivery = self._held.pop(receipt, None)
        if delivery is None:
            return
        if self._events is None or not self._streams:
            self._settlements.put((delivery, outcome))
        else:
            self._events.end(receipt, partial(self._settlements.put, (delivery, outcome)))

    def finish(self, receipt: str, outcome: Outcome) -> None:
        self.settle(receipt, outcome)
        if type(outcome) is HandBack:
            self._receiver.returned()
        else:
            self._receiver.ended()

    def free(self) -> None:
        self._receiver.ended()

    def lend(self, count: int) -> None:
        self._receiver.lend(count)

    def progress(self, receipt: str, value: float | str) -> None:
        """Store progress, if the backend has the capability ``control``; otherwise ignore it."""
        if self._control is not None:
            self._inbox.put((receipt, value))

    def stream(self, receipt: str, event: NewEvent) -> None:
        """Append an event to the stream of the task, if the backend has the capability ``streams``."""
        self._streams = True
        self._streamed.put((receipt, event))
        if len(self._streamed) > MOST_EVENTS and threading.get_ident() == self._thread:
            self._streamed.flush()  # the handler does not let the event loop run

    def drained(self, receipt: str, callback: Callable[[], None]) -> None:
        self._streamed.put((receipt, callback))

    def _note_events(self, items: list[tuple[str, NewEvent | Callable[[], None]]]) -> None:
        if self._events is None and not self._warned:
            self._warned = True
            _log.warning("the store does not keep events: the backend lacks the capability streams")
        for receipt, item in items:
            delivery = self._held.get(receipt)
            if isinstance(item, NewEvent):
                if self._events is not None and delivery is not None:
                    self._events.put(delivery, item)
            elif self._events is None or delivery is None:
                item()
            else:
                self._events.after(receipt, item)

    @property
    def unsettled(self) -> int:
        """The number of outcomes that the store has not confirmed, with those that wait for events of their tasks."""
        held_back = 0 if self._events is None else self._events.awaited
        return self._settlements.unsettled + held_back

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._held.update({delivery.receipt: delivery for delivery in deliveries})
        self._run.runner.deliver(deliveries)
        if self._revoked_early:  # a revocation may arrive before its delivery
            revoked, self._revoked_early = self._revoked_early, set()
            self._revoke_deliveries([receipt for receipt in revoked if receipt in self._held])

    def _refuse(self, deliveries: Sequence[Delivery]) -> None:
        self._settlements.put(*((delivery, HandBack()) for delivery in deliveries))

    def _revoke_deliveries(self, receipts: Sequence[str]) -> None:
        for receipt in receipts:
            if self._held.pop(receipt, None) is None:
                self._revoked_early.add(receipt)
            if self._events is not None:
                self._events.forget(receipt)
        self._run.runner.revoke(receipts)

    async def _drop_stale(self, receipts: Sequence[str]) -> None:
        self._revoke_deliveries([receipt for receipt in receipts if receipt in self._held])

    async def _log_outage(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - `OutageRetry` passes ``ok`` by position
        self._run.set_connected(ok)
        if ok:
            _log.info("store available again")
        else:
            _log.warning("store unavailable: %s; retrying", reason)

    async def _on_settled(self, results: Mapping[str, bool]) -> None:
        if late := list(results.values()).count(False):
            _log.warning(
                "outcomes came too late, because this worker no longer held their tasks: %d", late
            )

    async def _watch_revocations(self) -> None:
        revocation = revocation_of(self._backend, self._subscription)
        while receipts := await self._outage.retry_until_available(revocation.revoked):
            self._revoke_deliveries(receipts)

    async def _maintain(self) -> None:
        await run_maintenance(self._backend)

    def _note_progress(self, reports: list[tuple[str, float | str]]) -> None:
        self._progress.update(reports)
        self._reported.set()

    async def _report_progress(self, control: Control) -> None:
        while True:
            await self._reported.wait()
            self._reported.clear()
            reports, self._progress = self._progress, {}
            for receipt, value in reports.items():
                delivery = self._held.get(receipt)
                # Ignore an outage: the next progress report replaces the lost report.
                with contextlib.suppress(*OUTAGE_ERRORS):
                    if delivery and not await control.progress(delivery, value):
                        self._revoke_deliveries([receipt])

    async def _serve(self) -> None:
        work: list[Coroutine[Any, Any, None]] = [self._receiver.run(), self._settlements.run()]
        if has(self._backend, Capability.REVOCATION):
            work.append(self._watch_revocations())
        if self._events is not None:
            work.append(self._events.run())
        if self._control is not None:
            work += [self._report_progress(self._control), self._maintain()]
        tasks = [self._loop.create_task(coroutine) for coroutine in work]
        try:
            waiting: set[asyncio.Future[Any]] = {*tasks, self._leaving}
            while not self._leaving.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            self._receiver.stop()
            await self._wait_for_confirmations(*tasks[:2], seconds=self._leaving.result())
            # Deliveries that still have no outcome belong to a handler that is ending this process. Release them as
            # lost: their tasks may end the next worker too, and the number of losses is limited.
            await release_as_lost(self._subscription, tuple(self._held.values()))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await close(self._subscription)

    async def _wait_for_confirmations(
        self, prefetcher: asyncio.Task[None], settling: asyncio.Task[None], *, seconds: float
    ) -> None:
        """Wait up to ``seconds`` until the last receive has ended and the store has confirmed all outcomes."""

        async def finish_all() -> None:
            await asyncio.wait([prefetcher])
            if self._events is not None:
                await self._events.finish()
            await self._settlements.finish()

        finishing = self._loop.create_task(finish_all())
        try:
            await asyncio.wait(
                [finishing, settling], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            finishing.cancel()
        if settling.done():
            settling.result()
        if self.unsettled:
            _log.warning("outcomes not confirmed in time: %d", self.unsettled)
