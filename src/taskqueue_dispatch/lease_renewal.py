"""Keeps what this process holds: its leases are renewed, and endpoints are asked what they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import structs

from taskqueue_core.capabilities import Endpoint, Seen, SlotLease, SlotPool
from taskqueue_core.errors import TaskQueueError
from taskqueue_core.limits import LIMITS
from taskqueue_dispatch.config import DispatchSettings
from taskqueue_dispatch.lease_check import Checks
from taskqueue_dispatch.models import ModelConfig
from taskqueue_dispatch.registry import Registry

__all__ = ["Held", "Keeper", "Looks"]

_LOOK_PAUSE = 0.1
"""seconds between two looks for notes"""
_log = logging.getLogger("taskqueue.dispatch")


class Looks(Protocol):
    """What asks a server how it is: `taskqueue_dispatch.endpoint_client.client.Caller`."""

    async def health(self, endpoint: Endpoint, config: ModelConfig) -> Seen | None:
        """Return what the server says; ``None`` for one that does not answer, or says nothing of use."""
        ...


class Held:
    """A lease in hand."""

    def __init__(self, lease: SlotLease) -> None:
        """Made by `Keeper.hold`."""
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


class Keeper:
    """Renews all leases in hand, in one batch, three times while one lasts; and checks endpoints (see `Checks`).

    A store that is out of reach ends nothing here: it is tried again, and says then which leases are lost.
    """

    def __init__(
        self,
        pool: SlotPool,
        registry: Registry,
        caller: Looks,
        settings: DispatchSettings,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
    ) -> None:
        """Do no input or output."""
        self._pool = pool
        self._lease = settings.lease
        self._monotonic = monotonic
        self._held: dict[Held, None] = {}
        self._asked: set[str] = set()
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

    def hold(self, lease: SlotLease) -> Held:
        """Keep a lease from now on."""
        held = Held(lease)
        held.take(lease)
        self._held[held] = None
        return held

    def drop(self, held: Held) -> None:
        """Keep it no more: it was released, or is to run out. Idempotent."""
        self._held.pop(held, None)

    def change(self, held: Held, lease: SlotLease) -> None:
        """Go on with another lease, or with the same one in another state."""
        held.doubted = False
        held.take(lease)

    def look(self, model: str) -> None:
        """Look soon whether notes were left for jobs of a model."""
        self._asked.add(model)
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
            asked = await self._rest(due)
            if self._monotonic() >= due:
                begun, good = self._monotonic(), await self.renew()
                due = begun + (pause if good else pause / 10)
            elif asked:
                await self.renew(*asked)

    async def _rest(self, due: float) -> set[str]:
        """Wait until ``due``, or for a word on notes; return the models that it was of."""
        left = max(0.0, due - self._monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left):
                await self._stirred.wait()
                await asyncio.sleep(_LOOK_PAUSE)  # the next words are likely of the same
        self._stirred.clear()
        asked, self._asked = self._asked, set()
        return asked

    async def renew(self, *models: str) -> bool:
        """Renew all leases in hand, or those of some models that have a job. False where that has failed."""
        held = [
            one
            for one in self._held
            if not one.lost.is_set()
            and (not models or (one.lease.model in models and one.lease.job is not None))
        ]
        good = True
        for start in range(0, len(held), LIMITS.batch):
            good = await self._renew_some(held[start : start + LIMITS.batch]) and good
        if any(one.doubted for one in held):
            await asyncio.sleep(_LOOK_PAUSE)  # by then its holder knows better, or nobody does
        doubted = [one for one in held if one.doubted and one in self._held]
        for start in range(0, len(doubted), LIMITS.batch):
            good = await self._renew_some(doubted[start : start + LIMITS.batch]) and good
        return good

    async def _renew_some(self, held: Sequence[Held]) -> bool:
        leases = [one.lease for one in held]
        try:
            async with asyncio.timeout(self._lease / 3):
                told = await self._pool.renew(*leases, ttl=self._lease)
        except (TaskQueueError, TimeoutError) as error:
            self._say(error)
            return False
        except Exception:  # noqa: BLE001 - the loop must not end silently
            _log.exception("renewing slots failed")
            return False
        self._failing = False
        for one, sent, lease in zip(held, leases, told, strict=True):
            _learn(one, sent, lease)
        return True

    def _ended(self, leases: Sequence[SlotLease]) -> None:
        """Learn at once that leases were ended by a check of this process."""
        fences = {(lease.model, lease.server, lease.fence) for lease in leases}
        for one in self._held:
            if (one.lease.model, one.lease.server, one.lease.fence) in fences:
                one.lost.set()

    def _say(self, error: Exception) -> None:
        if not self._failing:
            code = error.code if isinstance(error, TaskQueueError) else "timeout"
            _log.warning("slots can't be renewed", extra={"code": code})
        self._failing = True


def _learn(one: Held, sent: SlotLease, lease: SlotLease | None) -> None:
    """Take in the answer to one renewal: what the holder has changed meanwhile is newer."""
    if one.lease.token != sent.token:
        return
    if lease is None:
        # The answer to an `assign` that took another lease over may be on its way to the holder: ask once more.
        if one.doubted:
            one.lost.set()
        one.doubted = not one.doubted
        return
    one.doubted = False
    if one.lease is not sent:
        lease = structs.replace(
            one.lease,
            token=lease.token,
            fence=lease.fence,
            expires_at=lease.expires_at,
            note=lease.note,
        )
    one.take(lease)
