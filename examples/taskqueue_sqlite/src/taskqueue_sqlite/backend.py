"""The publisher's side, and the backend."""

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from taskqueue_core.authoring import checked_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.errors import LeaseLost, PublishUnconfirmed, TaskQueueError
from taskqueue_core.limits import check_name, check_time
from taskqueue_core.tasks import Confirmation, Delivery, Health, Published, Task

from taskqueue_sqlite.operators import Control, DeadLetters
from taskqueue_sqlite.store import Part, Row, SqliteSettings, Store, cut, step, task_of
from taskqueue_sqlite.subscription import Subscription


class Publisher(Part):
    """Puts tasks in."""

    unsure = PublishUnconfirmed

    @step
    def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple(Confirmation(key=t.key, task_id=t.id, status=self._put(t)) for t in tasks)

    def _put(self, task: Task) -> Published:
        for entry in self.store.do("known", key=task.key, id=task.id):
            if entry["fresh"]:
                same = task_of(entry).payload == task.payload
                return Published.DUPLICATE if same else Published.CONFLICT
        self._add(task, max(self.store.now(), task.not_before or 0))
        return Published.ACCEPTED

    def _add(self, task: Task, at: float, attempt: int = 1) -> Row:
        state = "scheduled" if at > self.store.now() else "waiting"
        values = {name: getattr(task, name) for name in ("key", "id", "priority", "deadline")}
        values |= {"body": msgspec.msgpack.encode(task), "state": state, "at": at}
        self.store.do("forget", key=task.key, id=task.id)
        return self.store.do("add", attempt=attempt, **values)[0]

    @step
    def schedule_retry(
        self,
        task: Task,
        at: float,
        *,
        error: str | None = None,
        token: str | None = None,
        settles: Delivery | None = None,
    ) -> Confirmation:
        check_time("at", at)
        do, at = self.store.do, max(at, self.store.now())
        entry = (do("known", key=task.key, id=task.id) or [self._add(task, at, attempt=0)])[0]
        token = token or f"attempt:{settles.attempt if settles else entry['handed_out']}"
        mark, status = settles and f"retry {settles.receipt}", Published.DUPLICATE
        if (not mark or entry["settled"] != mark) and do("token", n=entry["n"], token=cut(token)):
            if settles and entry["receipt"] != settles.receipt:
                raise LeaseLost("the receipt is not current")
            do("retry", n=entry["n"], at=at, mark=mark, error=cut(error))
            status = Published.ACCEPTED
        return Confirmation(key=task.key, task_id=task.id, status=status)


class SqliteBackend:
    """Tasks in one file, for one process."""

    capabilities = Capabilities(names=frozenset(Capability), durable=True)

    def __init__(self, settings: SqliteSettings, clock: Clock | None = None) -> None:
        self._store = Store(settings, clock or SystemClock())
        self.publisher = Publisher(self._store)
        self.control, self.dead_letters = Control(self._store), DeadLetters(self._store)
        self.now = self._store.now

    def subscribe(self, keys: Iterable[str], consumer: str) -> Subscription:
        check_name("consumer", consumer)
        return Subscription(self._store, consumer, checked_keys(keys))

    async def health(self) -> Health:
        try:
            with self._store.step():
                return Health(ok=True, backend="sqlite")
        except TaskQueueError as error:
            return Health(ok=False, backend="sqlite", details={"error": str(error)})

    async def aclose(self) -> None:
        with suppress(
            TaskQueueError
        ):  # what can't be handed back now is taken back by the next process
            self._store.release(*self._store.subscriptions.values())
        await self._store.aclose()
