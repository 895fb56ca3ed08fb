"""What the parts of one backend share."""

from __future__ import annotations

import secrets
from typing import Protocol

from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, TaskQueueError
from taskqueue_core.tasks import Health
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.durability import Durability
from taskqueue_redis.failures import Failure
from taskqueue_redis.heartbeat import Heartbeat
from taskqueue_redis.link import Link
from taskqueue_redis.owned import Owned
from taskqueue_redis.receipts import Receipts
from taskqueue_redis.scripts import Scripts
from taskqueue_redis.settlements import Settlements
from taskqueue_redis.wakeups import Wakeups

__all__ = ["Home", "Member"]


class Member(Protocol):
    """An open subscription."""

    async def join(self) -> None:
        """Register with the store."""
        ...

    async def close(self) -> None:
        """Hand everything back."""
        ...


class Home:
    """One process's side of the store: connections, scripts, who waits, and what is out."""

    def __init__(self, settings: RedisSettings, clock: Clock | None) -> None:
        """Do no input or output. A ``clock`` is for tests; else the store's own time counts."""
        self.settings = settings
        self.process = secrets.token_hex(8)
        self.link = Link(settings)
        self.scripts = Scripts(self.link, settings.prefix, settings.partitions, clock)
        self.receipts = Receipts()
        self.durability = Durability(self.scripts, settings.answer_timeout)
        self.settlements = Settlements(self.scripts, self.receipts)
        self.wakeups = Wakeups(self.link, self.scripts, self.receipts, clock, self.process)
        self.heartbeat = Heartbeat(settings, self._given_up)
        self.background = Owned()
        self.subscriptions: dict[Member, None] = {}
        self.closed = False
        self._consumers = 0

    def demand_open(self) -> None:
        """Raise `BackendUnavailable` once closed."""
        if self.closed:
            raise BackendUnavailable("the backend is closed")

    def new_token(self) -> str:
        """Return a name for a consumer: random, and unique to this process's start."""
        self._consumers += 1
        return f"{self.process}-{self._consumers}"

    async def arrived(self) -> None:
        """Return once every open subscription of this process is known to the store."""
        for subscription in tuple(self.subscriptions):
            await subscription.join()

    async def health(self) -> Health:
        """Ask the store."""
        details: dict[str, str | int | float | bool | None] = {"resets": self.scripts.resets}
        ok = not self.closed
        if ok:
            try:
                await self.scripts.run("queues", self.scripts.partitions.names[0])
            except (Failure, TaskQueueError) as error:
                ok = False
                details["error"] = type(error).__name__
        return Health(ok=ok, backend="redis", details=details)

    async def aclose(self) -> None:
        """Close everything, in order."""
        await self.background.drained()
        await self.heartbeat.aclose()
        await self.wakeups.aclose()
        await self.link.aclose()

    def _given_up(self, token: str) -> None:
        for holder in self.receipts.holders():
            if holder.token == token:
                holder.revoke(self.receipts.drop(holder))
                return
