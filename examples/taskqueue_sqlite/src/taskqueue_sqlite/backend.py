# ruff: noqa: D102 - the contract tells what its methods promise
"""The backend, and the publisher's side."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from taskqueue_core.authoring import checked_keys
from taskqueue_core.backend import Capabilities, Capability
from taskqueue_core.clock import Clock, SystemClock
from taskqueue_core.errors import BackendUnavailable, LeaseLost, TaskQueueError
from taskqueue_core.limits import check_name, check_time
from taskqueue_core.tasks import Confirmation, Delivery, Health, Published, Task
from taskqueue_sqlite.operators import Control, DeadLetters
from taskqueue_sqlite.store import Part, Store, step, task_of
from taskqueue_sqlite.subscription import Subscription

_TOKEN = "INSERT OR IGNORE INTO tokens VALUES (:n, :token) RETURNING token"
_RETRY = """, at = :at, seq = next(), prior = iif(state = 'dead', attempt, prior), attempt = attempt + 1,
    losses = 0, progress = NULL, result = NULL, settled = ifnull(:mark, settled)"""


class Publisher(Part):
    """Puts tasks in."""

    @step
    def publish(self, *tasks: Task) -> tuple[Confirmation, ...]:
        return tuple(Confirmation(key=t.key, task_id=t.id, status=self._put(t)) for t in tasks)

    def _put(self, task: Task) -> Published:
        known = self.store.known(task.key, task.id, dedupe=True)
        if known is not None:
            same = task_of(known).payload == task.payload
            return Published.DUPLICATE if same else Published.CONFLICT
        now = self.store.now()
        at = max(now, task.not_before or now)
        self.store.add(task, "scheduled" if at > now else "waiting", at, attempt=1)
        return Published.ACCEPTED

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
        store, at = self.store, max(at, self.store.now())
        entry = store.known(task.key, task.id) or store.add(task, "scheduled", at, attempt=0)
        token = token or f"attempt:{settles.attempt if settles else entry['handed_out']}"
        values = {"n": entry["n"], "at": at, "token": token, "mark": None}
        status = Published.DUPLICATE
        if settles is not None:
            values["mark"] = f"schedule_retry {settles.receipt}"
        if entry["settled"] != (values["mark"] or "") and store.run(_TOKEN, **values):
            if settles is not None and entry["receipt"] != settles.receipt:
                raise LeaseLost("the receipt is not current")
            moved = store.move("'scheduled'", "n = :n", _RETRY, error, **values)
            if settles is None:
                store.revoke(*moved)
            status = Published.ACCEPTED
        return Confirmation(key=task.key, task_id=task.id, status=status)


class SqliteBackend:
    """The backend."""

    capabilities = Capabilities(names=frozenset(Capability), durable=True)

    def __init__(
        self,
        path: Path,
        *,
        flush: bool = True,
        grace: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._store = store = Store(path, clock or SystemClock(), flush=flush, grace=grace)
        self.publisher, self.control = Publisher(store), Control(store)
        self.dead_letters, self.now = DeadLetters(store), store.now

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
        with suppress(BackendUnavailable):
            self._store.release(*self._store.consumers.values())
        await self._store.aclose()
