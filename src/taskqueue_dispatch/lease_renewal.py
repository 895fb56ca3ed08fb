"""Keeps what this process holds: its leases are renewed, and endpoints are asked what they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from taskqueue_core.capabilities import SlotLease, SlotPool
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_check import Checks, HealthClient
from taskqueue_dispatch.registry import ModelRegistry

_CHECK_SECONDS = 0.1
"""seconds between two looks for notes"""
_log = logging.getLogger("taskqueue.dispatch")


class RenewedLease:
    """A lease in hand."""

    def __init__(self, lease: SlotLease) -> None:
        """Made by `LeaseRenewer.hold`."""
        self.lease = lease
        """as it is now"""
        self.lost = asyncio.Event()
        """set once its token is stale, by the store's word"""
        self.noted = asyncio.Event()
        """set when a note came that is not the one before"""
        self.note: bytes | None = None
        self.doubted = False
        """its token was stale at the last look, which may have crossed a change"""

    def take(self, lease: SlotLease) -> None:
        """Go on with the lease as it was answered, and with its note."""
        self.lease = lease
        if lease.note is not None and lease.note != self.note:
            self.note = lease.note
            self.noted.set()


class LeaseRenewer:
    """Renews all leases in hand, in one batch, three times while one lasts; and checks endpoints (see `Checks`).

    A store that is out of reach ends nothing here: it is tried again, and says then which leases are lost.
    """

    def __init__(
        self,
        pool: SlotPool,
        registry: ModelRegistry,
        caller: HealthClient,
        settings: DispatchSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Do no input or output."""
        self._pool = pool
        self._lease = settings.lease
        self._monotonic = monotonic
        self._held: dict[RenewedLease, None] = {}
        self._requested: set[str] = set()
        """models whose leases may have got notes"""
        self._stirred = asyncio.Event()
        self._failing = False
        self.checks = Checks(
            pool,
            registry,
            caller,
            settings,
            ended=self._ended,
            monotonic=monotonic,
            uniform=uniform,
        )

    # What is in hand. None of it does input or output.

    def hold(self, lease: SlotLease) -> RenewedLease:
        """Keep a lease from now on."""
        held = RenewedLease(lease)
        held.take(lease)
        self._held[held] = None
        return held

    def drop(self, held: RenewedLease) -> None:
        """Keep it no more: it was released, or is to run out. Idempotent."""
        self._held.pop(held, None)

    def change(self, held: RenewedLease, lease: SlotLease) -> None:
        """Go on with another lease, or with the same one in another state."""
        held.doubted = False
        held.take(lease)

    def check_notes(self, model: str) -> None:
        """Look soon whether notes were left for jobs of a model."""
        self._requested.add(model)
        self._stirred.set()

    def poke(self, model: str, server: str) -> None:
        """Check an endpoint soon."""
        self.checks.poke(model, server)

    # The loops.

    async def run(self) -> None:
        """Renew and check, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renewals())
            group.create_task(self.checks.run())

    async def _renewals(self) -> None:
        pause, due = self._lease / 3, self._monotonic()
        while True:
            requested = await self._rest(due)
            if self._monotonic() >= due:
                begun, good = self._monotonic(), await self.renew()
                due = begun + (pause if good else pause / 10)
            elif requested:
                await self.renew(*requested)

    async def _rest(self, due: float) -> set[str]:
        """Wait until ``due``, or for a word on notes; return the models that it was of."""
        remaining = max(0.0, due - self._monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining):
                await self._stirred.wait()
                await asyncio.sleep(_CHECK_SECONDS)  # the next words are likely of the same
        self._stirred.clear()
        requested, self._requested = self._requested, set()
        return requested

    async def renew(self, *models: str) -> bool:
        """Renew all leases in hand, or those of some models that have a job. False where that has failed."""
        held = [
            lease
            for lease in self._held
            if not lease.lost.is_set()
            and (not models or (lease.lease.model in models and lease.lease.job is not None))
        ]
        good = True
        for start in range(0, len(held), LIMITS.batch):
            good = await self._renew_batch(held[start : start + LIMITS.batch]) and good
        if any(lease.doubted for lease in held):
            await asyncio.sleep(_CHECK_SECONDS)  # by then its holder knows better, or nobody does
        doubted = [lease for lease in held if lease.doubted and lease in self._held]
        for start in range(0, len(doubted), LIMITS.batch):
            good = await self._renew_batch(doubted[start : start + LIMITS.batch]) and good
        return good

    async def _renew_batch(self, held: Sequence[RenewedLease]) -> bool:
        leases = [lease.lease for lease in held]
        try:
            async with asyncio.timeout(self._lease / 3):
                results = await self._pool.renew(*leases, ttl=self._lease)
        except (TaskQueueError, TimeoutError) as error:
            self._say(error)
            return False
        except Exception:  # noqa: BLE001 - the loop must not end silently
            _log.exception("slot renewal failed")
            return False
        self._failing = False
        for item, sent, lease in zip(held, leases, results, strict=True):
            _learn(item, sent, lease)
        return True

    def _ended(self, leases: Sequence[SlotLease]) -> None:
        """Learn at once that leases were ended by a check of this process."""
        fences = {(lease.model, lease.server, lease.fence) for lease in leases}
        for item in self._held:
            if (item.lease.model, item.lease.server, item.lease.fence) in fences:
                item.lost.set()

    def _say(self, error: Exception) -> None:
        if not self._failing:
            code = error.code if isinstance(error, TaskQueueError) else "timeout"
            _log.warning("could not renew slots", extra={"code": code})
        self._failing = True


def _learn(item: RenewedLease, sent: SlotLease, lease: SlotLease | None) -> None:
    """Take in the answer to one renewal: what the holder has changed meanwhile is newer."""
    if item.lease.token != sent.token:
        return
    if lease is None:
        # The answer to an `assign` that took another lease over may be on its way to the holder: ask once more.
        if item.doubted:
            item.lost.set()
        item.doubted = not item.doubted
        return
    item.doubted = False
    if item.lease is not sent:
        lease = structs.replace(
            item.lease,
            token=lease.token,
            fence=lease.fence,
            expires_at=lease.expires_at,
            note=lease.note,
        )
    item.take(lease)
