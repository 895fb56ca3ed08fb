"""The memory backend: its settings, its publisher, and the backend itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from taskqueue_core.authoring.helpers import check_size, checked_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.config import load_settings
from taskqueue_core.limits import LIMITS, check_name
from taskqueue_core.tasks import Confirmation, Delivery, Health, Task
from taskqueue_memory.audit import MemoryAudit
from taskqueue_memory.control import MemoryControl, MemoryDeadLetters
from taskqueue_memory.dependencies import MemoryDependencies
from taskqueue_memory.journal import MemoryJournal
from taskqueue_memory.listing import MemoryListing
from taskqueue_memory.room_signal import MemoryRoomSignal
from taskqueue_memory.schedules import MemorySchedules
from taskqueue_memory.slots.pool import MemorySlots
from taskqueue_memory.streams import MemoryStreams
from taskqueue_memory.subscription import MemorySubscription
from taskqueue_memory.transitions import MemoryStore


class MemorySettings(BaseSettings):
    """Settings of the memory backend, read from the environment variables ``TASKQUEUE_MEMORY_…``."""

    model_config = SettingsConfigDict(
        env_prefix="TASKQUEUE_MEMORY_", env_file=".env", extra="ignore"
    )

    journal: Path | None = None
    """file to which every state change is appended, one JSON object per line; None means no journal"""
    journal_digests: bool = False
    """whether each line of the journal has a digest that depends on all lines before it, and its end an end mark"""


class MemoryPublisher:
    """Publisher of the memory backend. Each call is atomic."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        if len(tasks) > LIMITS.call:
            check_size("tasks", tasks)
        self._store.forget(2 * len(tasks))
        return tuple([self._store.publish(task) for task in tasks])

    async def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
        free: bool = False,
        traceback: str | None = None,
    ) -> Confirmation:
        return self._store.retry(task, at, error, token, settles, traceback=traceback, free=free)

    def room_signal(self, *keys: str) -> MemoryRoomSignal:
        return MemoryRoomSignal(self._store.signals, checked_keys(keys))


class MemoryBackend:
    """A backend that keeps its tasks in the memory of this process. It works in one event loop at a time."""

    capabilities = Capabilities(names=frozenset(Capability))

    def __init__(
        self, *, clock: Clock | None = None, settings: MemorySettings | None = None
    ) -> None:
        """Create an empty backend. Its clock is the system's clock, unless a test passes another ``clock``."""
        settings = settings or MemorySettings()
        self._journal = (
            MemoryJournal(settings.journal, digests=settings.journal_digests)
            if settings.journal
            else None
        )
        self._store = MemoryStore(clock or SystemClock(), self._journal)
        self._closed = False
        self.publisher = MemoryPublisher(self._store)
        self.control = MemoryControl(self._store)
        self.dead_letters = MemoryDeadLetters(self._store)
        self.audit = MemoryAudit(self._store.clock)
        self.slots = MemorySlots(self._store.clock)
        self.schedules = MemorySchedules(self._store)
        self.dependencies = MemoryDependencies(self._store)
        self.listing = MemoryListing(self._store)
        self.streams = MemoryStreams(self._store)

    def subscribe(self, keys: Iterable[str], consumer: str) -> MemorySubscription:
        check_name("consumer", consumer)
        return MemorySubscription(self._store, checked_keys(keys), consumer)

    def now(self) -> float:
        return self._store.clock.now()

    async def health(self) -> Health:
        journal = None if self._journal is None else not self._journal.failed
        return Health(
            ok=not self._closed,
            backend="memory",
            details={"queues": len(self._store.queues), "durable": False, "journal": journal},
        )

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        open_ones = {s: None for queue in self._store.queues.values() for s in queue.subscribers}
        for subscription in open_ones:
            await subscription.close()
        self._store.timers.stop()
        if self._journal is not None:
            self._journal.close()


def create_backend(*, clock: Clock | None = None) -> MemoryBackend:
    """Return a memory backend with the settings from the environment. Tests pass a ``clock``."""
    return MemoryBackend(clock=clock, settings=load_settings(MemorySettings))
