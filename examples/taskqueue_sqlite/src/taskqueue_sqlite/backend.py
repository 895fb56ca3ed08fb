"""The backend, put together."""

from collections.abc import Iterable
from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict
from taskqueue_core.authoring import checked_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.errors import BackendUnavailable
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import Confirmation, Delivery, Health, Task

from taskqueue_sqlite.operators import Operators
from taskqueue_sqlite.store import Store
from taskqueue_sqlite.subscription import SQLiteSubscription


class SQLiteSettings(BaseSettings):
    """Settings: ``TASKQUEUE_SQLITE_…``."""

    model_config = SettingsConfigDict(env_prefix="TASKQUEUE_SQLITE_", env_file=".env", extra="ignore")

    path: Path = Path("taskqueue.db")


class SQLiteBackend:
    """See `Backend` and `Publisher` of `taskqueue_core.backend`. One process at a time owns the file."""

    capabilities = Capabilities(names=frozenset({Capability.DEAD_LETTERS, Capability.CONTROL}), durable=True)

    def __init__(self, settings: SQLiteSettings, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._store = Store(settings.path, self._clock, self._tell)
        self._all: list[SQLiteSubscription] = []
        self.publisher = self
        self.control = self.dead_letters = Operators(self._store, self.subscriptions)

    async def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        with self._store.step():
            self._store.promote()  # what fell due before comes first
            return tuple([self._store.publish(task) for task in tasks])

    async def schedule_retry(
        self, task: Task, at: float, *, error: str | None = None, token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:  # fmt: skip
        with self._store.step():
            return self._store.retry(task, at, error, token, settles)

    def subscribe(self, keys: Iterable[str], consumer: str) -> SQLiteSubscription:
        check_name("consumer", consumer)
        subscription = SQLiteSubscription(self._store, self._clock, checked_keys(keys), consumer)
        self._all = [*self.subscriptions(), subscription]
        return subscription

    def subscriptions(self) -> list[SQLiteSubscription]:
        """Return those that are open."""
        return [one for one in self._all if not one.closed]

    def now(self) -> float:
        return self._clock.now()

    async def health(self) -> Health:
        try:
            return Health(ok=True, backend="sqlite", details={"queues": len(await self.control.queues())})
        except BackendUnavailable as error:
            return Health(ok=False, backend="sqlite", details={"error": str(error)})

    async def aclose(self) -> None:
        for subscription in self.subscriptions():
            await subscription.close()
        self._store.close()

    def _tell(self, keys: set[str]) -> None:
        for subscription in self.subscriptions():
            if not keys.isdisjoint(subscription.keys):
                subscription.tell()
