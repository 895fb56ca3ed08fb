"""One run of a worker, from the first connection to the last confirmation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.retry import Failed, Outcome, Success
from taskqueue_core.tasks import Delivery
from taskqueue_worker.errors import WorkerQuarantined
from taskqueue_worker.handlers import Handlers
from taskqueue_worker.quarantine import Quarantine, QuarantinePhase
from taskqueue_worker.runner import HandlerRunner, OutcomeSettler

__all__ = ["TaskSource", "WorkerRun"]

_CLEANUP_SECONDS = 1.0
"""for cancelled handlers, before their tasks are handed back"""
_CONFIRM_SECONDS = 5.0
"""for the server to confirm the last outcomes"""
_log = logging.getLogger("taskqueue.worker")


class TaskSource(OutcomeSettler, Protocol):
    """Where work comes from and verdicts go: a link to a server, or a store's subscription. Runs once."""

    @property
    def ended(self) -> Future[None]:
        """Done when it has ended, with the error that ended it."""
        ...

    def start(self) -> None:
        """Start to fetch work."""
        ...

    def resize(self, capacity: int) -> None:
        """Hold so many deliveries at the most, beginning with the next one."""
        ...

    def leave(self, seconds: float) -> None:
        """End as soon as every outcome is confirmed, after ``seconds`` at the latest.

        What has no outcome then counts as lost.
        """
        ...


class WorkerRun:
    """Connects the line, the runner and the quarantine, in the event loop where it is made."""

    def __init__(
        self,
        registry: Handlers,
        quarantine: Quarantine,
        concurrency: int,
        capacity: int,
        grace: float,
    ) -> None:
        """``capacity`` is how many deliveries to ask for while all is well."""
        self._registry = registry
        self._quarantine = quarantine
        self._concurrency = concurrency
        self._capacity = capacity
        self._grace = grace
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._now = asyncio.Event()
        self._error: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stopping = False

    @property
    def stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stopping

    def stop(self, *, now: bool) -> None:
        """End, soon or at once. May be called from any thread."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(lambda: self._stop_here(now=now))

    def _stop_here(self, *, now: bool) -> None:
        self._stopping = True
        self._stop.set()
        if now:
            self._now.set()

    async def work(self, connect: Callable[[WorkerRun], TaskSource]) -> None:
        """Serve until stopped. Raises what ended it, if it was not asked to."""
        self._link = connect(self)
        self._runner = HandlerRunner(
            self._registry,
            self._link,
            self._concurrency,
            on_outcome=self._on_outcome,
            on_fatal=self._fail,
        )
        ended = asyncio.wrap_future(self._link.ended)
        ended.add_done_callback(self._link_ended)
        self._link.start()
        try:
            await self._stop.wait()
            self._link.resize(0)
            self._runner.stop()
            await self._idle_or_now()
        finally:
            # Cancelled or not: what was taken goes back, and what was done is confirmed.
            if self._timer:
                self._timer.cancel()
            try:
                await self._runner.hand_back(_CLEANUP_SECONDS)
            finally:
                self._runner.close()
                self._link.leave(_CONFIRM_SECONDS)
                await asyncio.wait([ended])
        if self._error is not None:
            raise self._error

    async def _idle_or_now(self) -> None:
        waits = [asyncio.create_task(wait) for wait in (self._runner.idle(), self._now.wait())]
        try:
            await asyncio.wait(waits, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    # For the line, in the event loop.

    def deliver(self, deliveries: Sequence[Delivery | WireDelivery]) -> None:
        """Run these as soon as there is room."""
        self._runner.deliver(deliveries)

    def revoke(self, receipts: Sequence[str]) -> None:
        """Stop working on these."""
        self._runner.revoke(receipts)

    def return_waiting(self) -> None:
        """Hand back what has not been started."""
        self._runner.return_waiting()

    def _link_ended(self, ended: asyncio.Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._error = self._error or error
            self._stop_here(now=True)  # nobody is left to settle with

    def _fail(self, error: BaseException) -> None:
        _log.error("stopping: a handler raised %s", type(error).__name__)
        self._error = self._error or error
        self._stop_here(now=False)

    # Quarantine

    def _on_outcome(self, outcome: Outcome) -> None:
        match outcome:
            case Success():
                changed = self._quarantine.succeeded()
            case Failed():
                changed = self._quarantine.failed()
            case _:
                return
        if changed:
            self._apply()

    def _apply(self) -> None:
        quarantine = self._quarantine
        if self._stopping:
            return
        match quarantine.phase:
            case QuarantinePhase.WORKING:
                _log.info("a task succeeded: the quarantine is over")
                self._link.resize(self._capacity)
            case QuarantinePhase.RESTING:
                _log.warning(
                    "%d attempts failed in a row: no more work for %.1f s",
                    quarantine.failures,
                    quarantine.rest,
                )
                self._link.resize(0)
                self._runner.return_waiting()
                self._timer = self._loop.call_later(quarantine.rest, self._probe)
            case QuarantinePhase.PROBING:
                self._link.resize(1)
                _log.info("trying one task")
            case QuarantinePhase.ENDED:
                self._error = WorkerQuarantined(
                    f"the last {quarantine.failures} attempts failed here, trials after a pause included; "
                    "the worker's own log says with what"
                )
                self._stop_here(now=True)

    def _probe(self) -> None:
        if self._quarantine.tick():
            self._apply()
        elif self._quarantine.phase is QuarantinePhase.RESTING:
            self._timer = self._loop.call_later(self._quarantine.rest, self._probe)
