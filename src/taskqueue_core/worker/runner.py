"""Runs handlers: never more than the concurrency at once, each to exactly one verdict."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from taskqueue_core.protocol.frames import WireDelivery
from taskqueue_core.retry import Failed, HandBack, Outcome, Rejected
from taskqueue_core.worker.arguments import InvalidPayload
from taskqueue_core.worker.context import Context
from taskqueue_core.worker.mailbox import Mailbox
from taskqueue_core.worker.outcomes import INVALID_PAYLOAD, of_error, of_value
from taskqueue_core.worker.registry import Handler, Registry
from taskqueue_core.worker.threads import Threads

__all__ = ["Runner", "Settler"]

_OWN_FRAMES = 1
_log = logging.getLogger("taskqueue.worker")


class Settler(Protocol):
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


class _Fatal(msgspec.Struct, frozen=True):
    """A handler raised what is meant to end the process."""

    error: BaseException


class _Job:
    __slots__ = ("context", "delivery", "handler", "leaving", "settled", "task", "timer")

    def __init__(self, delivery: WireDelivery, handler: Handler, context: Context) -> None:
        self.delivery = delivery
        self.handler = handler
        self.context = context
        self.settled = False
        self.leaving = False
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class Runner:
    """Takes deliveries in one event loop, and runs them there or in threads."""

    def __init__(
        self,
        registry: Registry,
        settler: Settler,
        concurrency: int,
        *,
        judged: Callable[[Outcome], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """``judged`` hears each handler's verdict before its report, ``fatal`` a `BaseException` that one raised."""
        self._registry = registry
        self._settler = settler
        self._concurrency = concurrency
        self._judged = judged
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._threads = Threads(concurrency)
        self._ended: Mailbox[tuple[_Job, Outcome | _Fatal]] = Mailbox(
            self._loop, self._threads_ended
        )
        self._waiting: deque[WireDelivery] = deque()
        self._jobs: dict[str, _Job] = {}
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """How many handlers are running."""
        return len(self._jobs)

    def deliver(self, deliveries: Sequence[WireDelivery]) -> None:
        """Run these as soon as there is room."""
        self._waiting.extend(deliveries)
        if self._stopping:
            self.return_waiting()
        else:
            self._fill()

    def revoke(self, receipts: Sequence[str]) -> None:
        """Stop working on these: async handlers are cancelled, results of others will be discarded."""
        for receipt in receipts:
            job = self._jobs.get(receipt)
            if job is None:
                self._forget(receipt)
                continue
            job.settled = True
            job.context.revoke()
            if job.task:
                job.task.cancel()

    def return_waiting(self) -> None:
        """Hand back what has not been started."""
        while self._waiting:
            self._settler.finish(self._waiting.popleft().receipt, HandBack())

    def stop(self) -> None:
        """Start nothing any more."""
        self._stopping = True
        self.return_waiting()

    async def idle(self) -> None:
        """Wait until nothing is running."""
        await self._idle.wait()

    async def hand_back(self, patience: float) -> None:
        """End everything that runs.

        A cancelled handler may clean up for ``patience`` seconds before its task goes back. A synchronous one cannot be
        ended: its task goes back at once and its result will be discarded.
        """
        self.stop()
        for job in tuple(self._jobs.values()):
            job.leaving = True
            job.context.revoke()
            if job.task:
                job.task.cancel()
            else:
                self._verdict(job, HandBack())
        cancelled = [job.task for job in self._jobs.values() if job.task]
        if cancelled:
            await asyncio.wait(cancelled, timeout=patience)
        for job in tuple(self._jobs.values()):
            self._verdict(job, HandBack())

    def close(self) -> None:
        """Let the threads end."""
        self._threads.close()

    def _forget(self, receipt: str) -> None:
        left = [delivery for delivery in self._waiting if delivery.receipt != receipt]
        for _ in range(len(self._waiting) - len(left)):
            self._settler.free()
        self._waiting = deque(left)

    def _fill(self) -> None:
        while self._waiting and len(self._jobs) < self._concurrency and not self._stopping:
            self._start(self._waiting.popleft())

    def _start(self, delivery: WireDelivery) -> None:
        receipt, task = delivery.receipt, delivery.task
        handler = self._registry.find(task.key)
        if handler is None:
            _log.error("handed back task %s: this worker has no handler for its key", task.id)
            self._settler.finish(receipt, HandBack())
            return
        context = Context(delivery, self._settler.progress)
        try:
            arguments = handler.arguments.read(bytes(task.payload), context)
        except InvalidPayload as error:
            _log.warning("task %s of %s has an invalid payload: dead letter", task.id, task.key)
            self._settler.finish(receipt, Rejected(INVALID_PAYLOAD, str(error)))
            return
        job = self._jobs[receipt] = _Job(delivery, handler, context)
        self._idle.clear()
        if handler.timeout is not None:
            job.timer = self._loop.call_later(handler.timeout, self._time_out, job)
        if handler.is_async:
            job.task = self._loop.create_task(self._run_async(job, arguments))
        else:
            self._threads.submit(lambda: self._run_sync(job, arguments))

    async def _run_async(self, job: _Job, arguments: dict[str, Any]) -> None:
        try:
            value = await job.handler.function(**arguments)
        except asyncio.CancelledError as error:
            # Without a request to cancel, the handler raised it by itself: a failure like any other.
            task = asyncio.current_task()
            ours = job.leaving or (task is not None and task.cancelling() > 0)
            self._end(job, HandBack() if ours else of_error(error))
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has a verdict
            self._end(job, self._raised(job, error))
        else:
            self._end(job, of_value(value, self._settler.result_limit))

    def _run_sync(self, job: _Job, arguments: dict[str, Any]) -> None:
        outcome: Outcome | _Fatal
        try:
            outcome = of_value(job.handler.function(**arguments), self._settler.result_limit)
        except BaseException as error:  # noqa: BLE001 - whatever a handler raises has a verdict
            outcome = self._raised(job, error)
        self._ended.put((job, outcome))

    def _raised(self, job: _Job, error: BaseException) -> Outcome | _Fatal:
        if not isinstance(error, Exception):
            return _Fatal(error)
        outcome = of_error(error)
        if isinstance(outcome, Failed) and not job.settled:
            # Not the message: it may quote the payload. The server gets it with the retry.
            task = job.delivery.task
            where = "".join(traceback.format_tb(error.__traceback__)[_OWN_FRAMES:])
            name = type(error).__name__
            _log.warning(
                "task %s of %s failed (attempt %d): %s\n%s",
                task.id,
                task.key,
                job.delivery.attempt,
                name,
                where,
            )
        return outcome

    def _threads_ended(self, ends: list[tuple[_Job, Outcome | _Fatal]]) -> None:
        for job, outcome in ends:
            self._end(job, outcome)

    def _time_out(self, job: _Job) -> None:
        if job.settled:
            return
        job.context.revoke()
        self._verdict(job, Failed(f"timeout after {job.handler.timeout:g} s"))
        if job.task:
            job.task.cancel()

    def _verdict(self, job: _Job, outcome: Outcome) -> None:
        """Settle, while the handler is still there."""
        if not job.settled:
            job.settled = True
            self._judged(outcome)
            self._settler.settle(job.delivery.receipt, outcome)

    def _end(self, job: _Job, outcome: Outcome | _Fatal) -> None:
        """Settle, unless that was done before, and free the slot."""
        receipt = job.delivery.receipt
        self._jobs.pop(receipt, None)
        if job.timer:
            job.timer.cancel()
        if isinstance(outcome, _Fatal):
            self._end_fatally(job, outcome.error)
        elif job.settled:
            self._settler.free()
        else:
            job.settled = True
            self._judged(outcome)
            self._settler.finish(receipt, outcome)
        self._fill()
        if not self._jobs:
            self._idle.set()

    def _end_fatally(self, job: _Job, error: BaseException) -> None:
        # The operator's interrupt is not the task's fault. Anything else may well be, so the receipt is left open and
        # counts as lost: handed back, the same task would end one worker after the other for ever.
        if isinstance(error, KeyboardInterrupt) and not job.settled:
            job.settled = True
            self._settler.settle(job.delivery.receipt, HandBack())
        self._settler.free()
        self._fatal(error)
