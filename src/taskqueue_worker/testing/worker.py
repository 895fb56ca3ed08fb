"""A local worker that runs until nothing is left to do, one call of a handler at a time."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from taskqueue_core.application.handler_scope import HANDLER_SCOPE
from taskqueue_core.application.registry import Tasks
from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import Control, control_of, dead_letters_of, dependencies_of
from taskqueue_core.consumer.carrier import carry
from taskqueue_core.consumer.expander import Expander
from taskqueue_core.consumer.outage import release_as_lost
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import Outcome
from taskqueue_core.task_ends import TaskEnds, has_ended
from taskqueue_core.tasks import Delivery, TaskStatus
from taskqueue_worker.base import WorkerLink
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.child_processes import ChildProcesses
from taskqueue_worker.handlers import Handlers
from taskqueue_worker.local_source import LocalTaskSource
from taskqueue_worker.local_worker import LocalWorker
from taskqueue_worker.prefetch import Receiver
from taskqueue_worker.quarantine import Quarantine
from taskqueue_worker.run import WorkerRun
from taskqueue_worker.task_log import TaskLog
from taskqueue_worker.testing.drain import Drain
from taskqueue_worker.testing.published import name_of


class DrainWorker(LocalWorker):
    """A local worker that stops by itself at the end of a drain. It has no quarantine."""

    def __init__(self, tasks: Tasks, backend: Backend, drain: Drain) -> None:
        """Create a worker for one drain."""
        self._drain = drain
        self._drain_source: DrainSource | None = None
        super().__init__(
            tasks,
            backend=backend,
            worker_id="test",
            concurrency=LIMITS.credit,
            prefetch=0,
            quarantine=lambda: Quarantine(limit=sys.maxsize),
        )

    async def crash(self) -> None:
        """End without reporting outcomes: the tasks that are running count as lost."""
        if self._drain_source is not None:
            await self._drain_source.crash()

    @asynccontextmanager
    async def _open_source(self, worker_id: str) -> AsyncIterator[WorkerLink]:
        async with super()._open_source(worker_id) as link:
            queue = link.queue()
            queue.ends = _Waits(control_of(queue.backend), self._drain)
            yield link

    def _open_children(
        self, worker_id: str, link: WorkerLink
    ) -> AbstractAsyncContextManager[ChildProcesses | None]:
        """Run tasks with ``run="process"`` in this process, where a test can replace what they use."""
        del worker_id, link
        return nullcontext()

    def _create_task_log(self, worker_id: str) -> TaskLog:
        return _DrainLog(worker_id, self._drain)

    def _create_source(
        self, backend: Backend, subscription: Subscription, run: WorkerRun
    ) -> LocalTaskSource:
        self._drain_source = DrainSource(backend, subscription, run, self._handlers, self._drain)
        return self._drain_source


class _DrainLog(TaskLog):
    def __init__(self, worker_id: str, drain: Drain) -> None:
        super().__init__(worker_id)
        self._drain = drain

    def failed(
        self, deliveries: Sequence[AnyDelivery], error: BaseException, traceback: str | None = None
    ) -> None:
        super().failed(deliveries, error, traceback)
        self._drain.note_error(deliveries, error)


class _Waits(TaskEnds):
    """Waits of handlers for the ends of other tasks, which run in the meantime."""

    def __init__(self, control: Control, drain: Drain) -> None:
        super().__init__(control)
        self._drain = drain

    async def wait(
        self, key: str, task_id: str, *, wait_for_redrive: bool = False
    ) -> TaskStatus | None:
        with self._drain.waiting() as wait:
            while True:
                wait.since = changed = self._drain.changed
                (status,) = await self._control.statuses(key, task_id)
                if has_ended(status, wait_for_redrive=wait_for_redrive):
                    return status
                await changed.wait()


class DrainSource(LocalTaskSource):
    """A task source that reports to a drain what it runs, and leaves maintenance to it."""

    def __init__(
        self,
        backend: Backend,
        subscription: Subscription,
        run: WorkerRun,
        handlers: Handlers,
        drain: Drain,
    ) -> None:
        """Create a source. Retries have no jitter, so that a test knows when they are due."""
        self._drain = drain
        self._handlers = handlers
        size = LIMITS.credit
        super().__init__(
            backend, subscription, run, concurrency=size, capacity=size, uniform=lambda: 0.5
        )

    async def crash(self) -> None:
        """Release all deliveries as lost, and stop their handlers, whose outcomes are ignored."""
        self._receiver.stop()
        held = tuple(self._held.values())
        self._held.clear()
        self._drain.note_lost(held)
        await release_as_lost(self._subscription, held)
        await self._drain.note_settled(
            dead_letters_of(self._backend), [each.receipt for each in held]
        )
        self._run.stop(now=True)
        self._run.runner.revoke([delivery.receipt for delivery in held])

    def settle(self, receipt: str, outcome: Outcome) -> None:
        delivery = self._held.get(receipt)
        super().settle(
            receipt, outcome if delivery is None else self._drain.note_end(delivery, outcome)
        )

    def _create_receiver(self, concurrency: int, capacity: int) -> Receiver:  # noqa: ARG002 - one call at a time
        self._drain_receiver = DrainReceiver(
            self._subscription,
            capacity,
            self._handlers,
            self._drain,
            deliver=self._deliver,
            refuse=self._refuse,
            is_settled=lambda: not self.unsettled,
            running=lambda: [name_of(delivery.task) for delivery in self._held.values()],
            on_end=lambda: self._run.stop(now=True),
            control=control_of(self._backend),
            prepare=self._prepare,
        )
        self._run.set_connected(connected=True)
        return self._drain_receiver

    async def _on_settled(self, results: Mapping[str, bool]) -> None:
        await super()._on_settled(results)
        await self._drain.note_settled(dead_letters_of(self._backend), results)
        self._drain.notify()

    async def _maintain(self) -> None:
        """Do nothing: the drain does what is needed, and maintains the store when it advances the clock."""

    async def _prepare(self) -> None:
        expander, dependencies = Expander(self._backend), dependencies_of(self._backend)
        carried = 1
        while carried:
            # Steps are published as if by a handler, so that they start no other drain.
            token = HANDLER_SCOPE.set(self._run.scope)
            try:
                await expander.drain()
            finally:
                HANDLER_SCOPE.reset(token)
            carried, _ = await carry(dependencies)


class DrainReceiver:
    """A receiver that passes on one task, or one batch, at a time, until the end of its drain.

    While a handler waits for the end of another task, the next call may start.
    """

    def __init__(
        self,
        subscription: Subscription,
        capacity: int,
        handlers: Handlers,
        drain: Drain,
        *,
        deliver: Callable[[Sequence[Delivery]], None],
        refuse: Callable[[Sequence[Delivery]], None],
        is_settled: Callable[[], bool],
        running: Callable[[], Iterable[str]],
        on_end: Callable[[], None],
        control: Control,
        prepare: Callable[[], Awaitable[None]],
    ) -> None:
        """Create a receiver.

        ``deliver`` and ``refuse`` are as in `Prefetcher`. ``is_settled`` says whether the store has confirmed all
        outcomes, and ``running`` returns the names of the running tasks. ``on_end`` is called at the end of the drain.
        ``prepare`` makes tasks available that wait for others, before the receiver looks for tasks.
        """
        self._subscription = subscription
        self._capacity = capacity
        self._handlers = handlers
        self._drain = drain
        self._deliver = deliver
        self._refuse = refuse
        self._is_settled = is_settled
        self._names = running
        self._on_end = on_end
        self._control = control
        self._prepare = prepare
        self._max_batch = max([1, *(handler.options.batch for handler in handlers.batches)])
        self._received: deque[Delivery] = deque()
        self._running = 0
        self._lent = 0

    def ended(self) -> None:
        self._running -= 1
        self._drain.notify()

    def returned(self) -> None:
        self.ended()

    def resize(self, capacity: int) -> None:
        self._capacity = capacity
        self._drain.notify()

    def lend(self, count: int) -> None:
        self._lent = count
        self._drain.notify()

    def stop(self) -> None:
        self.resize(0)

    async def run(self) -> None:
        first = True
        while self._capacity:
            changed, due_at = self._drain.changed, None
            busy = self._running > self._lent
            if not busy and not self._received and (first or self._drain.until_idle):
                due_at = await self._receive(everything=first and not self._drain.until_idle)
                first = False
            if busy or not (self._received or self._is_settled()):
                await changed.wait()
            elif self._received:
                self._start_next()
            elif any(each.since is not changed for each in self._drain.waits):
                await asyncio.sleep(0)  # it has not looked yet whether this change ended it
            elif self._drain.changed is not changed:
                pass  # look again: the store has changed since the receive began
            elif not await self._drain.advance(self._control, due_at):
                if self._running:
                    self._drain.note_stuck(self._names())
                self._on_end()
                await changed.wait()
        self._refuse(tuple(self._received))

    async def _receive(self, *, everything: bool) -> float | None:
        while True:
            await self._prepare()
            received = await self._subscription.receive(self._max_batch, 0)
            self._received += received.deliveries
            self._drain.note_expired(received.expired)
            if not (everything and received.deliveries):
                return received.due_at

    def _start_next(self) -> None:
        deliveries = [self._received[0]]
        key = deliveries[0].task.key
        handler = self._handlers.of(deliveries[0].task)
        if handler is not None and handler.options.batch:
            same = [each for each in self._received if each.task.key == key]
            deliveries = same[: handler.options.batch]
        if not all(self._drain.may_start(each.task) for each in deliveries):
            self._on_end()
            self.stop()
            return
        for delivery in deliveries:
            self._received.remove(delivery)
        self._running += len(deliveries)
        self._deliver(deliveries)
