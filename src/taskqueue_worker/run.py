"""One run of a worker, from connecting to the confirmation of the last outcome."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from taskqueue_core.concurrency import first_completed
from taskqueue_core.retry import Failed, Outcome, Success
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.closing import CLEANUP_SECONDS
from taskqueue_worker.handlers import Handlers
from taskqueue_worker.outcome_settler import OutcomeSettler
from taskqueue_worker.quarantine import Quarantine, QuarantinePhase, WorkerQuarantined
from taskqueue_worker.runner import HandlerRunner
from taskqueue_worker.task_log import TaskLog
from taskqueue_worker.worker_scope import WorkerScope

_CONFIRM_SECONDS = 5.0
"""seconds that the server or the store has for confirming the last outcomes"""
_log = logging.getLogger("taskqueue.worker")


class TaskSource(OutcomeSettler, Protocol):
    """A worker's connection to a server or a backend: receives deliveries, and reports the outcomes of their tasks.

    A source can be started only once.
    """

    @property
    def ended(self) -> Future[None]:
        """A future that completes when the source has ended, with an exception if it failed. Exists after `start`."""

    def start(self) -> None:
        """Start to connect and receive."""

    def resize(self, capacity: int) -> None:
        """Set the maximum number of deliveries to hold. Deliveries that were already received are kept."""

    def leave(self, seconds: float) -> None:
        """End when all outcomes are confirmed, but after ``seconds`` at the latest.

        Deliveries that still have no outcome then count as lost.
        """


class WorkerRun:
    """One run of a worker: its task source, its runner and its quarantine, in the running event loop."""

    def __init__(
        self,
        handlers: Handlers,
        scope: WorkerScope,
        quarantine: Quarantine,
        *,
        concurrency: int,
        capacity: int,
        grace: float,
        task_log: TaskLog,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """Create a run that holds up to ``capacity`` deliveries, or fewer in quarantine.

        ``on_ready`` is called once, when the source is connected for the first time.
        """
        self._handlers = handlers
        self.scope = scope
        self._quarantine = quarantine
        self._concurrency = concurrency
        self._capacity = capacity
        self._grace = grace
        self._task_log = task_log
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._error: BaseException | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.starting = asyncio.timeout(None)
        """the time limit of the start, which `stop` ends"""
        self.stopping = False
        """whether the run is stopping, because `stop` was called or an error occurred"""
        self.outcomes = defaultdict[str, Counter[type[Outcome]]](Counter)
        """number of attempts by key and kind of outcome"""
        self._on_ready = on_ready
        self.reconnected = asyncio.Event()
        """set when the server or the store is available again after a loss of the connection"""
        self._was_connected = False
        self.connected = False
        """whether the server has welcomed this worker, or the store has answered, and neither has failed since"""

    def set_connected(self, connected: bool) -> None:  # noqa: FBT001 - the only argument
        """Set `connected`; the first time, report that the worker is ready. Thread-safe."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so the run has ended
            self._loop.call_soon_threadsafe(self._set_connected, connected)

    def _set_connected(self, connected: bool) -> None:  # noqa: FBT001 - the only argument
        if connected and not self.connected and self._was_connected:
            self.reconnected.set()
        self._was_connected = self._was_connected or connected
        self.connected = connected
        if connected and self._on_ready is not None:
            report, self._on_ready = self._on_ready, None
            report()

    def stop(self, *, now: bool) -> None:
        """Stop when the running tasks have ended, or after the grace period; at once with ``now``. Thread-safe."""
        self.stopping = True
        with contextlib.suppress(RuntimeError):  # the event loop is closed, so the run has ended
            self._loop.call_soon_threadsafe(lambda: self._stop_in_loop(now=now))

    def _stop_in_loop(self, *, now: bool) -> None:
        self.stopping = True
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the start has ended
            self.starting.reschedule(self._loop.time())
        if now:
            self._stop_now.set()
            self.scope.closing.hurry()

    async def work(self, connect: Callable[[WorkerRun], TaskSource]) -> None:
        """Run tasks until the run is stopped. If an error stopped the run, raise that error."""
        self._source = connect(self)
        self.runner = HandlerRunner(
            self._handlers,
            self.scope,
            self._source,
            self._concurrency,
            self._task_log,
            on_outcome=self._on_outcome,
            on_fatal=self._on_fatal,
        )
        self._source.start()
        ended = asyncio.wrap_future(self._source.ended)
        ended.add_done_callback(self._on_source_ended)
        try:
            await self._stop.wait()
            self._source.resize(0)
            self.runner.stop()
            await self._wait_until_idle()
        finally:
            # Even if this call was cancelled, release the unfinished tasks, and wait until the outcomes are confirmed.
            if self._timer:
                self._timer.cancel()
            try:
                await self.runner.release_running(CLEANUP_SECONDS)
            finally:
                self.runner.close()
                self._source.leave(_CONFIRM_SECONDS)
                await asyncio.wait([ended])
        if self._error is not None:
            raise self._error

    async def _wait_until_idle(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                await first_completed(self.runner.idle(), self._stop_now.wait())

    def _on_source_ended(self, ended: asyncio.Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        if error is not None:
            self._error = self._error or error
            self._stop_in_loop(now=True)  # without the source, outcomes cannot be reported

    def _on_fatal(self, error: BaseException) -> None:
        _log.error("stopping: a handler raised %s", type(error).__name__)
        self._error = self._error or error
        self._stop_in_loop(now=False)

    def _on_outcome(self, outcome: Outcome, delivery: AnyDelivery) -> None:
        kind = type(outcome)
        self.outcomes[delivery.task.key][kind] += 1
        if kind is Success:
            changed = self._quarantine.succeeded()
        elif kind is Failed:
            changed = self._quarantine.failed()
        else:
            return
        if changed:
            self._apply_quarantine()

    def _apply_quarantine(self) -> None:
        quarantine = self._quarantine
        if self.stopping:
            return
        match quarantine.phase:
            case QuarantinePhase.WORKING:
                _log.info("quarantine ended: a task succeeded")
                self._source.resize(self._capacity)
            case QuarantinePhase.RESTING:
                _log.warning(
                    "quarantine: failed attempts in a row: %d; no new tasks for %.1f s",
                    quarantine.failures,
                    quarantine.rest,
                )
                self._source.resize(0)
                self.runner.return_waiting()
                self._timer = self._loop.call_later(quarantine.rest, self._end_rest)
            case QuarantinePhase.PROBING:
                self._source.resize(1)
                _log.info("quarantine: trying one task")
            case QuarantinePhase.ENDED:
                self._error = WorkerQuarantined(
                    f"the last {quarantine.failures} attempts failed on this worker, probes included: "
                    "see the log of the worker for the errors"
                )
                self._stop_in_loop(now=True)

    def _end_rest(self) -> None:
        if self._quarantine.tick():
            self._apply_quarantine()
        elif self._quarantine.phase is QuarantinePhase.RESTING:
            self._timer = self._loop.call_later(self._quarantine.rest, self._end_rest)
