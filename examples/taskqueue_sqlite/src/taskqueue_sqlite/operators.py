"""The operator's side: control and dead letters."""

from collections.abc import Callable

from taskqueue_core.authoring import checked_progress, workers_of
from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.limits import check_name
from taskqueue_core.tasks import DeadLetter, Delivery, Ledger, QueueStats, State, TaskStatus, WorkerInfo

from taskqueue_sqlite.store import CHUNK, Row, Store
from taskqueue_sqlite.subscription import SQLiteSubscription

_LIVE = "state IN ('scheduled', 'waiting', 'in_flight')"
_ENDED = "state IN ('done', 'expired', 'cancelled', 'discarded')"


class Operators:
    """See `Control` and `DeadLetters` of `taskqueue_core.capabilities`: they share no name, so one object is both."""

    def __init__(self, store: Store, subscriptions: Callable[[], list[SQLiteSubscription]]) -> None:
        self._store, self._subscriptions = store, subscriptions

    async def queues(self) -> tuple[str, ...]:
        stored = self._store.run("SELECT key FROM counts UNION SELECT key FROM settings")
        return tuple(sorted({key for (key,) in stored}.union(*(one.keys for one in self._subscriptions()))))

    async def settings(self, key: str) -> QueueSettings:
        return self._store.settings(key)

    async def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        check_name("key", key)
        with self._store.step():
            changed = self._store.settings(key).followed_by(settings)
            self._store.run("INSERT OR REPLACE INTO settings VALUES (?, ?)", key, changed.model_dump_json())
        return changed

    async def ledger(self, key: str) -> Ledger:
        counts = self._store.counts(key)
        return Ledger(**{name: counts.get(name, 0) for name in Ledger.__struct_fields__})

    async def stats(self, key: str) -> QueueStats:
        counts = self._store.counts(key)
        rows = self._store.select("key = ? AND state = 'waiting' ORDER BY seq LIMIT 1", key)
        return QueueStats(
            key=key,
            ledger=await self.ledger(key),
            oldest_waiting=rows[0].available_at if rows else None,
            subscribers=sum(key in one.keys for one in self._subscriptions()),
            **{name: counts.get(name, 0) for name in ("delivered", "redelivered", "retried", "lost")},
        )

    async def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        rows = (self._store.find(key, task_id) for task_id in task_ids)
        return tuple(row.status if row else None for row in rows)

    async def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        rows = (self._store.find(key, task_id) for task_id in task_ids)
        return tuple(row.result if row and self._store.now() < row.result_until else None for row in rows)

    async def progress(self, delivery: Delivery, value: float | str) -> bool:
        progress = checked_progress(value)
        with self._store.step():
            row = self._store.find(delivery.task.key, delivery.task.id)
            if row is None or row.receipt != delivery.receipt:
                return False
            row.progress, row.updated_at = progress, self._store.now()
            self._store.save(row)
        return True

    async def cancel(self, key: str, task_id: str) -> bool:
        return self._cancel(f"key = ? AND id = ? AND {_LIVE}", key, task_id) > 0

    async def purge(self, key: str) -> int:
        return self._cancel("key = ? AND state IN ('scheduled', 'waiting')", key)

    def _cancel(self, where: str, *values: object) -> int:
        with self._store.step():
            rows = self._store.select(where, *values)
            for row in rows:
                self._store.end(row, State.CANCELLED)
        return len(rows)

    async def workers(self) -> tuple[WorkerInfo, ...]:
        return workers_of(self._subscriptions())

    async def maintain(self) -> Maintained:
        now, store = self._store.now(), self._store
        with store.step():
            promoted = store.promote()
            expired = tuple([store.expire(row) for row in store.select("deadline <= ? LIMIT ?", now, CHUNK)])
            old = store.select(f"{_ENDED} AND due <= ? LIMIT ?", now, CHUNK)
            for row in old:
                store.run("DELETE FROM entries WHERE key = ? AND id = ?", row.task.key, row.task.id)
        return Maintained(promoted=promoted, expired=expired, forgotten=len(old))

    # dead letters

    async def list(self, key: str, *, limit: int = 100, after: str | None = None) -> tuple[DeadLetter, ...]:
        last = self._store.find(key, after) if after else None
        seq = last.seq if last and last.state is State.DEAD else 0
        where = "key = ? AND state = 'dead' AND seq > ? ORDER BY seq LIMIT ?"
        return tuple(row.dead_letter for row in self._store.select(where, key, seq, limit))

    async def redrive(self, key: str, *task_ids: str) -> int:
        with self._store.step():
            for row in (rows := self._dead(key, task_ids)):
                row.redrive()
                self._store.enter(row, State.WAITING)
        return len(rows)

    async def discard(self, key: str, *task_ids: str) -> int:
        with self._store.step():
            for row in (rows := self._dead(key, task_ids)):
                self._store.enter(row, State.DISCARDED)
        return len(rows)

    def _dead(self, key: str, task_ids: tuple[str, ...]) -> tuple[Row, ...]:
        dead = self._store.select("key = ? AND state = 'dead' ORDER BY seq", key)
        return tuple(row for row in dead if not task_ids or row.task.id in task_ids)
