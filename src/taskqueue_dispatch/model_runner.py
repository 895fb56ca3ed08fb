"""One model in one dispatcher: slots first, then jobs for them.

The loop turns when something has happened: a slot became free here or elsewhere, somebody waits for an endpoint, a job
came, or a while has passed without any of it.

::

    acquire (freed slots go back in the same step) -> who waits here -> receive -> assign -> a `JobAttempt` for each

Behind a backlog the first and the third of these are one: the slots of the jobs that have just ended are still held
when the next jobs are received for them, and change hands meanwhile. A job whose slot somebody else got goes back.

Where the queue is empty one slot is kept, unassigned, for the job that comes next, and the rest goes back. One of a
server that other models share goes back as well after a moment: see `taskqueue_dispatch.shared_capacity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

from taskqueue_core.capabilities import RoomSignal, SlotLease
from taskqueue_core.consumer.outage import close
from taskqueue_core.consumer.settle import Settler
from taskqueue_core.errors import SubscriptionClosed, TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import Delivery, Received
from taskqueue_dispatch.job_attempt import Ends, JobAttempt
from taskqueue_dispatch.lease_renewal import RenewedLease
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.runner_context import Parts
from taskqueue_dispatch.shared_capacity import CapacityTurns

_MOST = 64
"""slots asked for in one step"""
_IDLE = 30.0
"""seconds for which one receive waits at an empty queue"""
_UNSETTLED = 256
"""jobs beyond which no more are taken until some are settled: each is kept here with its result"""
_GRACE = 0.3
"""seconds in which the loop may come to the end of its turn"""
_FINAL_SECONDS = 0.5
"""seconds for what is told to the store in the end"""
_log = logging.getLogger("taskqueue.dispatch")


class ModelRunner:
    """Takes slots of a model, and jobs for them, until stopped. Runs once."""

    def __init__(self, model: str, parts: Parts) -> None:
        """Do no input or output but to open a subscription, which takes nothing yet."""
        self.model = model
        self._parts = parts
        self._subscription = parts.backend.subscribe([queue_of(model)], parts.holder)
        self._settlements = Settler(parts.backend, self._subscription, parts.store)
        self._ends = Ends(self._subscription, self._settlements, self._take_back, self._check_later)
        self._runs: set[asyncio.Task[None]] = set()
        self._placed = 0
        """how many of them have a slot"""
        self._spare: list[RenewedLease] = []
        self._freed: list[SlotLease] = []
        self._fetch: asyncio.Task[Received] | None = None
        self._appetite = 1
        self._backlog = False
        """whether the last receive brought as much as was asked for"""
        self._early: list[Delivery] = []
        """received while slots changed hands"""
        self._turns = CapacityTurns(parts.registry, parts.settings)
        self._lain = False
        self._stirred = asyncio.Event()
        self._odd = 1
        """whether an odd slot is for who waits here: every other one is"""
        self._homeless: list[Delivery] = []
        """to go back to the head"""
        self._ending = asyncio.Event()
        self._until = 0.0

    @property
    def running(self) -> int:
        """How many jobs it has on servers."""
        return self._placed

    def check_now(self) -> None:
        """Have it look for slots and jobs soon."""
        self._stirred.set()

    def _check_later(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.check_now)

    async def run(self) -> None:
        """Work until `stop`, then wind up. Never ends otherwise: what goes wrong is logged, and tried again.

        Cancelled, it winds up at once. In no case does it wait long for a store that is away.
        """
        self._parts.waiters.on_change(self.model, self.check_now)
        working = asyncio.create_task(self._work())
        try:
            await self._ending.wait()
            await asyncio.wait([working], timeout=_GRACE)
            working.cancel()
            await asyncio.wait([working])
        except asyncio.CancelledError:
            self._until = 0.0
            raise
        finally:
            self._ending.set()
            self._parts.waiters.on_change(self.model, None)
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            await self._wind_up()

    def stop(self, seconds: float) -> None:
        """Have `run` take no more, wait for what is on servers up to ``seconds``, hand back the rest, and end."""
        self._until = time.monotonic() + seconds
        self._ending.set()
        self.check_now()

    async def _wind_up(self) -> None:
        try:
            if self._fetch is not None:  # what it has brought goes back with the rest
                self._fetch.cancel()
                await asyncio.wait([self._fetch])
            if self._runs:
                remaining = max(0.0, self._until - time.monotonic())
                await asyncio.wait(self._runs, timeout=remaining)
        finally:
            for run in self._runs:
                run.cancel()
            await asyncio.gather(*self._runs, return_exceptions=True)
            while self._spare:
                self._let_go(self._spare.pop())
            await asyncio.gather(self._release(), _within(partial(close, self._subscription)))

    async def _release(self) -> None:
        with contextlib.suppress(TaskQueueError):  # they run out
            for start in range(0, len(self._freed), LIMITS.batch):
                piece = self._freed[start : start + LIMITS.batch]
                await _within(partial(self._parts.pool.release, *piece))

    # The loop.

    @property
    def _unsettled(self) -> int:
        """How many jobs have left their server, and are not settled yet: the store, or its room, may be away."""
        return len(self._runs) - self._placed

    async def _work(self) -> None:
        while not self._ending.is_set():
            self._stirred.clear()
            try:
                async with self._parts.pool.slot_signal(self.model) as signal:
                    await self._turn_around(signal)
            except TaskQueueError as error:
                _log.warning("dispatching is blocked", extra={"code": error.code})
                await self._pause()
            except Exception:  # noqa: BLE001 - the loop must not end silently
                _log.exception("dispatching failed")
                await self._pause()

    async def _turn_around(self, signal: RoomSignal) -> None:
        listening = asyncio.create_task(self._listen(signal))
        try:
            while not self._ending.is_set():
                self._stirred.clear()
                await self._rehome()
                await self._take_slots()
                await self._give()
                await self._take_jobs()
                await self._pause()
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._parts.settings.safety_pass):
                await self._stirred.wait()

    async def _listen(self, signal: RoomSignal) -> None:
        while True:
            await signal.wait(_IDLE)
            self.check_now()
            self._parts.renewer.check_notes(self.model)

    async def _take_slots(self) -> None:
        parts, freed = self._parts, self._freed[: LIMITS.batch]
        hunger = self._appetite if self._fetch is None else 1 + self._has_better(freed)
        if self._unsettled >= _UNSETTLED:
            hunger = 0
        wanted = parts.waiters.wanting(self.model) + hunger - len(self._spare)
        if over := [lease for lease in freed if self._turns.is_over(lease)]:
            self._offer(*over)
        if self._turns.others_first:
            wanted = 0
        if wanted <= 0 and not freed:
            return
        self._freed = self._freed[LIMITS.batch :]
        async with self._receiving(min(wanted, len(freed))):
            try:
                leases = await self._exchange(freed, wanted)
            except BaseException:
                self._freed += freed
                raise
            self._turns.take(*leases)
            self._spare += [parts.renewer.hold(lease) for lease in leases]
            self._spare.sort(key=lambda held: self._turns.merit(held.lease))

    async def _exchange(self, freed: Sequence[SlotLease], wanted: int) -> Sequence[SlotLease]:
        pool, settings = self._parts.pool, self._parts.settings
        if wanted <= 0:
            await pool.release(*freed)
            return ()
        return await pool.acquire(
            self.model,
            self._parts.holder,
            ttl=settings.lease,
            limit=min(wanted, _MOST),
            releasing=freed,
        )

    @contextlib.asynccontextmanager
    async def _receiving(self, slots: int) -> AsyncIterator[None]:
        """Receive jobs for slots that change hands meanwhile, if they are sure to come and are all for them."""
        waiting = self._fetch is not None or self._parts.waiters.wanting(self.model) > 0
        if slots <= 0 or not self._backlog or self._spare or waiting:
            yield
            return
        self._backlog = False
        fetch = asyncio.create_task(self._subscription.receive(slots, 0))
        try:
            yield
            await asyncio.wait([fetch])
        finally:
            fetch.cancel()
            await asyncio.wait([fetch])
            if not fetch.cancelled() and fetch.exception() is None:
                self._early += fetch.result().deliveries
                self._backlog = len(self._early) == slots

    def _offer(self, *leases: SlotLease) -> None:
        """Take no slots for a moment, so that the other models of some servers get those that come back now."""
        self._check_later(self._turns.offer(*leases))

    async def _give(self) -> None:
        """Give every other slot to who waits for one in this process; the rest is for the queue's jobs."""
        share = len(self._spare)
        if self._fetch is None and self._parts.waiters.wanting(self.model):
            share, odd = divmod(share, 2)
            share += odd and self._odd
            self._odd ^= odd
        self._hand_out(share)
        if self._fetch is not None and not self._spare:
            await self._call_off()

    def _hand_out(self, share: int) -> None:
        for _ in range(min(self._parts.waiters.wanting(self.model), share)):
            held = self._spare.pop()
            if not self._parts.waiters.give(self.model, held):
                self._spare.append(held)
                break

    async def _take_jobs(self) -> None:
        if self._early:
            early, self._early = self._early, []
            await self._start(early)
        if self._fetch is not None:
            if not (self._fetch.done() or self._keeps_a_shared_one()):
                self._keep_one()
                return
            await self._call_off()
        while self._spare and not self._ending.is_set():
            requested = len(self._spare)
            received = await self._subscription.receive(requested, 0)
            await self._start(received.deliveries)
            self._backlog = len(received.deliveries) == requested
            if not self._backlog:
                if not received.again:
                    self._lie_down()
                    return
            elif self._appetite == requested:
                self._appetite = min(2 * self._appetite, _MOST)
                self.check_now()

    def _lie_down(self) -> None:
        """Wait for the next job with one slot in hand; the others are for who waits here, or go back."""
        self._appetite = 1
        self._hand_out(len(self._spare))
        self._keep_one()
        if not self._spare:
            self.check_now()  # for one to wait with
            return
        shared = self._turns.is_shared(self._spare[0].lease)
        if shared and self._lain:
            self._lain = False
            self._offer(self._spare[0].lease)
            self._let_go(self._spare.pop())
            return
        self._lain = shared
        patience = self._turns.idle if shared else _IDLE
        self._fetch = asyncio.create_task(self._subscription.receive(1, patience))
        self._fetch.add_done_callback(self._fetched)

    def _keeps_a_shared_one(self) -> bool:
        """Whether it waits with a slot of a server that another model has come to share meanwhile."""
        return not self._lain and any(self._turns.is_shared(held.lease) for held in self._spare)

    def _keep_one(self) -> None:
        while len(self._spare) > 1:
            self._let_go(self._spare.pop())

    def _has_better(self, freed: Sequence[SlotLease]) -> bool:
        """Whether a slot comes back of a server with this model, while the one in hand is of one with another."""
        switches = any(held.lease.switched for held in self._spare)
        return switches and any(lease.job is not None for lease in freed)

    async def _call_off(self) -> None:
        """End the waiting receive; what it has brought is started."""
        fetch, self._fetch = self._fetch, None
        if fetch is None:
            return
        fetch.cancel()
        await asyncio.wait([fetch])
        if not fetch.cancelled():
            await self._start(fetch.result().deliveries)

    def _fetched(self, fetch: asyncio.Task[Received]) -> None:
        if not fetch.cancelled() and isinstance(fetch.exception(), SubscriptionClosed):
            self._ending.set()
        self.check_now()

    def _let_go(self, held: RenewedLease) -> None:
        self._parts.renewer.drop(held)
        self._freed.append(held.lease)
        self.check_now()

    def _take_back(self, held: RenewedLease) -> None:
        self._placed -= 1
        self._let_go(held)

    # Jobs.

    async def _start(self, deliveries: Sequence[Delivery]) -> None:
        """Bind a slot to each delivery, and start it; those whose slot was lost meanwhile go back to the head."""
        if not deliveries:
            return
        self._lain = False
        parts = self._parts
        housed = deliveries[: len(self._spare)]
        held, self._spare = self._spare[: len(housed)], self._spare[len(housed) :]
        pairs = [(lease.lease, job.task.id) for lease, job in zip(held, housed, strict=True)]
        try:
            leases = await parts.store.retry_until_available(
                partial(parts.pool.assign, *pairs, ttl=parts.settings.lease)
            )
        except BaseException:
            self._spare += held
            self._homeless += deliveries
            raise
        for item, job, lease in zip(held, housed, leases, strict=True):
            if lease is None:
                parts.renewer.drop(item)
                self._homeless.append(job)
            else:
                parts.renewer.change(item, lease)
                self._launch(job, item)
        self._homeless += deliveries[len(housed) :]
        await self._rehome()

    async def _rehome(self) -> None:
        if self._homeless:
            await self._settlements.redeliver(self._homeless)
            self._homeless.clear()

    def _launch(self, delivery: Delivery, held: RenewedLease) -> None:
        task = asyncio.create_task(JobAttempt(delivery, held, self._parts, self._ends).go())
        self._runs.add(task)
        self._placed += 1
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._runs.discard(task)
        if self._unsettled == _UNSETTLED - 1:
            self.check_now()
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "could not settle a job; it is redelivered when its lease expires", exc_info=error
            )


async def _within(work: Callable[[], Awaitable[object]]) -> None:
    """Do the last of all, if the store is there for it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_FINAL_SECONDS):
            await work()
