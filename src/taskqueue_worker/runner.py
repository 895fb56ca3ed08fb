"""Runs handlers: never more tasks than the concurrency at once, each to exactly one verdict."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from taskqueue_core.application.context import Context
from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.retry import Failed, HandBack, Outcome
from taskqueue_core.tasks import Delivery
from taskqueue_core.telemetry import processing
from taskqueue_worker.batch_buffer import BatchBuffer
from taskqueue_worker.handler_call import (
    Fatal,
    HandlerCall,
    HandlerEnd,
    RunningTask,
    outcomes_of_error,
    outcomes_of_return,
)
from taskqueue_worker.handlers import BatchHandler, Handler, Handlers
from taskqueue_worker.outcomes import outcome_of_error
from taskqueue_worker.threads import Threads, ThreadsafeInbox

_log = logging.getLogger("taskqueue.worker")


class OutcomeSettler(Protocol):
    """Where verdicts go."""

    @property
    def result_limit(self) -> int:
        """How many bytes a result may have."""
        ...

    def settle(self, receipt: str, outcome: Outcome) -> None:
        """Report a verdict while the handler still occupies its slot."""
        ...

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """Report a verdict and free the slot."""
        ...

    def free(self) -> None:
        """Free a slot whose verdict was reported before, or will never be."""
        ...

    def progress(self, receipt: str, value: float | str) -> None:
        """Report progress."""
        ...


class HandlerRunner:
    """Takes deliveries in one event loop, and runs them there or in threads."""

    def __init__(
        self,
        handlers: Handlers,
        settler: OutcomeSettler,
        concurrency: int,
        *,
        on_outcome: Callable[[Outcome], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Call ``on_outcome`` with each outcome before its report, ``on_fatal`` with a handler's `BaseException`."""
        self._handlers = handlers
        self._settler = settler
        self._concurrency = concurrency
        self._on_outcome = on_outcome
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(concurrency)
        self._thread_results: ThreadsafeInbox[tuple[HandlerCall, HandlerEnd]] = ThreadsafeInbox(
            self._loop, self._on_threads_ended
        )
        self._waiting: deque[Delivery | WireDelivery] = deque()
        self._has_batches = bool(handlers.batches)
        self._buffer = BatchBuffer(handlers.batches, concurrency)
        self._batches_first = False
        self._running: dict[str, RunningTask] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """How many tasks are running."""
        return len(self._running)

    def deliver(self, deliveries: Sequence[Delivery | WireDelivery]) -> None:
        """Run these as soon as there is room."""
        if self._has_batches:
            deliveries = self._buffer.add(deliveries)
        self._waiting.extend(deliveries)
        if self._stopping:
            self.return_waiting()
        else:
            self._start_waiting()

    def revoke(self, receipts: Sequence[str]) -> None:
        """Stop working on these: async handlers are cancelled, results of others will be discarded.

        The others of a batch go on.
        """
        for receipt in receipts:
            job = self._running.get(receipt)
            if job is None:
                self._drop_waiting(receipt)
                continue
            job.settled = True
            job.context.revoke()
            job.call.cancel_if_settled()

    def return_waiting(self) -> None:
        """Hand back what has not been started."""
        waiting = [*self._waiting, *self._buffer.take_all()]
        self._waiting.clear()
        for delivery in waiting:
            self._settler.finish(delivery.receipt, HandBack())

    def stop(self) -> None:
        """Start nothing any more."""
        self._stopping = True
        self.return_waiting()

    async def idle(self) -> None:
        """Wait until nothing is running."""
        await self._idle.wait()

    async def hand_back(self, cleanup_seconds: float) -> None:
        """End everything that runs.

        A cancelled handler may clean up for ``patience`` seconds before its task goes back. A synchronous one cannot be
        ended: its task goes back at once and its result will be discarded.
        """
        self.stop()
        cancelled: set[asyncio.Task[None]] = set()
        for job in tuple(self._running.values()):
            job.call.handing_back = True
            job.context.revoke()
            if job.call.task is None:
                self._settle_early(job, HandBack())
            else:
                cancelled.add(job.call.task)
        for task in cancelled:
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled, timeout=cleanup_seconds)
        for job in tuple(self._running.values()):
            self._settle_early(job, HandBack())

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    def _drop_waiting(self, receipt: str) -> None:
        remaining = [delivery for delivery in self._waiting if delivery.receipt != receipt]
        for _ in range(len(self._waiting) - len(remaining) + self._buffer.forget(receipt)):
            self._settler.free()
        self._waiting = deque(remaining)

    def _start_waiting(self) -> None:
        if self._has_batches:
            # They take turns at being first, so that neither kind starves beside the other.
            self._batches_first = not self._batches_first
            if self._batches_first:
                self._start_waiting_batches()
        while self._waiting and len(self._running) < self._concurrency and not self._stopping:
            self._start(self._waiting.popleft())
        if self._has_batches and not self._batches_first:
            self._start_waiting_batches()

    def _start_waiting_batches(self) -> None:
        while not self._stopping:
            batch = self._buffer.take(self._concurrency - len(self._running))
            if batch is None:
                return
            self._start_batch(*batch)

    def _start(self, delivery: Delivery | WireDelivery) -> None:
        receipt, task = delivery.receipt, delivery.task
        handler = self._handlers.by_key.get(task.key)
        if not isinstance(handler, Handler):
            _log.error("released task %s: this worker has no handler for its key", task.id)
            self._settler.finish(receipt, HandBack())
            return
        context = Context(delivery, self._settler.progress)
        try:
            arguments = handler.arguments.read(bytes(task.payload), context)
        except Exception as error:  # noqa: BLE001 - a check of the handler's own may raise whatever it likes
            self._reject_payload(delivery, error)
            return
        call = HandlerCall(handler)
        job = self._running[receipt] = RunningTask(delivery, context, call)
        call.jobs.append(job)
        self._call(call, arguments)

    def _start_batch(
        self, handler: BatchHandler, deliveries: Sequence[Delivery | WireDelivery]
    ) -> None:
        call = HandlerCall(handler)
        values: list[Any] = []
        for delivery in deliveries:
            try:
                values.append(handler.arguments.read(bytes(delivery.task.payload)))
            except Exception as error:  # noqa: BLE001 - as above
                self._reject_payload(delivery, error)
                continue
            job = RunningTask(delivery, Context(delivery, self._settler.progress), call)
            self._running[delivery.receipt] = job
            call.jobs.append(job)
        if call.jobs:
            self._buffer.started(handler)
            arguments = handler.arguments.of(values, [job.context for job in call.jobs])
            self._call(call, arguments)

    def _reject_payload(self, delivery: Delivery | WireDelivery, error: Exception) -> None:
        task, kind = delivery.task, type(error).__name__
        _log.warning("invalid payload of task %s of %s: %s", task.id, task.key, kind)
        outcome = outcome_of_error(error)
        self._on_outcome(outcome)
        self._settler.finish(delivery.receipt, outcome)

    def _call(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        self._idle.clear()
        handler = call.handler
        if handler.timeout is not None:
            call.timer = self._loop.call_later(handler.timeout, self._time_out, call)
        if handler.is_async:
            call.task = self._loop.create_task(self._run_async(call, arguments))
        else:
            self._threads.submit(lambda: self._run_sync(call, arguments))

    async def _run_async(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        try:
            with processing([job.delivery.task for job in call.jobs]):
                value = await call.handler.function(**arguments)
        except asyncio.CancelledError as error:
            # Without a request to cancel, the handler raised it by itself: a failure like any other.
            task = asyncio.current_task()
            ours = call.handing_back or (task is not None and task.cancelling() > 0)
            self._finish_call(
                call, [HandBack() if ours else outcome_of_error(error)] * len(call.jobs)
            )
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has a verdict
            self._finish_call(call, outcomes_of_error(call, error))
        else:
            self._finish_call(call, outcomes_of_return(call, value, self._settler.result_limit))

    def _run_sync(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        end: HandlerEnd
        try:
            with processing([job.delivery.task for job in call.jobs]):
                value = call.handler.function(**arguments)
            end = outcomes_of_return(call, value, self._settler.result_limit)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has a verdict
            end = outcomes_of_error(call, error)
        self._thread_results.put((call, end))

    def _on_threads_ended(self, ends: list[tuple[HandlerCall, HandlerEnd]]) -> None:
        for call, end in ends:
            self._finish_call(call, end)

    def _time_out(self, call: HandlerCall) -> None:
        for job in call.jobs:
            job.context.revoke()
            self._settle_early(job, Failed(f"timeout after {call.handler.timeout:g} s"))
        call.cancel_if_settled()

    def _settle_early(self, job: RunningTask, outcome: Outcome) -> None:
        """Settle, while the handler is still there."""
        if not job.settled:
            job.settled = True
            self._on_outcome(outcome)
            self._settler.settle(job.delivery.receipt, outcome)

    def _finish_call(self, call: HandlerCall, end: HandlerEnd) -> None:
        """Settle, unless that was done before, and free the slots."""
        if call.timer:
            call.timer.cancel()
        if isinstance(call.handler, BatchHandler):
            self._buffer.ended(call.handler)
        # no cycles are left to the garbage collector
        jobs, call.jobs, call.task = call.jobs, [], None
        if isinstance(end, Fatal):
            self._finish_fatal(jobs, end.error)
        else:
            for job, outcome in zip(jobs, end, strict=True):
                receipt = job.delivery.receipt
                self._running.pop(receipt, None)
                if job.settled:
                    self._settler.free()
                else:
                    job.settled = True
                    self._on_outcome(outcome)
                    self._settler.finish(receipt, outcome)
        if self._waiting or self._has_batches:
            self._start_waiting()
        if not self._running:
            self._idle.set()

    def _finish_fatal(self, jobs: Sequence[RunningTask], error: BaseException) -> None:
        # The operator's interrupt is not the task's fault. Anything else may well be, so the receipt is left open and
        # counts as lost: handed back, the same task would end one worker after the other for ever.
        for job in jobs:
            receipt = job.delivery.receipt
            self._running.pop(receipt, None)
            if isinstance(error, KeyboardInterrupt) and not job.settled:
                job.settled = True
                self._settler.settle(receipt, HandBack())
            self._settler.free()
        self._on_fatal(error)
