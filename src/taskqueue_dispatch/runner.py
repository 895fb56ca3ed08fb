"""One model in one dispatcher: slots first, then jobs for them.

The loop turns when something has happened: a slot became free here or elsewhere, somebody waits for an endpoint, a job
came, or a while has passed without any of it.

::

    acquire (what was freed goes back in the same step) -> who waits here -> receive -> assign -> a `Run` for each

Where the queue is empty one slot is kept, unassigned, for the job that comes next, and the rest goes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from taskqueue_core.capabilities import RoomBell, SlotLease
from taskqueue_core.consuming.handing_back import close
from taskqueue_core.consuming.settlements import Settlements
from taskqueue_core.errors import SubscriptionClosed, TaskQueueError
from taskqueue_core.tasks import Delivery, Received
from taskqueue_dispatch.keeping import Held
from taskqueue_dispatch.names import queue_of
from taskqueue_dispatch.parts import Parts
from taskqueue_dispatch.running import Ends, Run

__all__ = ["Runner"]

_MOST = 64
"""slots asked for in one step"""
_IDLE = 30.0
"""seconds for which one receive waits at an empty queue"""
_log = logging.getLogger("taskqueue.dispatch")


class Runner:
    """Takes slots of a model, and jobs for them, until stopped. Runs once."""

    def __init__(self, model: str, parts: Parts) -> None:
        """Do no input or output but to open a subscription, which takes nothing yet."""
        self.model = model
        self._parts = parts
        self._subscription = parts.backend.subscribe([queue_of(model)], parts.holder)
        self._settlements = Settlements(parts.backend, self._subscription, parts.store)
        self._ends = Ends(self._subscription, self._settlements, self._let_go, self._stir_in)
        self._runs: set[asyncio.Task[None]] = set()
        self._spare: list[Held] = []
        self._freed: list[SlotLease] = []
        self._fetch: asyncio.Task[Received] | None = None
        self._appetite = 1
        self._stirred = asyncio.Event()
        self._stopping = False
        self._patience = 0.0

    @property
    def running(self) -> int:
        """How many jobs it has on servers."""
        return len(self._runs)

    def stir(self) -> None:
        """Have it look for slots and jobs soon."""
        self._stirred.set()

    def _stir_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self.stir)

    async def run(self) -> None:
        """Work until `stop`, then wind up. Never ends otherwise: what goes wrong is logged, and tried again."""
        self._parts.waiters.on_stir(self.model, self.stir)
        try:
            while not self._stopping:
                try:
                    async with self._parts.pool.bell(self.model) as bell:
                        await self._turn_around(bell)
                except TaskQueueError as error:
                    _log.warning("dispatching is held up", extra={"code": error.code})
                    await self._pause()
                except Exception:  # noqa: BLE001 - the loop must not end silently
                    _log.exception("dispatching failed")
                    await self._pause()
        finally:
            self._parts.waiters.on_stir(self.model, None)
            await self._wind_up()

    def stop(self, seconds: float) -> None:
        """Have `run` take no more, wait for what is on servers up to ``seconds``, hand back the rest, and end."""
        self._patience = seconds
        self._stopping = True
        self.stir()

    async def _wind_up(self) -> None:
        with contextlib.suppress(TaskQueueError):  # what it has brought comes back with the rest
            await self._call_off()
        if self._runs:
            await asyncio.wait(self._runs, timeout=self._patience)
        for run in self._runs:
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        while self._spare:
            self._let_go(self._spare.pop())
        with contextlib.suppress(TaskQueueError):  # they run out
            await self._parts.pool.release(*self._freed)
        await close(self._subscription)

    # The loop.

    async def _turn_around(self, bell: RoomBell) -> None:
        listening = asyncio.create_task(self._listen(bell))
        try:
            while not self._stopping:
                self._stirred.clear()
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

    async def _listen(self, bell: RoomBell) -> None:
        while True:
            await bell.rung(_IDLE)
            self.stir()
            self._parts.keeper.look(self.model)

    async def _take_slots(self) -> None:
        parts, freed = self._parts, self._freed
        hunger = self._appetite if self._fetch is None else 1
        wanted = parts.waiters.wanting(self.model) + hunger - len(self._spare)
        if wanted <= 0 and not freed:
            return
        self._freed = []
        try:
            if wanted <= 0:
                await parts.pool.release(*freed)
                return
            leases = await parts.pool.acquire(
                self.model,
                parts.holder,
                ttl=parts.settings.lease,
                limit=min(wanted, _MOST),
                releasing=freed,
            )
        except BaseException:
            self._freed += freed
            raise
        self._spare += [parts.keeper.hold(lease) for lease in leases]

    async def _give(self) -> None:
        """Give every other slot to who waits for one in this process; the rest is for the queue's jobs."""
        waiting = self._parts.waiters.wanting(self.model)
        share = len(self._spare) if self._fetch is not None else (len(self._spare) + 1) // 2
        for _ in range(min(waiting, share)):
            held = self._spare.pop()
            if not self._parts.waiters.give(self.model, held):
                self._spare.append(held)
                break
        if self._fetch is not None and not self._spare:
            await self._call_off()

    async def _take_jobs(self) -> None:
        if self._fetch is not None:
            if not self._fetch.done():
                return
            await self._call_off()
        while self._spare and not self._stopping:
            asked = len(self._spare)
            received = await self._subscription.receive(asked, 0)
            await self._start(received.deliveries)
            if len(received.deliveries) < asked:
                if not received.again:
                    self._lie_down()
                    return
            elif self._appetite == asked:
                self._appetite = min(2 * self._appetite, _MOST)
                self.stir()

    def _lie_down(self) -> None:
        """Wait for the next job with one slot in hand, and give the others back."""
        self._appetite = 1
        while len(self._spare) > 1:
            self._let_go(self._spare.pop())
        if self._spare:
            self._fetch = asyncio.create_task(self._subscription.receive(1, _IDLE))
            self._fetch.add_done_callback(self._fetched)

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
            self._stopping = True
        self.stir()

    def _let_go(self, held: Held) -> None:
        self._parts.keeper.drop(held)
        self._freed.append(held.lease)
        self.stir()

    # Jobs.

    async def _start(self, deliveries: Sequence[Delivery]) -> None:
        """Bind a slot to each delivery, and start it; those whose slot was lost meanwhile go back to the head."""
        if not deliveries:
            return
        parts = self._parts
        housed = deliveries[: len(self._spare)]
        homeless = list(deliveries[len(housed) :])
        held = [self._spare.pop() for _ in housed]
        pairs = [(one.lease, job.task.id) for one, job in zip(held, housed, strict=True)]
        try:
            leases = await parts.store.insist(
                partial(parts.pool.assign, *pairs, ttl=parts.settings.lease)
            )
        except BaseException:
            self._spare += held
            raise
        for one, job, lease in zip(held, housed, leases, strict=True):
            if lease is None:
                parts.keeper.drop(one)
                homeless.append(job)
            else:
                parts.keeper.change(one, lease)
                self._launch(job, one)
        if homeless:
            await self._settlements.redeliver(homeless)

    def _launch(self, delivery: Delivery, held: Held) -> None:
        task = asyncio.create_task(Run(delivery, held, self._parts, self._ends).go())
        self._runs.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._runs.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a job was left to its lease", exc_info=error)
