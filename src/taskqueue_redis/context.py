"""What the parts of one backend share."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Protocol

from taskqueue_core.capabilities import Durability
from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable, ConfigurationError, TaskQueueError
from taskqueue_core.tasks import Health
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import Owned
from taskqueue_redis.connection.client import Link
from taskqueue_redis.connection.errors import translated
from taskqueue_redis.connection.failures import Failure
from taskqueue_redis.heartbeat import Heartbeat
from taskqueue_redis.scripts.receipts import Receipts
from taskqueue_redis.scripts.replication import ReplicaWait
from taskqueue_redis.scripts.runner import Scripts
from taskqueue_redis.settlement import SettlementBatches
from taskqueue_redis.setup.aof_rewrite import rewrite_logs
from taskqueue_redis.setup.checks import ServerFacts, check_server, histories_of, parsed
from taskqueue_redis.wakeups import Wakeups

_CURES = {
    Durability.PROCESS: "set appendonly yes",
    Durability.DISK: "set appendonly yes and appendfsync always",
    Durability.REPLICATED: "connect more replicas",
}
_OUTAGE_SECONDS = 1.0
"""seconds for which a backend that is closed tries to reach a store that is away"""
_AGAIN, _SELDOM = 2.0, 60.0
"""seconds until masters are asked again whose files are not whole, at first and later on"""
_log = logging.getLogger("taskqueue.redis")


class OpenSubscription(Protocol):
    """An open subscription."""

    async def join(self) -> None:
        """Register with the store."""
        ...

    async def close(self) -> None:
        """Hand everything back."""
        ...


class RedisContext:
    """One process's side of the store: connections, scripts, who waits, and what is out."""

    def __init__(self, settings: RedisSettings, clock: Clock | None) -> None:
        """Do no input or output. A ``clock`` is for tests; else the store's own time counts."""
        self.settings = settings
        self.process = secrets.token_hex(8)
        self.link = Link(settings)
        self.scripts = Scripts(
            self.link,
            settings.prefix,
            settings.partitions_of,
            clock,
            self._check,
            journal_length=settings.journal_length,
        )
        self.receipts = Receipts()
        self.confirming = ReplicaWait(self.scripts, settings.answer_timeout * 0.8)
        self.settlements = SettlementBatches(self.scripts, self.receipts)
        self.wakeups = Wakeups(
            self.link, self.scripts, self.receipts, clock, self.process, reopened=self._healed
        )
        self.heartbeat = Heartbeat(settings, self._given_up)
        self.background = Owned()
        self.asking: set[asyncio.Task[Any]] = set()
        """calls that go on where their callers are cancelled"""
        self.link.trouble.healed = self._healed
        self.link.when_reopened(self._watch_logs)
        self.subscriptions: dict[OpenSubscription, None] = {}
        self.closed = False
        self._consumers = 0
        self._facts: ServerFacts | None = None
        self._histories: tuple[str, ...] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._rewriting: asyncio.Task[None] | None = None
        self._logs_due = False
        self._obstacle = ""
        self._checking = asyncio.Lock()
        self.promises_checked = False
        """whether this Redis is known to keep what its queues promise"""

    def ensure_open(self) -> None:
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

    async def durabilities(self, replicas: int) -> frozenset[Durability]:
        """Return what the servers as they are now can promise, with so many replicas to confirm."""
        with translated():
            facts = await check_server(self.link, self.settings)
        return _durabilities_of(facts, replicas)

    async def health(self) -> Health:
        """Ask the store."""
        details: dict[str, str | int | float | bool | None] = {
            "doorbell": self.wakeups.hears,
        }
        ok, anomalies = not self.closed, 0
        if ok:
            try:
                for partition in self.scripts.partitions.names:
                    anomalies += int(await self.scripts.run("health", partition))
            except (Failure, TaskQueueError) as error:
                ok = False
                details["error"] = str(error)
        details["anomalies"] = anomalies
        details["resets"] = self.scripts.resets
        details["trouble"] = self.link.trouble.text
        if self._facts is not None:
            details |= self._facts.details()
        return Health(ok=ok, backend="redis", details=details)

    async def _check(self) -> None:
        async with self._checking:
            if self._facts is not None:
                return
            facts = await check_server(self.link, self.settings)
            for warning in facts.warnings:
                _log.warning("%s: %s", facts.address, warning)
            self._facts, self._histories = facts, facts.histories
            if not await self._logs_are_whole():
                self._watch_logs()

    async def check_promises(self) -> None:
        """Raise `ConfigurationError` where a queue promises what the servers can't keep."""
        if self.promises_checked:
            return
        for partition in self.scripts.partitions.names:
            for key, promised, replicas in await self.scripts.run("promises", partition):
                durability = Durability(promised.decode())
                if self._facts and durability not in _durabilities_of(self._facts, int(replicas)):
                    raise ConfigurationError(
                        f"queue {key.decode()!r} has durability {durability.value!r}, which "
                        f"this Redis does not provide ({_CURES[durability]})"
                    )
        self.promises_checked = True

    async def give_up(self) -> None:
        """Once nothing has worked for a while, end every call that waits for the store; later ones fail at once."""
        pause = _OUTAGE_SECONDS
        while True:
            await asyncio.sleep(pause)
            if (
                self.link.trouble.seconds >= _OUTAGE_SECONDS / 2
            ):  # else it answers, or was away for a moment
                break
            pause = _OUTAGE_SECONDS / 10
        await self.link.aclose()

    async def aclose(self) -> None:
        """Close everything, in order. With the store away this waits for it unless somebody calls `give_up`."""
        for task in (self._looking, self._rewriting):
            if task is not None:
                task.cancel()  # nobody acts on what it finds any more
        await self.background.drained()
        await self.heartbeat.aclose()
        await self.wakeups.aclose()
        await self.link.aclose()
        if self.asking:
            await asyncio.wait(self.asking)

    def _healed(self) -> None:
        if not self.closed:
            self._looking = self.background.start(self._check_for_failover())
            self._watch_logs()

    async def _check_for_failover(self) -> None:
        """After an outage: where the store went back, what it has in flight here may have been settled already."""
        try:
            reply = await self.link.everywhere("INFO", "replication", quietly=True)
            histories = histories_of(parsed(info) for info in reply)
        except Failure:
            histories = None  # it is out of reach again: the next time tells
        if histories is not None and self._histories not in (None, histories):
            self.receipts.mark_uncertain()
            self.wakeups.mark_uncertain()
        self._histories = histories or self._histories
        self.wakeups.wake_all()

    def _watch_logs(self) -> None:
        """Have files written anew where a server may have been started anew."""
        self._logs_due = True
        if not self.closed and (self._rewriting is None or self._rewriting.done()):
            self._rewriting = self.background.start(self._watch_logs_forever())

    async def _watch_logs_forever(self) -> None:
        pause = _AGAIN
        while self._logs_due and not self.closed:
            self._logs_due = False
            whole = await self._logs_are_whole()
            # Also before a look that is called for meanwhile: such calls may come in storms.
            await asyncio.sleep(pause)
            if whole:
                pause = _AGAIN
            else:
                self._logs_due, pause = True, min(2 * pause, _SELDOM)

    async def _logs_are_whole(self) -> bool:
        try:
            reading = await rewrite_logs(self.link)
        except Failure:
            return False
        if reading.obstacle and reading.obstacle != self._obstacle:
            self._obstacle = reading.obstacle
            _log.warning(
                "%s: cannot rewrite its append-only file (%s): run BGREWRITEAOF yourself "
                    "after Redis was killed or lost power",
                self.settings.address.shown, reading.obstacle,
            )  # fmt: skip
        elif reading.whole and not reading.obstacle:
            self._obstacle = ""
        return reading.whole

    def _given_up(self, token: str) -> None:
        for holder in self.receipts.holders():
            if holder.token == token:
                holder.revoke(self.receipts.drop(holder))
                return


def _durabilities_of(facts: ServerFacts, replicas: int) -> frozenset[Durability]:
    durabilities = {Durability.MEMORY}
    if facts.append_only:
        durabilities.add(Durability.PROCESS)
        if facts.appendfsync == "always":
            durabilities.add(Durability.DISK)
    if facts.replicas >= max(1, replicas):
        durabilities.add(Durability.REPLICATED)
    return frozenset(durabilities)
