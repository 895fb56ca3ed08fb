"""Renewal of the slot leases that this process holds."""

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
"""seconds between two reads of notes"""
_log = logging.getLogger("taskqueue.dispatch")


class RenewedLease:
    """A lease held by this process."""

    def __init__(self, lease: SlotLease) -> None:
        """Create a lease; called by `LeaseRenewer.hold`."""
        self.lease = lease
        """the current state of the lease"""
        self.lost = asyncio.Event()
        """set when the store has reported that the token is stale"""
        self.noted = asyncio.Event()
        """set when a new note has arrived"""
        self.note: bytes | None = None
        self.doubted = False
        """the token was stale at the last renewal, which may have overlapped with a change of the lease"""

    def take(self, lease: SlotLease) -> None:
        """Replace the lease by the store's answer, and take over its note."""
        self.lease = lease
        if lease.note is not None and lease.note != self.note:
            self.note = lease.note
            self.noted.set()


class LeaseRenewer:
    """A loop that renews all held leases in one batch, three times per lease duration, and runs `Checks`.

    An outage of the store ends no lease here: the renewal is retried, and the store then reports which leases are lost.
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
        """Create a renewer without any I/O."""
        self._pool = pool
        self._lease = settings.lease
        self._monotonic = monotonic
        self._held: dict[RenewedLease, None] = {}
        self._requested: set[str] = set()
        """models whose leases may have new notes"""
        self._wake_up = asyncio.Event()
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

    # The held leases. None of these methods does any I/O.

    def hold(self, lease: SlotLease) -> RenewedLease:
        """Hold a lease: renew it from now on."""
        held = RenewedLease(lease)
        held.take(lease)
        self._held[held] = None
        return held

    def drop(self, held: RenewedLease) -> None:
        """Stop renewing a lease: it was released, or is left to expire. Idempotent."""
        self._held.pop(held, None)

    def change(self, held: RenewedLease, lease: SlotLease) -> None:
        """Replace a held lease by another one, or by its new state."""
        held.doubted = False
        held.take(lease)

    def check_notes(self, model: str) -> None:
        """Read the notes for jobs of a model soon."""
        self._requested.add(model)
        self._wake_up.set()

    def check_soon(self, model: str, server: str) -> None:
        """Check an endpoint soon."""
        self.checks.check_soon(model, server)

    # The loops.

    async def run(self) -> None:
        """Renew and check, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renewals())
            group.create_task(self.checks.run())

    async def _renewals(self) -> None:
        pause, due = self._lease / 3, self._monotonic()
        while True:
            requested = await self._wait(due)
            if self._monotonic() >= due:
                begun, good = self._monotonic(), await self.renew()
                due = begun + (pause if good else pause / 10)
            elif requested:
                await self.renew(*requested)

    async def _wait(self, due: float) -> set[str]:
        """Wait until ``due`` or until notes are requested; return the models for which they are."""
        remaining = max(0.0, due - self._monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining):
                await self._wake_up.wait()
                await asyncio.sleep(_CHECK_SECONDS)  # collect further requests
        self._wake_up.clear()
        requested, self._requested = self._requested, set()
        return requested

    async def renew(self, *models: str) -> bool:
        """Renew all held leases, or those of some models that have a job. Return whether all calls succeeded."""
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
            await asyncio.sleep(
                _CHECK_SECONDS
            )  # by then the holder has updated the lease, or it is lost
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
            self._log_failure(error)
            return False
        except Exception:  # noqa: BLE001 - the loop must not end silently
            _log.exception("slot renewal failed")
            return False
        self._failing = False
        for item, sent, lease in zip(held, leases, results, strict=True):
            _apply(item, sent, lease)
        return True

    def _ended(self, leases: Sequence[SlotLease]) -> None:
        """Mark leases as lost at once if a check of this process has ended them."""
        fences = {(lease.model, lease.server, lease.fence) for lease in leases}
        for item in self._held:
            if (item.lease.model, item.lease.server, item.lease.fence) in fences:
                item.lost.set()

    def _log_failure(self, error: Exception) -> None:
        if not self._failing:
            code = error.code if isinstance(error, TaskQueueError) else "timeout"
            _log.warning("could not renew slots", extra={"code": code})
        self._failing = True


def _apply(item: RenewedLease, sent: SlotLease, lease: SlotLease | None) -> None:
    """Apply the answer to one renewal, unless the holder has changed the lease since it was sent."""
    if item.lease.token != sent.token:
        return
    if lease is None:
        # The answer to an `assign` that replaced the lease may still be on its way: renew once more before it is lost.
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
