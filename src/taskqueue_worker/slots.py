"""The slots of a worker. A call that waits for other tasks lends its slots, so that these tasks can run."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Protocol

from taskqueue_core.application.errors import WouldBlock
from taskqueue_core.limits import LIMITS
from taskqueue_core.queue import Queue
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.endless_waits import TaskName, check_wait
from taskqueue_worker.handlers import Handler
from taskqueue_worker.worker_scope import WorkerScope

_BLOCKS: ContextVar[tuple[object, ...]] = ContextVar("taskqueue_blocks", default=())
"""the blocks of `SlotLoan.resumed` around the code that runs, the outermost first"""


class Job(Protocol):
    """A task of a call."""

    @property
    def delivery(self) -> AnyDelivery:
        """The delivery of the task."""

    @property
    def call(self) -> Call:
        """The call that handles the task."""


class Call(Protocol):
    """A running call of a handler."""

    handler: Handler
    task: asyncio.Task[None] | None
    loan: SlotLoan | None

    @property
    def jobs(self) -> Sequence[Job]:
        """The tasks of the call, each of which occupies a slot; empty after its end."""

    @property
    def discarded(self) -> bool:
        """Whether what the call returns will be ignored."""


class SlotLoan:
    """The waits of a call for other tasks. Its slots are lent while it waits, except in `resumed`."""

    def __init__(self, slots: Slots, call: Call) -> None:
        """Create the loan of a call that waits for the first time."""
        self._slots = slots
        self._call = call
        self.handler = call.handler
        self.tasks = tuple(map(_name, call.jobs))
        """keys and ids of the tasks of the call"""
        self.waits: Counter[TaskName] = Counter()
        """keys and ids of the tasks for which the call waits, with the number of waits for each"""
        self.lent = False
        self.ended = not self.tasks
        self.turn: asyncio.Future[None] | None = None
        """completes when the call may go on, while it waits to get its slots back"""
        self._resumed: set[object] = set()
        self._inner: Counter[object] = Counter()
        """the number of waits that were begun inside each block of `resumed`"""

    @asynccontextmanager
    async def waiting(self, queue: Queue, key: str, task_id: str) -> AsyncIterator[None]:
        if self._blocks_thread():
            raise WouldBlock(
                f"task {task_id} of {key} has not ended, and waiting for it would block a thread or a process of the "
                "worker: await the result in an async handler without run='process', or let the handler of the other "
                "task publish what follows"
            )
        task, blocks = (key, task_id), _BLOCKS.get()
        self._count_wait(task, 1, blocks)
        try:
            own = self._slots.worker.queue()
            if own is not None and queue.backend is own.backend:
                await check_wait(queue, task, self, self._slots)
            self._lend()
            yield
        finally:
            self._count_wait(task, -1, blocks)
            await self._take_back()

    @asynccontextmanager
    async def resumed(self) -> AsyncIterator[None]:
        block, outer = object(), _BLOCKS.get()
        self._resumed.add(block)
        try:
            await self._take_back()
            _BLOCKS.set((*outer, block))
            yield
        finally:
            _BLOCKS.set(outer)
            self._resumed.discard(block)
            self._lend()

    def _count_wait(self, task: TaskName, count: int, blocks: tuple[object, ...]) -> None:
        for block in blocks:
            self._inner[block] += count
        self._inner += Counter()  # ``+=`` removes blocks without waits
        waited = bool(self.waits)
        self.waits[task] += count
        if not self.waits[task]:
            del self.waits[task]
        if bool(self.waits) is not waited:
            for key, _ in self.tasks:
                self._slots.waiting[key] += count

    def _blocks_thread(self) -> bool:
        if not self._slots.worker.is_here():
            return True
        # The dependencies and the middleware of a synchronous handler are async.
        return not self.handler.is_async and asyncio.current_task() is not self._call.task

    @property
    def _is_waiting(self) -> bool:
        # A block that was resumed runs, unless it waits itself.
        return bool(self.waits) and self._resumed <= self._inner.keys()

    def _lend(self) -> None:
        if self.ended or not self._is_waiting:
            return
        if self.turn is not None:
            self._slots.withdraw(self)
        elif not self.lent:
            self._slots.lend(self)

    async def _take_back(self) -> None:
        while self.lent and not self._is_waiting:
            if self._call.discarded:  # it ends, and does not wait for its slots
                self._slots.give(self)
                return
            if self.turn is None:
                self._slots.request(self)
            try:
                if self.turn is not None:
                    await asyncio.wait([self.turn])
            except asyncio.CancelledError:
                if self.lent:
                    self._slots.give(self)
                raise


class Slots:
    """The slots of a worker: the number of tasks that may run at once, without those whose calls wait.

    Every running task uses a slot, unless its call has lent it.
    """

    def __init__(
        self,
        count: int,
        worker: WorkerScope,
        running: Mapping[str, Job],
        on_change: Callable[[SlotLoan], None],
        limit: int = LIMITS.credit,
    ) -> None:
        """Create ``count`` slots.

        ``running`` has the tasks of all calls that run or wait, by receipt; the owner keeps it up to date.
        ``on_change`` is called after a call has lent its slots, or got them back. ``limit`` is the maximum number of
        deliveries that a worker holds.
        """
        self.worker = worker
        self._count = count
        self._running = running
        self._on_change = on_change
        self._limit = limit
        self.lent = 0
        """number of slots that are lent"""
        self.waiting: Counter[str] = Counter()
        """the number of tasks whose calls wait for others, by key"""
        self.turns: deque[SlotLoan] = deque()
        """calls that wait to get their slots back"""

    @property
    def free(self) -> int:
        """The number of tasks that may start. Calls that wait to get their slots back come first."""
        return 0 if self.turns else max(0, self._count + self.lent - len(self._running))

    @property
    def _used(self) -> int:
        return len(self._running) - self.lent

    def owners(self) -> dict[TaskName, SlotLoan | None]:
        """Return the loans of the calls that run in this worker, by the keys and ids of their tasks."""
        return {_name(job): job.call.loan for job in self._running.values()}

    def ended(self, loan: SlotLoan | None) -> None:
        """Give the slots of a call that has ended, and perhaps has a loan, to the calls that wait for theirs."""
        if loan is not None:
            loan.ended = True
            if loan.lent:
                self.lent -= len(loan.tasks)
                loan.lent = False
                self.withdraw(loan)
                self._on_change(loan)
        self._give_turns()

    def lend(self, loan: SlotLoan) -> None:
        """Free the slots of a call that waits. Raises `WouldBlock` if all tasks that the worker can hold would wait."""
        size = len(loan.tasks)
        if self._used <= size and self.lent + size >= self._limit:
            raise WouldBlock(
                f"all {self._limit} tasks that this worker can hold wait for other tasks: publish fewer that wait, or "
                "let the handlers of the other tasks publish what follows"
            )
        self.lent += size
        loan.lent = True
        self._give_turns()
        self._on_change(loan)

    def request(self, loan: SlotLoan) -> None:
        """Give a call its slots back as soon as enough are free; its ``turn`` completes then."""
        loan.turn = asyncio.get_running_loop().create_future()
        self.turns.append(loan)
        self._give_turns()

    def withdraw(self, loan: SlotLoan) -> None:
        """Complete the turn of a call without giving it slots."""
        if loan.turn is not None:
            self.turns.remove(loan)
            turn, loan.turn = loan.turn, None
            turn.set_result(None)

    def give(self, loan: SlotLoan) -> None:
        """Give a call its slots back now, whether or not they are free."""
        self.withdraw(loan)
        self.lent -= len(loan.tasks)
        loan.lent = False
        self._on_change(loan)

    def _give_turns(self) -> None:
        while self.turns and self._used + len(self.turns[0].tasks) <= self._count:
            self.give(self.turns[0])


def _name(job: Job) -> TaskName:
    task = job.delivery.task
    return task.key, task.id
