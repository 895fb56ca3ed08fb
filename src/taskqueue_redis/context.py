"""State that the parts of one Redis backend share."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import Owned
from taskqueue_redis.connection.client import Link
from taskqueue_redis.heartbeat import Heartbeat
from taskqueue_redis.scripts.receipts import Receipts
from taskqueue_redis.scripts.runner import ScriptRunner, StoreClock
from taskqueue_redis.settlement import Settlement
from taskqueue_redis.setup.checks import ServerChecks
from taskqueue_redis.wakeups import Wakeups


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisContext:
    """The connection, the scripts and other state that the parts of one Redis backend share."""

    settings: RedisSettings
    client: Link
    checks: ServerChecks
    scripts: ScriptRunner
    receipts: Receipts
    """receipts of the deliveries that consumers of this process own"""
    settlement: Settlement
    wakeups: Wakeups
    """open subscriptions and their notifications"""
    heartbeat: Heartbeat
    clock: StoreClock
    process_id: str
    """random id of this backend, different at each start"""
    background: Owned
    """tasks that continue after their caller was cancelled; they end before the connections are closed"""
    closing: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """set when the backend begins to close"""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1), init=False)

    def ensure_open(self) -> None:
        """Raise `BackendUnavailable` if the backend is closed."""
        if self.closing.is_set():
            raise BackendUnavailable("the backend is closed")

    def new_token(self) -> str:
        """Return a token for a consumer, which no other consumer has."""
        return f"{self.process_id}-{next(self._numbers)}"


def make_context(settings: RedisSettings, clock: Clock | None) -> RedisContext:
    """Create the shared state, without connecting. A test may pass a ``clock`` that replaces the store's time."""
    client = Link(settings)
    receipts = Receipts()
    checks = ServerChecks(client)
    scripts = ScriptRunner(client, checks, StoreClock(clock))
    process_id = secrets.token_hex(8)
    return RedisContext(
        settings=settings,
        client=client,
        checks=checks,
        scripts=scripts,
        receipts=receipts,
        settlement=Settlement(scripts, receipts),
        wakeups=Wakeups(scripts, receipts, process_id),
        heartbeat=Heartbeat(settings, receipts),
        clock=scripts.clock,
        process_id=process_id,
        background=Owned(),
    )
