"""The runner of one model in one dispatcher. It acquires slots first, then receives jobs for them.

Each pass of its loop starts when a slot is free, a caller waits or a job arrives; or after ``safety_pass`` seconds.

::

    acquire slots (and release those of ended jobs) -> serve waiting callers -> receive -> assign -> start `JobAttempt`s

While there is a backlog, acquiring and receiving run at the same time: the next jobs are received while the slots of
ended jobs are released and acquired again. If another dispatcher gets such a slot, the job is redelivered.

If the queue is empty, the runner keeps one unassigned slot for the next job and releases the others. If that slot is
on a server shared with other models, it is released soon, too: see `taskqueue_dispatch.shared_capacity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial

from taskqueue_core.capabilities import RoomSignal, SlotLease
from taskqueue_core.concurrency import try_for
from taskqueue_core.consumer.outage import close
from taskqueue_core.consumer.settle import Settler
from taskqueue_core.errors import SubscriptionClosed, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Received
from taskqueue_dispatch.job_attempt import AttemptOwner, JobAttempt
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.runner_context import RunnerContext
from taskqueue_dispatch.shared_capacity import CapacityTurns

_MAX_SLOTS = 64
"""maximum number of slots acquired in one call"""
_IDLE_SECONDS = 30.0
"""longest wait in seconds for a job while the queue is empty, and for a notification of the slot pool"""
_UNSETTLED = 256
"""number of ended but unsettled jobs at which the runner stops receiving, because their results are in memory"""
_GRACE_SECONDS = 0.3
"""maximum number of seconds that a stopping loop gets to finish its current pass"""
_FINAL_SECONDS = 0.5
"""maximum number of seconds for each of the last store calls during shutdown"""
_log = logging.getLogger("taskqueue.dispatch")


class ModelRunner:
    """The loop that acquires slots of one model and runs jobs on them until it is stopped. It runs once."""

    def __init__(self, model: str, context: RunnerContext) -> None:
        """Create a runner and open its subscription, which receives nothing yet. No other I/O."""
        self.model = model
        self._context = context
        self._subscription = context.backend.subscribe([queue_of(model)], context.holder)
        self._settlements = Settler(context.backend, self._subscription, context.store)
        self._owner = AttemptOwner(
            self._subscription, self._settlements, self._slot_freed, self._check_later
        )
        self._attempts: set[asyncio.Task[None]] = set()
        self._running = 0
        """number of attempts that still have a slot"""
        self._free: list[RenewedLease] = []
        self._surplus: list[RenewedLease] = []
        """slots of servers that currently take fewer jobs than they have slots"""
        self._returned: list[SlotLease] = []
        self._receive: asyncio.Task[Received] | None = None
        self._batch = 1
        self._backlog = False
        """whether the last receive returned as many jobs as were requested"""
        self._received_ahead: list[Delivery] = []
        """jobs received while slots were being acquired"""
        self._turns = CapacityTurns(context.registry, context.settings)
        self._kept_shared = False
        self._wake_up = asyncio.Event()
        self._odd_for_waiter = 1
        """with an odd number of slots: 1 if the extra slot goes to a waiting caller, 0 if it goes to a queued job"""
        self._unplaced: list[Delivery] = []
        """jobs without a slot, to be redelivered at the head of the queue"""
        self._stopping = asyncio.Event()
        self._deadline = 0.0

    @property
    def running(self) -> int:
        """Return how many of the model's jobs this dispatcher is running on servers."""
        return self._running

    def check_now(self) -> None:
        """Wake up the loop, so that it looks for slots and jobs."""
        self._wake_up.set()

    def _check_later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.check_now)

    async def run(self) -> None:
        """Run until `stop` is called, then shut down. Errors are logged and do not end the loop.

        If this call is cancelled, shut down without waiting for running jobs.
        """
        self._context.waiters.on_change(self.model, self.check_now)
        work = asyncio.create_task(self._work())
        try:
            await self._stopping.wait()
            await asyncio.wait([work], timeout=_GRACE_SECONDS)
        except asyncio.CancelledError:
            self._deadline = 0.0
            raise
        finally:
            self._stopping.set()
            self._context.waiters.on_change(self.model, None)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await self._shut_down()

    def stop(self, seconds: float) -> None:
        """Make `run` stop receiving, wait up to ``seconds`` for running jobs, give up the rest, and return."""
        self._deadline = time.monotonic() + seconds
        self._stopping.set()
        self.check_now()

    async def _shut_down(self) -> None:
        try:
            # Jobs that the cancelled receive already has are released when the subscription is closed below.
            if self._receive is not None:
                self._receive.cancel()
                await asyncio.wait([self._receive])
            if self._attempts:
                remaining = max(0.0, self._deadline - time.monotonic())
                await asyncio.wait(self._attempts, timeout=remaining)
        finally:
            for run in self._attempts:
                run.cancel()
            await asyncio.gather(*self._attempts, return_exceptions=True)
            for held in (*self._free, *self._surplus):
                self._return_slot(held)
            await asyncio.gather(
                self._release_returned(),
                try_for(_FINAL_SECONDS, partial(close, self._subscription)),
            )

    async def _release_returned(self) -> None:
        # Ignore errors, because the leases of slots that were not released expire by themselves.
        with contextlib.suppress(TaskQueueError):
            for start in range(0, len(self._returned), LIMITS.batch):
                piece = self._returned[start : start + LIMITS.batch]
                await try_for(_FINAL_SECONDS, partial(self._context.pool.release, *piece))

    @property
    def _unsettled(self) -> int:
        """Return how many jobs have ended on their server but are not settled yet, for example during an outage."""
        return len(self._attempts) - self._running

    async def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake_up.clear()
            try:
                async with self._context.pool.slot_signal(self.model) as signal:
                    await self._loop(signal)
            except TaskQueueError as error:
                _log.warning("could not dispatch jobs; retrying", extra={"code": error.code})
                await self._pause()
            except Exception:  # noqa: BLE001 - an error must not end the loop
                _log.exception("unexpected error while dispatching jobs; retrying")
                await self._pause()

    async def _loop(self, signal: RoomSignal) -> None:
        listener = asyncio.create_task(self._listen(signal))
        try:
            while not self._stopping.is_set():
                self._wake_up.clear()
                await self._return_unplaced()
                await self._acquire_slots()
                await self._serve_waiters()
                await self._receive_jobs()
                await self._pause()
        finally:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._context.settings.safety_pass):
                await self._wake_up.wait()

    async def _listen(self, signal: RoomSignal) -> None:
        while True:
            await signal.wait(_IDLE_SECONDS)
            self.check_now()
            self._context.renewer.check_notes(self.model)

    async def _acquire_slots(self) -> None:
        context, freed = self._context, self._returned[: LIMITS.batch]
        self._take(())
        demand = self._batch if self._receive is None else 1 + self._better_slot_returns(freed)
        if self._unsettled >= _UNSETTLED:
            demand = 0
        needed = context.waiters.wanting(self.model) + demand - len(self._free)
        if over := [lease for lease in freed if self._turns.is_over(lease)]:
            self._check_later(self._turns.offer(*over))
        if self._turns.others_first:
            needed = 0
        if needed <= 0 and not freed:
            return
        self._returned = self._returned[LIMITS.batch :]
        async with self._receive_ahead(min(needed, len(freed))):
            try:
                leases: Sequence[SlotLease] = ()
                if needed <= 0:
                    await context.pool.release(*freed)
                else:
                    leases = await context.pool.acquire(
                        self.model,
                        context.holder,
                        ttl=context.settings.lease,
                        limit=min(needed, _MAX_SLOTS),
                        releasing=freed,
                    )
            except BaseException:
                self._returned += freed
                raise
            self._turns.take(*leases)
            self._take(leases)
            if leases and self._surplus:
                self.check_now()  # another server may have a slot

    def _take(self, leases: Sequence[SlotLease]) -> None:
        """Use new slots and surplus ones, as far as their servers take further jobs."""
        surplus = self._surplus + [self._context.renewer.hold(lease) for lease in leases]
        self._free, self._surplus = self._context.limits.divide(self._free, surplus)
        self._free.sort(key=lambda held: self._turns.order(held.lease))

    @contextlib.asynccontextmanager
    async def _receive_ahead(self, slots: int) -> AsyncIterator[None]:
        """Receive jobs for slots that are being acquired, if there is a backlog and no caller waits for the slots."""
        waiting = self._receive is not None or self._context.waiters.wanting(self.model) > 0
        if slots <= 0 or not self._backlog or self._free or waiting:
            yield
            return
        self._backlog = False
        receive = asyncio.create_task(self._subscription.receive(slots, 0))
        try:
            yield
            await asyncio.wait([receive])
        finally:
            receive.cancel()
            await asyncio.wait([receive])
            if not receive.cancelled() and receive.exception() is None:
                self._received_ahead += receive.result().deliveries
                self._backlog = len(self._received_ahead) == slots

    async def _serve_waiters(self) -> None:
        """Give every other free slot, or all of them if no job is queued, to callers that wait for a slot."""
        share = len(self._free)
        if self._receive is None and self._context.waiters.wanting(self.model):
            share, odd = divmod(share, 2)
            share += odd and self._odd_for_waiter
            self._odd_for_waiter ^= odd
        self._give_to_waiters(share)
        if self._receive is not None and not self._free:
            await self._cancel_receive()

    def _give_to_waiters(self, share: int) -> None:
        for _ in range(min(self._context.waiters.wanting(self.model), share)):
            held = self._free.pop()
            if not self._context.waiters.give(self.model, held):
                self._free.append(held)
                break

    async def _receive_jobs(self) -> None:
        if self._received_ahead:
            early, self._received_ahead = self._received_ahead, []
            await self._start_jobs(early)
        if self._receive is not None:
            # End the wait if another model has begun to share the server of the slot kept for the next job.
            shared = any(self._turns.is_shared(held.lease) for held in self._free)
            if not self._receive.done() and (self._kept_shared or not shared):
                self._keep_one_slot()
                return
            await self._cancel_receive()
        while self._free and not self._stopping.is_set():
            requested = len(self._free)
            received = await self._subscription.receive(requested, 0)
            await self._start_jobs(received.deliveries)
            self._backlog = len(received.deliveries) == requested
            if not self._backlog:
                if not received.again:
                    self._wait_for_a_job()
                    return
            elif self._batch == requested:
                self._batch = min(2 * self._batch, _MAX_SLOTS)
                self.check_now()

    def _wait_for_a_job(self) -> None:
        """Give free slots to waiting callers. Keep one of the others while waiting for a job, and release the rest."""
        self._batch = 1
        self._give_to_waiters(len(self._free))
        self._keep_one_slot()
        if not self._free:
            # Start another pass, which acquires a slot: the runner waits for a job only while it holds a slot.
            self.check_now()
            return
        shared = self._turns.is_shared(self._free[0].lease)
        if shared and self._kept_shared:
            self._kept_shared = False
            self._check_later(self._turns.offer(self._free[0].lease))
            self._return_slot(self._free.pop())
            return
        self._kept_shared = shared
        patience = self._turns.idle if shared else _IDLE_SECONDS
        self._receive = asyncio.create_task(self._subscription.receive(1, patience))
        self._receive.add_done_callback(self._receive_ended)

    def _keep_one_slot(self) -> None:
        while len(self._free) > 1:
            self._return_slot(self._free.pop())
        while self._surplus:
            self._return_slot(self._surplus.pop())

    def _better_slot_returns(self, freed: Sequence[SlotLease]) -> bool:
        """Return whether a slot in ``freed`` is on a server that has this model loaded, but some free slot is not."""
        switches = any(held.lease.switched for held in self._free)
        return switches and any(lease.job is not None for lease in freed)

    async def _cancel_receive(self) -> None:
        """Cancel the waiting receive, and start the jobs that it has already received."""
        receive, self._receive = self._receive, None
        if receive is None:
            return
        receive.cancel()
        await asyncio.wait([receive])
        if not receive.cancelled():
            await self._start_jobs(receive.result().deliveries)

    def _receive_ended(self, receive: asyncio.Task[Received]) -> None:
        if not receive.cancelled() and isinstance(receive.exception(), SubscriptionClosed):
            self._stopping.set()
        self.check_now()

    def _return_slot(self, held: RenewedLease) -> None:
        self._context.renewer.drop(held)
        self._returned.append(held.lease)
        self.check_now()

    def _slot_freed(self, held: RenewedLease) -> None:
        self._running -= 1
        self._context.limits.ended(held.lease.model, held.lease.server)
        self._return_slot(held)

    async def _start_jobs(self, deliveries: Sequence[Delivery]) -> None:
        """Assign a slot to each delivery and start its job. Redeliver deliveries that get no slot or lose it."""
        if not deliveries:
            return
        self._kept_shared = False
        context = self._context
        placed = deliveries[: len(self._free)]
        held, self._free = self._free[: len(placed)], self._free[len(placed) :]
        pairs = [(lease.lease, job.task.id) for lease, job in zip(held, placed, strict=True)]
        assigned_at = time.monotonic()
        try:
            leases = await context.store.retry_until_available(
                partial(context.pool.assign, *pairs, ttl=context.settings.lease)
            )
        except BaseException:
            self._free += held
            self._unplaced += deliveries
            raise
        for item, job, lease in zip(held, placed, leases, strict=True):
            if lease is None:
                context.renewer.drop(item)
                self._unplaced.append(job)
            else:
                context.renewer.change(item, lease)
                item.assigned_at = assigned_at
                self._launch(job, item)
        self._unplaced += deliveries[len(placed) :]
        await self._return_unplaced()

    async def _return_unplaced(self) -> None:
        if self._unplaced:
            await self._settlements.redeliver(self._unplaced)
            self._unplaced.clear()

    def _launch(self, delivery: Delivery, held: RenewedLease) -> None:
        task = asyncio.create_task(JobAttempt(delivery, held, self._context, self._owner).run())
        self._attempts.add(task)
        self._running += 1
        self._context.limits.started(held.lease.model, held.lease.server)
        task.add_done_callback(self._attempt_ended)

    def _attempt_ended(self, task: asyncio.Task[None]) -> None:
        self._attempts.discard(task)
        if self._unsettled == _UNSETTLED - 1:
            self.check_now()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "could not settle a job; it is redelivered when its lease expires", exc_info=error
            )
