"""Where a local worker's work comes from: a subscription of its own, in its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

from taskqueue_core.backend import Backend, Capability, Subscription
from taskqueue_core.capabilities import Control, control_of, has, revocation_of
from taskqueue_core.consumer.maintenance import keep_house
from taskqueue_core.consumer.outage import OUTAGES, StoreLink, close, give_up_as_lost
from taskqueue_core.consumer.settle import Settlements
from taskqueue_core.limits import LIMITS
from taskqueue_core.retry import HandBack, Outcome
from taskqueue_core.tasks import Delivery
from taskqueue_worker.prefetch import Intake
from taskqueue_worker.run import Shift
from taskqueue_worker.settler import LocalSettler
from taskqueue_worker.threads import Mailbox

__all__ = ["LocalLine"]

_log = logging.getLogger("taskqueue.worker")


class LocalLine:
    """Receives, settles and keeps house until told to leave; then closes the subscription. Runs once."""

    result_limit = LIMITS.result

    def __init__(
        self,
        backend: Backend,
        subscription: Subscription,
        shift: Shift,
        *,
        concurrency: int,
        capacity: int,
    ) -> None:
        """Own the subscription."""
        self._backend = backend
        self._control = control_of(backend) if has(backend, Capability.CONTROL) else None
        self._subscription = subscription
        self._shift = shift
        self._loop = asyncio.get_running_loop()
        self._store = StoreLink(self._tell)
        self._held: dict[str, Delivery] = {}
        self._gone: set[str] = set()
        self._settler = LocalSettler(Settlements(backend, subscription, self._store), capacity)
        self._intake = Intake(
            subscription,
            self._store,
            concurrency,
            capacity,
            deliver=self._deliver,
            refuse=self._refuse,
            return_waiting=shift.return_waiting,
            room=self._settler.room,
        )
        self._leaving: asyncio.Future[float] = self._loop.create_future()
        self._progress: dict[str, float | str] = {}
        self._reported = asyncio.Event()
        self._inbox: Mailbox[tuple[str, float | str]] = Mailbox(self._loop, self._note_progress)
        self.ended: Future[None] = Future()

    # What the shift says; see `Line`.

    def start(self) -> None:
        """See `Line`."""
        self._main_task = self._loop.create_task(self._main())

    def resize(self, capacity: int) -> None:
        """See `Line`."""
        self._intake.resize(capacity)

    def leave(self, seconds: float) -> None:
        """See `Line`."""
        if not self._leaving.done():
            self._leaving.set_result(seconds)

    # What the runner says; see `Settler`.

    def settle(self, receipt: str, outcome: Outcome) -> None:
        """See `Settler`."""
        delivery = self._held.pop(receipt, None)
        if delivery is not None:
            self._settler.put(delivery, outcome)

    def finish(self, receipt: str, outcome: Outcome) -> None:
        """See `Settler`."""
        self.settle(receipt, outcome)
        if type(outcome) is HandBack:
            self._intake.returned()
        else:
            self._intake.ended()

    def free(self) -> None:
        """See `Settler`."""
        self._intake.ended()

    def progress(self, receipt: str, value: float | str) -> None:
        """See `Settler`. Without ``control`` nobody can be told."""
        if self._control is not None:
            self._inbox.put((receipt, value))

    # What the store says.

    def _deliver(self, deliveries: Sequence[Delivery]) -> None:
        self._held.update({delivery.receipt: delivery for delivery in deliveries})
        self._shift.deliver(deliveries)
        if self._gone:  # a revocation may overtake the answer of a receive
            gone, self._gone = self._gone, set()
            self._take_away([receipt for receipt in gone if receipt in self._held])

    def _refuse(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._settler.put(delivery, HandBack())

    def _take_away(self, receipts: Sequence[str]) -> None:
        for receipt in receipts:
            if self._held.pop(receipt, None) is None:
                self._gone.add(receipt)
        self._shift.revoke(receipts)

    async def _tell(self, ok: bool, reason: str) -> None:  # noqa: FBT001 - as `StoreLink` calls it
        if ok:
            _log.info("the store is back")
        else:
            _log.warning("the store is out of reach: %s; trying on", reason)

    async def _hear_revocations(self) -> None:
        revocation = revocation_of(self._backend, self._subscription)
        while receipts := await self._store.insist(revocation.revoked):
            self._take_away(receipts)

    def _note_progress(self, reports: list[tuple[str, float | str]]) -> None:
        self._progress.update(reports)
        self._reported.set()

    async def _report_progress(self, control: Control) -> None:
        while True:
            await self._reported.wait()
            self._reported.clear()
            reports, self._progress = self._progress, {}
            for receipt, value in reports.items():
                delivery = self._held.get(receipt)
                with contextlib.suppress(*OUTAGES):  # the next report says more
                    if delivery and not await control.progress(delivery, value):
                        self._take_away([receipt])

    # All of it.

    async def _main(self) -> None:
        try:
            await self._serve()
        except BaseException as error:  # noqa: BLE001 - it is passed on to whoever waits
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _parts(self) -> list[Coroutine[Any, Any, None]]:
        parts = [self._intake.run(), self._settler.run()]
        if has(self._backend, Capability.REVOCATION):
            parts.append(self._hear_revocations())
        if self._control is not None:
            parts += [self._report_progress(self._control), keep_house(self._control)]
        return parts

    async def _serve(self) -> None:
        parts = [self._loop.create_task(part) for part in self._parts()]
        try:
            waiting: set[asyncio.Future[Any]] = {*parts, self._leaving}
            while not self._leaving.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
            self._intake.stop()
            await self._confirm(*parts[:2], seconds=self._leaving.result())
            # What still has no verdict belongs to a handler that ended the process, and may end the next one.
            await give_up_as_lost(self._subscription, tuple(self._held.values()))
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            await close(self._subscription)

    async def _confirm(
        self, intake: asyncio.Task[None], settling: asyncio.Task[None], *, seconds: float
    ) -> None:
        """Wait until what was received and settled last is confirmed by the store."""

        async def all_of_it() -> None:
            await asyncio.wait([intake])
            await self._settler.finish()

        finishing = self._loop.create_task(all_of_it())
        try:
            await asyncio.wait(
                [finishing, settling], timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            finishing.cancel()
        if settling.done():
            settling.result()
        if self._settler.unsettled:
            _log.warning("%d outcomes were not confirmed in time", self._settler.unsettled)
