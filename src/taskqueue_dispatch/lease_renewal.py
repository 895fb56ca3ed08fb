"""Renewal of the slot leases that this process holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from taskqueue_core.capabilities import SlotLease, SlotPool
from taskqueue_core.consumer.outage import log_fields
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_check import Checks, HealthClient
from taskqueue_dispatch.registry import ModelRegistry

_CHECK_SECONDS = 0.1
"""seconds for which requests to read notes are collected, and after which a lease reported as stale is renewed again"""
_LAPSING_SECONDS = 0.001
"""duration that is requested by a renewal that must not extend the lease"""
_log = logging.getLogger("taskqueue.dispatch")


class RenewedLease:
    """A slot lease held by this process, which `LeaseRenewer` renews."""

    def __init__(self, lease: SlotLease) -> None:
        self.lease = lease
        """the lease as last returned by the store"""
        self.lost = asyncio.Event()
        """set when the lease is lost: the store has reported a stale token, or a health check has ended the lease"""
        self.noted = asyncio.Event()
        """set when a new note about the job has arrived"""
        self.note: bytes | None = None
        self.doubted = False
        """whether the last renewal reported a stale token, which may be wrong if the lease changed during the call"""
        self.assigned_at = -math.inf
        """monotonic time just before the last call that assigned the lease to its job"""
        self.lapsing = False
        """whether the lease is left to expire: renewals only read its notes, and find out whether it has ended"""

    def take(self, lease: SlotLease) -> None:
        """Replace the lease with the store's newer version. If its note is new, keep the note and set `noted`."""
        self.lease = lease
        if lease.note is not None and lease.note != self.note:
            self.note = lease.note
            self.noted.set()


class LeaseRenewer:
    """A loop that renews all held leases in batches, three times per lease duration, and runs the health checks.

    An outage of the store does not end a lease: the renewal is retried, and the store then reports which leases are
    lost.
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
            held=lambda: (item.lease for item in tuple(self._held)),
            ended=self._ended,
            monotonic=monotonic,
            uniform=uniform,
        )

    def hold(self, lease: SlotLease) -> RenewedLease:
        """Renew a lease from now on, and return the object that holds its current version."""
        held = RenewedLease(lease)
        held.take(lease)
        self._held[held] = None
        return held

    def drop(self, held: RenewedLease) -> None:
        """Stop renewing a lease that was released or should expire. Idempotent."""
        self._held.pop(held, None)

    def change(self, held: RenewedLease, lease: SlotLease) -> None:
        """Replace a held lease with its new version after a store call has changed it."""
        held.doubted = False
        held.take(lease)

    def check_notes(self, model: str) -> None:
        """Read the notes for jobs of a model as soon as possible."""
        self._requested.add(model)
        self._wake_up.set()

    async def run(self) -> None:
        """Renew leases and check the health of endpoints, until cancelled."""
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
        """Wait until ``due`` or until notes are requested. Return the models whose notes are requested."""
        remaining = max(0.0, due - self._monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(remaining):
                await self._wake_up.wait()
                await asyncio.sleep(_CHECK_SECONDS)  # collect further requests
        self._wake_up.clear()
        requested, self._requested = self._requested, set()
        return requested

    async def renew(self, *models: str) -> bool:
        """Renew all leases or, if ``models`` are given, only those of their leases that have a job.

        Return whether all calls to the store succeeded.
        """
        held = [
            lease
            for lease in self._held
            if not lease.lost.is_set()
            and (not models or (lease.lease.model in models and lease.lease.job is not None))
        ]
        good = await self._renew_all(held)
        if any(lease.doubted for lease in held):
            # Give holders time to replace tokens that changed during the call. Then the renewal below decides whether
            # the leases are lost.
            await asyncio.sleep(_CHECK_SECONDS)
        doubted = [lease for lease in held if lease.doubted and lease in self._held]
        return await self._renew_all(doubted) and good

    async def _renew_all(self, held: Sequence[RenewedLease]) -> bool:
        good = True
        for ttl, lapsing in ((self._lease, False), (_LAPSING_SECONDS, True)):
            batch = [lease for lease in held if lease.lapsing is lapsing]
            for start in range(0, len(batch), LIMITS.batch):
                good = await self._renew_batch(batch[start : start + LIMITS.batch], ttl) and good
        return good

    async def _renew_batch(self, held: Sequence[RenewedLease], ttl: float) -> bool:
        leases = [lease.lease for lease in held]
        try:
            async with asyncio.timeout(self._lease / 3):
                results = await self._pool.renew(*leases, ttl=ttl)
        except (TaskQueueError, TimeoutError) as error:
            if not self._failing:
                _log.warning("could not renew slots", extra=log_fields(error))
            self._failing = True
            return False
        except Exception:  # noqa: BLE001 - an error must not end the loop
            _log.exception("slot renewal failed")
            return False
        self._failing = False
        for item, sent, lease in zip(held, leases, results, strict=True):
            _apply(item, sent, lease)
        return True

    def _ended(self, leases: Sequence[SlotLease]) -> None:
        """Mark leases as lost as soon as a health check of this process has ended them."""
        fences = {(lease.model, lease.server, lease.fence) for lease in leases}
        for item in self._held:
            if (item.lease.model, item.lease.server, item.lease.fence) in fences:
                item.lost.set()


def _apply(item: RenewedLease, sent: SlotLease, lease: SlotLease | None) -> None:
    """Apply the store's answer to one renewal, unless the holder has changed the lease since the call was made."""
    if item.lease.token != sent.token:
        return
    if lease is None:
        # A call of `assign` may be replacing this lease right now, so renew again before the lease counts as lost.
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
