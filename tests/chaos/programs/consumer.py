"""A consumer that receives tasks in batches and settles each as the task asks, repeating unanswered calls."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from taskqueue_core.backend import Backend, Subscription
from taskqueue_core.capabilities import control_of, dead_lettering_of, revocation_of
from taskqueue_core.errors import BackendUnavailable, LeaseLost
from taskqueue_core.loading import load_backend
from taskqueue_core.tasks import Delivery, Settled
from tests.chaos.history import Log, What
from tests.chaos.programs.common import Setup

_PAUSE = 0.03
_WAIT = 0.25
_RETRY = (0.05, 0.3)

Send = Callable[[Sequence[Delivery]], Awaitable[Sequence[str]]]


class Consumer:
    """One start of a consumer."""

    def __init__(self, setup: Setup, log: Log, backend: Backend, over: asyncio.Event) -> None:
        self.setup = setup
        self.log = log
        self.backend = backend
        self.over = over
        self.random = random.Random(f"{setup.seed} {setup.name}")
        self.subscription: Subscription = backend.subscribe(setup.keys, setup.identity)
        self.held = 0
        self.room = asyncio.Event()
        self.given_back: set[str] = set()
        self.revoked: set[str] = set()
        self.told = asyncio.Event()
        """set when receipts were revoked, or when this process is to end"""

    async def run(self) -> None:
        """Receive and settle until told to stop; then settle all deliveries in hand and close the subscription."""
        async with asyncio.TaskGroup() as group:
            aside = [group.create_task(self._revocations())]
            if self.setup.housekeeping:
                aside.append(group.create_task(self._housekeeping(self.setup.housekeeping)))
            aside.append(group.create_task(self._tell_of_the_end()))
            while not self.over.is_set():
                for verb, batch in await self._receive():
                    group.create_task(self._handle(verb, batch))
                await self._while(lambda: self.held >= self.setup.limit)
            await self._while(lambda: self.held > 0)
            self.log.note(What.CLOSE)
            await self._until_answered(self.subscription.close)
            self.log.note(What.CLOSED)
            for task in aside:
                task.cancel()

    async def _receive(self) -> list[tuple[str, list[Delivery]]]:
        limit = min(self.setup.take, self.setup.limit - self.held)
        try:
            received = await self.subscription.receive(limit, _WAIT)
        except BackendUnavailable:
            self.log.note(What.BLIND)
            await asyncio.sleep(_PAUSE)
            return []
        self.log.note(What.RECEIVED, count=len(received.deliveries))
        batches: dict[str, list[Delivery]] = {}
        for delivery in received.deliveries:
            self.log.came(delivery)
            batches.setdefault(self._verb(delivery), []).append(delivery)
        self.held += len(received.deliveries)
        return list(batches.items())

    def _verb(self, delivery: Delivery) -> str:
        will = str(delivery.task.value()["will"])
        if will == "retry" and delivery.attempt == 1:
            return "retry"
        if will == "hang" and delivery.losses == 0:
            return "hang"
        if will == "bury" and delivery.prior == 0:
            return "dead_letter"
        if will == "back" and delivery.losses == 0 and delivery.task.id not in self.given_back:
            self.given_back.add(delivery.task.id)
            return "redeliver"
        return "ack"

    async def _while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self.room.clear()
            await self.room.wait()

    async def _handle(self, verb: str, batch: list[Delivery]) -> None:
        await asyncio.sleep(self.random.uniform(0, self.setup.hold))
        if verb == "hang":
            await asyncio.gather(*(self._hang(delivery) for delivery in batch))
            return
        await self._settle(verb, batch)
        self.held -= len(batch)
        self.room.set()

    async def _hang(self, delivery: Delivery) -> None:
        """Ack a delivery only after the store has revoked its receipt, or when this process is to end."""
        while delivery.receipt not in self.revoked and not self.over.is_set():
            self.told.clear()
            await self.told.wait()
        await self._settle("ack", [delivery])
        self.held -= 1
        self.room.set()

    async def _tell_of_the_end(self) -> None:
        await self.over.wait()
        self.told.set()

    async def _settle(self, verb: str, batch: list[Delivery]) -> None:
        send = {"ack": self._ack, "redeliver": self._redeliver}.get(verb)
        if send is not None:
            await self._sent(verb, batch, send)
            return
        for delivery in batch:
            if verb == "retry":
                at = self.backend.now() + self.random.uniform(*_RETRY)
                await self._sent(verb, [delivery], partial(self._retry, at), due=at)
            else:
                await self._sent(verb, [delivery], self._bury)

    async def _sent(
        self, verb: str, batch: list[Delivery], send: Send, *, due: float | None = None
    ) -> None:
        """Send a settlement until it is answered."""
        while True:
            call = self.log.next_call()
            for delivery in batch:
                self.log.about(delivery, What.SETTLE, call=call, verb=verb, due=due)
            try:
                outcomes = await send(batch)
            except LeaseLost:
                outcomes = [Settled.LEASE_LOST.value]
            except BackendUnavailable:
                outcomes = ["unknown"] * len(batch)
            for delivery, outcome in zip(batch, outcomes, strict=True):
                self.log.about(delivery, What.SETTLED, call=call, verb=verb, outcome=outcome)
            if "unknown" not in outcomes:
                return
            await asyncio.sleep(_PAUSE)

    async def _ack(self, batch: Sequence[Delivery]) -> Sequence[str]:
        results = [f'"{delivery.task.id}"'.encode() for delivery in batch]
        return [told.value for told in await self.subscription.ack(*batch, results=results)]

    async def _redeliver(self, batch: Sequence[Delivery]) -> Sequence[str]:
        return [told.value for told in await self.subscription.redeliver(*batch)]

    async def _bury(self, batch: Sequence[Delivery]) -> Sequence[str]:
        dead_lettering = dead_lettering_of(self.backend, self.subscription)
        return [(await dead_lettering.dead_letter(batch[0], "on purpose", "an error")).value]

    async def _retry(self, at: float, batch: Sequence[Delivery]) -> Sequence[str]:
        (delivery,) = batch
        told = await self.backend.publisher.schedule_retry(
            delivery.task, at, error="on purpose", settles=delivery
        )
        return ["ok" if told.status.value == "accepted" else "duplicate"]

    async def _revocations(self) -> None:
        revocation = revocation_of(self.backend, self.subscription)
        while True:
            try:
                receipts = await revocation.revoked()
            except BackendUnavailable:
                await asyncio.sleep(_PAUSE)
                continue
            if not receipts:
                return
            self.revoked.update(receipts)
            self.told.set()
            for receipt in receipts:
                self.log.note(What.REVOKED, receipt=receipt)

    async def _housekeeping(self, period: float) -> None:
        control = control_of(self.backend)
        while True:
            await asyncio.sleep(period * self.random.uniform(0.5, 1.5))
            with contextlib.suppress(BackendUnavailable):
                await control.maintain()

    async def _until_answered(self, call: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await call()
            except BackendUnavailable:
                await asyncio.sleep(_PAUSE)
            else:
                return


async def run(setup: Setup, log: Log, over: asyncio.Event) -> None:
    """Consume until told to stop."""
    async with contextlib.aclosing(load_backend(setup.word)) as backend:
        await Consumer(setup, log, backend, over).run()
