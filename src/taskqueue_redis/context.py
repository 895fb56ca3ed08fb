"""State that the parts of one Redis backend share."""

from __future__ import annotations

import asyncio
import secrets

from taskqueue_core.clock import Clock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_redis.config import RedisSettings
from taskqueue_redis.connection.background import BackgroundTasks
from taskqueue_redis.connection.client import RedisClient
from taskqueue_redis.heartbeat import Heartbeat
from taskqueue_redis.scripts.receipts import Receipts
from taskqueue_redis.scripts.runner import ScriptRunner, StoreClock
from taskqueue_redis.settlement import Settlement
from taskqueue_redis.setup.checks import ServerChecks
from taskqueue_redis.wakeups import Wakeups


class RedisContext:
    """The connection, the scripts and other state that the parts of one Redis backend share."""

    def __init__(self, settings: RedisSettings, clock: Clock | None) -> None:
        """Create the state without connecting. A test may pass a ``clock`` that replaces the store's time."""
        self.settings = settings
        self.client = RedisClient(settings)
        self.checks = ServerChecks(self.client)
        self.clock = StoreClock(clock)
        self.scripts = ScriptRunner(self.client, self.checks, self.clock)
        self.receipts = Receipts()
        self.settlement = Settlement(self.scripts, self.receipts)
        self.process_id = secrets.token_hex(8)
        """random id of this backend object"""
        self.wakeups = Wakeups(self.scripts, self.receipts, self.process_id)
        self.heartbeat = Heartbeat(settings)
        self.background = BackgroundTasks()
        """background tasks, such as the clean-up after a cancelled call; all end before the connections are closed"""
        self.closing = asyncio.Event()
        """set when the backend begins to close"""

    def ensure_open(self) -> None:
        """Raise `BackendUnavailable` if the backend is closed or being closed."""
        if self.closing.is_set():
            raise BackendUnavailable("the backend is closed")

    def new_token(self) -> str:
        """Return a new token for a consumer: the process id, which the scripts read, and a secret of 128 bits."""
        return f"{self.process_id}-{secrets.token_hex(16)}"
