"""Running handlers, with a limit on the number of concurrent tasks and at most one outcome for each task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from taskqueue_core.application.context import Context
from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected, Snoozed
from taskqueue_core.telemetry import processing
from taskqueue_worker.added_steps import end_adding, store_added, store_added_from_thread
from taskqueue_worker.batch_buffer import AnyDelivery, BatchBuffer
from taskqueue_worker.child_processes import ChildProcesses
from taskqueue_worker.handlers import Handler, Handlers
from taskqueue_worker.invocation import invoke, is_plain
from taskqueue_worker.outcome_settler import OutcomeSettler
from taskqueue_worker.outcomes import (
    HandlerCall,
    HandlerEnd,
    RunningTask,
    outcome_of_error,
    outcomes_of_error,
    outcomes_of_return,
)
from taskqueue_worker.slots import SlotLoan, Slots
from taskqueue_worker.task_log import TaskLog
from taskqueue_worker.threads import Threads, ThreadsafeInbox
from taskqueue_worker.unknown_tasks import UnknownTasks
from taskqueue_worker.worker_scope import WorkerScope


class HandlerRunner:
    """The part of a worker that calls handlers: coroutines in the event loop, other functions in threads."""

    def __init__(
        self,
        handlers: Handlers,
        scope: WorkerScope,
        settler: OutcomeSettler,
        concurrency: int,
        task_log: TaskLog,
        *,
        on_outcome: Callable[[Outcome, AnyDelivery], None],
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """Create an idle runner.

        ``on_outcome`` is called with the outcome of each attempt before the outcome is reported. ``on_fatal`` is called
        when a handler raises an exception that ends the process, such as `SystemExit`.
        """
        self._handlers = handlers
        self._scope = scope
        self._settler = settler
        self._concurrency = concurrency
        self._task_log = task_log
        self._on_outcome = on_outcome
        self._on_fatal = on_fatal
        self._loop = asyncio.get_running_loop()
        self._context = scope.context  # each call has a copy
        self._running: dict[str, RunningTask] = {}
        self._slots = Slots(concurrency, scope, self._running, self._on_lent)
        self._wrapped = frozenset(each for each in handlers.all if not is_plain(each))
        self._in_process = frozenset(
            each
            for each in handlers.all
            if scope.children is not None and each.options.run == "process"
        )
        self._threads = Threads(concurrency)
        self._thread_results = ThreadsafeInbox[tuple[HandlerCall, HandlerEnd]](
            self._loop, self._on_threads_ended
        )
        self._unknown = UnknownTasks()
        self._waiting: deque[AnyDelivery] = deque()
        self._has_batches = bool(handlers.batches)
        self._buffer = BatchBuffer(handlers.batches, concurrency)
        self._batches_first = False
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    def deliver(self, deliveries: Sequence[AnyDelivery]) -> None:
        """Call the handlers of deliveries as soon as slots are free."""
        if self._has_batches:
            deliveries = self._buffer.add(deliveries)
        self._waiting.extend(deliveries)
        if self._stopping:
            self.return_waiting()
        else:
            self._start_waiting()

    def revoke(self, receipts: Sequence[str]) -> None:
        """Stop the tasks with these receipts, because their deliveries no longer belong to this worker.

        Async handlers are cancelled. Synchronous handlers run to their end, but their results are discarded. A batch
        handler is cancelled only when all its tasks are revoked.
        """
        for receipt in receipts:
            job = self._running.get(receipt)
            if job is None:
                self._drop_waiting(receipt)
                continue
            job.settled = True
            job.context.revoke()
            job.call.cancel_if_settled()

    @property
    def running(self) -> int:
        """The number of tasks that are running."""
        return len(self._running)

    def return_waiting(self) -> None:
        """Release the deliveries that have not been started."""
        waiting = [*self._waiting, *self._buffer.take_all()]
        self._waiting.clear()
        for delivery in waiting:
            self._settler.finish(delivery.receipt, HandBack())

    def stop(self) -> None:
        """Start no more tasks, and release the deliveries that have not been started."""
        self._stopping = True
        self.return_waiting()

    async def idle(self) -> None:
        """Wait until no task is running."""
        await self._idle.wait()

    async def release_running(self, cleanup_seconds: float) -> None:
        """Release all running tasks.

        Async handlers are cancelled, once, and get ``cleanup_seconds`` to clean up before their tasks are released. The
        tasks of synchronous handlers, which cannot be cancelled, are released at once, and their results are discarded.
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
        for task in (each for each in cancelled if not each.cancelling()):
            task.cancel()
        if cancelled:
            await asyncio.wait(cancelled, timeout=cleanup_seconds)
        for job in tuple(self._running.values()):
            self._settle_early(job, HandBack())

    def close(self) -> None:
        """Let the threads end after all calls submitted so far, without waiting for them."""
        self._threads.close()

    def _drop_waiting(self, receipt: str) -> None:
        remaining = [delivery for delivery in self._waiting if delivery.receipt != receipt]
        for _ in range(len(self._waiting) - len(remaining) + self._buffer.forget(receipt)):
            self._settler.free()
        self._waiting = deque(remaining)

    def _start_waiting(self) -> None:
        if self._has_batches:
            # Alternate which kind of task starts first, so that neither batches nor single tasks starve.
            self._batches_first = not self._batches_first
            if self._batches_first:
                self._start_waiting_batches()
        while self._waiting and self._slots.free and not self._stopping:
            delivery = self._waiting.popleft()
            if handler := self._handlers.of(delivery.task):
                self._start(handler, [delivery])
            else:
                outcome = self._unknown.without_handler(delivery)
                if isinstance(outcome, Rejected):
                    self._task_log.ended(delivery, outcome)
                self._on_outcome(outcome, delivery)
                self._settler.finish(delivery.receipt, outcome)
        if self._has_batches and not self._batches_first:
            self._start_waiting_batches()

    def _start_waiting_batches(self) -> None:
        while not self._stopping:
            batch = self._buffer.take(self._slots.free)
            if batch is None:
                return
            self._start(*batch)

    def _start(self, handler: Handler, deliveries: Sequence[AnyDelivery]) -> None:
        call = HandlerCall(handler, self._slots)
        values: list[Any] = []
        state = self._scope.state_of(handler.registry)
        for delivery in deliveries:
            try:
                values.append(handler.read(delivery.task, delivery.inputs))
            except Exception as error:  # noqa: BLE001 - a validator may raise any exception
                outcome = self._unknown.unread(delivery, handler, error)
                if not isinstance(outcome, Snoozed):
                    self._log_unread(delivery, outcome, error)
                self._on_outcome(outcome, delivery)
                self._settler.finish(delivery.receipt, outcome)
                continue
            if (timeout := delivery.timeout) is not None:
                call.timeout = timeout if call.timeout is None else min(timeout, call.timeout)
            settler = self._settler
            context = Context(delivery, settler.progress, state, settler, handler.encoding)
            job = RunningTask(delivery, context, call)
            self._running[delivery.receipt] = job
            call.jobs.append(job)
        if call.jobs:
            if handler.options.batch:
                self._buffer.started(handler)
            self._call(call, handler.arguments.of(values, [job.context for job in call.jobs]))

    def _log_unread(self, delivery: AnyDelivery, outcome: Outcome, error: Exception) -> None:
        if isinstance(outcome, Failed):
            self._context.copy().run(
                self._task_log.failed_alone, [delivery], error, outcome.traceback
            )
        else:
            self._task_log.ended(delivery, outcome)

    def _call(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        self._idle.clear()
        handler = call.handler
        in_process = handler in self._in_process
        if not in_process and (call.timeout is not None or self._handlers.timeouts):
            self._start_timer(call)
        if handler.is_async or in_process or handler in self._wrapped:
            run = self._run_async(call, arguments)
            call.task = self._loop.create_task(run, context=self._context.copy())
        else:
            context = self._context.copy()
            self._threads.submit(lambda: context.run(self._run_sync, call, arguments))

    def _start_timer(self, call: HandlerCall) -> None:
        timeout = call.timeout
        if timeout is None:
            timeout = self._handlers.timeouts.get(call.handler.queue)
        if timeout is not None:
            call.timer = self._loop.call_later(timeout, self._time_out, call, timeout)

    async def _run_async(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        HANDLER_SCOPE.set(call)
        self._task_log.enter(call.jobs[0].delivery, len(call.jobs))
        children = self._scope.children if call.handler in self._in_process else None
        try:
            with processing([job.delivery.task for job in call.jobs]):
                if children is not None:
                    value = await self._run_in_process(call, children)
                elif call.handler not in self._wrapped:
                    value = await call.handler.function(**arguments)
                else:
                    value = await invoke(call, arguments, self._threads)
            end = [value] if children is not None else self._end_of(call, value)
            if flows := end_adding(call):
                end = await store_added(call, end, flows, self._task_log)
        except asyncio.CancelledError as error:
            # If this worker did not cancel the handler, the handler itself raised the error, so the attempt failed.
            task = asyncio.current_task()
            ours = call.releasing or (task is not None and task.cancelling() > 0)
            outcome = HandBack() if ours else outcome_of_error(error, call.handler.encoding)
            live = [job.delivery for job in call.jobs if not job.settled]
            if live and isinstance(outcome, Failed):
                self._task_log.failed(live, error, outcome.traceback)
            self._finish_call(call, [outcome] * len(call.jobs))
        except BaseException as error:  # noqa: BLE001 - a handler may raise any exception
            self._finish_call(call, self._end_of(call, None, error))
        else:
            self._finish_call(call, end)

    async def _run_in_process(self, call: HandlerCall, children: ChildProcesses) -> Outcome:
        (job,) = call.jobs
        return await children.run(
            job.delivery,
            settler=self._settler,
            on_start=lambda: self._start_timer(call),
        )

    def _run_sync(self, call: HandlerCall, arguments: dict[str, Any]) -> None:
        end: HandlerEnd
        HANDLER_SCOPE.set(call)
        self._task_log.enter(call.jobs[0].delivery, len(call.jobs))
        try:
            with processing([job.delivery.task for job in call.jobs]):
                value = call.handler.function(**arguments)
        except BaseException as error:  # noqa: BLE001 - a handler may raise any exception
            end = self._end_of(call, None, error)
        else:
            end = self._end_of(call, value)
            if flows := end_adding(call):
                end = store_added_from_thread(call, end, flows, self._task_log)
        self._thread_results.put((call, end))

    def _end_of(
        self,
        call: HandlerCall,
        value: object,
        error: BaseException | None = None,
        failed: Failed | None = None,
    ) -> HandlerEnd:
        """Return how a call ended that returned ``value`` or raised ``error``, which without rules means ``failed``.

        If code of the application that decides it raises an exception, the attempt failed.
        """
        try:
            if error is not None:
                return outcomes_of_error(call, error, self._task_log, failed)
            return outcomes_of_return(call, value, self._settler.result_limit, self._task_log)
        except (SystemExit, KeyboardInterrupt) as fatal:
            return fatal
        except BaseException as wrong:  # noqa: BLE001 - an error rule may raise any exception, and the call must end
            return [outcome_of_error(wrong, call.handler.encoding)] * len(call.jobs)

    def _on_threads_ended(self, ends: list[tuple[HandlerCall, HandlerEnd]]) -> None:
        for call, end in ends:
            self._finish_call(call, end)

    def _on_lent(self, loan: SlotLoan) -> None:
        self._settler.lend(self._slots.lent)
        if loan.handler.options.batch and not loan.ended:
            # A batch that waits must not keep another one from starting, for which it may wait.
            (self._buffer.ended if loan.lent else self._buffer.started)(loan.handler)
        self._start_waiting()

    def _time_out(self, call: HandlerCall, timeout: float) -> None:
        failed = Failed(f"timeout after {timeout:g} s")
        ends = self._context.copy().run(self._timed_out, call, failed)
        if isinstance(ends, BaseException):  # raised by an error rule
            self._on_fatal(ends)
            ends = [failed] * len(call.jobs)
        for job, outcome in zip(call.jobs, ends, strict=True):
            job.context.revoke()
            self._settle_early(job, outcome)
        call.cancel_if_settled()

    def _timed_out(self, call: HandlerCall, failed: Failed) -> HandlerEnd:
        self._task_log.enter(call.jobs[0].delivery, len(call.jobs))
        return self._end_of(call, None, TimeoutError(failed.error), failed)

    def _settle_early(self, job: RunningTask, outcome: Outcome) -> None:
        """Report the outcome of a task whose handler is still running, unless an outcome was reported before."""
        if not job.settled:
            job.settled = True
            self._on_outcome(outcome, job.delivery)
            self._settler.settle(job.delivery.receipt, outcome)

    def _finish_call(self, call: HandlerCall, end: HandlerEnd) -> None:
        """Report the outcomes of a call that ended, except for tasks that are already settled, and free the slots."""
        if call.timer:
            call.timer.cancel()
        if call.adds:
            end_adding(call)
        loan = call.loan
        if call.handler.options.batch and not (loan and loan.lent):
            self._buffer.ended(call.handler)
        # The call and its tasks refer to one another. Break the cycle, so that no garbage collection is needed.
        jobs, call.jobs, call.task, call.loan = call.jobs, [], None, None
        if isinstance(end, BaseException):
            self._finish_fatal(jobs, end)
        else:
            for job, outcome in zip(jobs, end, strict=True):
                receipt = job.delivery.receipt
                self._running.pop(receipt, None)
                if job.settled:
                    self._settler.free()
                else:
                    job.settled = True
                    self._on_outcome(outcome, job.delivery)
                    self._settler.finish(receipt, outcome)
        if loan is not None or self._slots.turns:
            self._slots.ended(loan)
        if self._waiting or self._has_batches:
            self._start_waiting()
        if not self._running:
            self._idle.set()

    def _finish_fatal(self, jobs: Sequence[RunningTask], error: BaseException) -> None:
        # A keyboard interrupt comes from the operator, so the task is released. Any other fatal exception may be caused
        # by the task itself, which counts as lost: losses are limited, so it cannot end one worker after another.
        for job in jobs:
            receipt = job.delivery.receipt
            self._running.pop(receipt, None)
            if isinstance(error, KeyboardInterrupt) and not job.settled:
                job.settled = True
                self._settler.settle(receipt, HandBack())
            self._settler.free()
        self._on_fatal(error)
