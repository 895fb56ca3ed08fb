"""Running handlers: at most ``concurrency`` tasks at once, each to exactly one outcome."""

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
from taskqueue_worker.handlers import BatchHandler, Handler, Handlers
from taskqueue_worker.outcomes import (
    Fatal,
    HandlerCall,
    HandlerEnd,
    RunningTask,
    outcome_of_error,
    outcomes_of_error,
    outcomes_of_return,
)
from taskqueue_worker.threads import Threads, ThreadsafeInbox

_log = logging.getLogger("taskqueue.worker")


class OutcomeSettler(Protocol):
    """The receiver of outcomes."""

    @property
    def result_limit(self) -> int:
        """Maximum size of a result in bytes."""
        ...

    def settle(self, receipt: str, outcome: Outcome) -> None:
        """Report an outcome while the handler still occupies its slot."""
        ...

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """Report an outcome and free the slot."""
        ...

    def free(self) -> None:
        """Free a slot whose outcome was reported before, or never will be."""
        ...

    def progress(self, receipt: str, value: float | str) -> None:
        """Report progress."""
        ...


class HandlerRunner:
    """Runs the handlers of deliveries, in an event loop or in threads."""

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
        """Number of running tasks."""
        return len(self._running)

    def deliver(self, deliveries: Sequence[Delivery | WireDelivery]) -> None:
        """Run deliveries as soon as slots are free."""
        if self._has_batches:
            deliveries = self._buffer.add(deliveries)
        self._waiting.extend(deliveries)
        if self._stopping:
            self.return_waiting()
        else:
            self._start_waiting()

    def revoke(self, receipts: Sequence[str]) -> None:
        """Stop the handlers of these receipts: async ones are cancelled, results of others are discarded.

        Other tasks of the same batch continue.
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
        """Release the deliveries that have not been started."""
        waiting = [*self._waiting, *self._buffer.take_all()]
        self._waiting.clear()
        for delivery in waiting:
            self._settler.finish(delivery.receipt, HandBack())

    def stop(self) -> None:
        """Start no more tasks."""
        self._stopping = True
        self.return_waiting()

    async def idle(self) -> None:
        """Wait until nothing is running."""
        await self._idle.wait()

    async def release_running(self, cleanup_seconds: float) -> None:
        """Release all running tasks.

        A cancelled handler may clean up for ``cleanup_seconds`` before its task is released. A synchronous one cannot
        be cancelled: its task is released at once, and its result will be discarded.
        """
        self.stop()
        cancelled: set[asyncio.Task[None]] = set()
        for job in tuple(self._running.values()):
            job.call.releasing = True
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
        """End the threads."""
        self._threads.close()

    def _drop_waiting(self, receipt: str) -> None:
        remaining = [delivery for delivery in self._waiting if delivery.receipt != receipt]
        for _ in range(len(self._waiting) - len(remaining) + self._buffer.forget(receipt)):
            self._settler.free()
        self._waiting = deque(remaining)

    def _start_waiting(self) -> None:
        if self._has_batches:
            # Batches and single tasks alternate in being first, so that neither starves the other.
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
        except Exception as error:  # noqa: BLE001 - a validator of the handler may raise anything
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
            # Without a request to cancel, the handler raised it itself: an ordinary failure.
            task = asyncio.current_task()
            ours = call.releasing or (task is not None and task.cancelling() > 0)
            self._finish_call(
                call, [HandBack() if ours else outcome_of_error(error)] * len(call.jobs)
            )
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has an outcome
            self._finish_call(call, outcomes_of_error(call, error))
        else:
            self._finish_call(call, outcomes_of_return(call, value, self._settler.result_limit))

    def _run_sync(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        end: HandlerEnd
        try:
            with processing([job.delivery.task for job in call.jobs]):
                value = call.handler.function(**arguments)
            end = outcomes_of_return(call, value, self._settler.result_limit)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has an outcome
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
        """Settle a task whose handler is still running."""
        if not job.settled:
            job.settled = True
            self._on_outcome(outcome)
            self._settler.settle(job.delivery.receipt, outcome)

    def _finish_call(self, call: HandlerCall, end: HandlerEnd) -> None:
        """Settle the tasks that are not settled yet, and free their slots."""
        if call.timer:
            call.timer.cancel()
        if isinstance(call.handler, BatchHandler):
            self._buffer.ended(call.handler)
        # leave no reference cycles
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
        # An operator's interrupt is not the task's fault. Anything else may be, so the receipt stays open and counts as
        # lost: if it were released, the task could end one worker after another without limit.
        for job in jobs:
            receipt = job.delivery.receipt
            self._running.pop(receipt, None)
            if isinstance(error, KeyboardInterrupt) and not job.settled:
                job.settled = True
                self._settler.settle(receipt, HandBack())
            self._settler.free()
        self._on_fatal(error)
