# ruff: noqa: D102 - the capabilities tell what their methods promise
"""The operators' side."""

from collections.abc import Iterable

import msgspec

from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.errors import SettingsConflict
from taskqueue_core.limits import LIMITS
from taskqueue_core.tasks import (
    DeadLetter,
    Delivery,
    Failure,
    Ledger,
    QueueStats,
    State,
    TaskStatus,
    WorkerInfo,
)
from taskqueue_sqlite.store import ENDED, Part, Row, step, task_of

_DEAD = """SELECT * FROM entries WHERE key = :key AND state = 'dead'
    AND seq > ifnull((SELECT seq FROM entries WHERE key = :key AND id = :after), 0) ORDER BY seq LIMIT :limit"""
_FORGET = """DELETE FROM entries WHERE n IN (SELECT n FROM entries WHERE key = :key AND result ISNULL = :bare
    AND since <= :before AND state IN ('done', 'expired', 'cancelled', 'discarded') LIMIT 1000) RETURNING n"""
_CONFIGURE = """INSERT INTO queues (key, settings) VALUES (:key, :settings)
    ON CONFLICT (key) DO UPDATE SET settings = excluded.settings"""
_FAILURES = "SELECT attempt, at, error FROM failures WHERE entry = :n ORDER BY rowid"


class DeadLetters(Part):
    """What was given up."""

    @step
    def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        dead = self.store.run(_DEAD, key=key, after=after, limit=limit)
        return tuple(
            DeadLetter(
                task=task_of(entry),
                attempt=entry["attempt"],
                losses=entry["losses"],
                reason=entry["reason"],
                failed_at=entry["since"],
                history=tuple(
                    Failure(**dict(row)) for row in self.store.run(_FAILURES, n=entry["n"])
                ),
            )
            for entry in dead
        )

    @step
    def redrive(self, key: str, *task_ids: str) -> int:
        change = ", prior = attempt - 1, losses = 0, at = :now, seq = next()"
        return self._move("'waiting'", change, key, task_ids)

    @step
    def discard(self, key: str, *task_ids: str) -> int:
        return self._move("'discarded'", "", key, task_ids)

    def _move(self, state: str, changes: str, key: str, task_ids: Iterable[str]) -> int:
        dead = self.store.run(_DEAD, key=key, after=None, limit=-1)
        chosen = [e["n"] for e in dead if not task_ids or e["id"] in task_ids]
        for n in chosen:
            self.store.move(state, "n = :n", changes, n=n)
        return len(chosen)


class Control(Part):
    """Queues and their tasks."""

    @step
    def queues(self) -> tuple[str, ...]:
        return self._queues()

    def _queues(self) -> tuple[str, ...]:
        return tuple(
            sorted(
                {row["key"] for row in self.store.run("SELECT key FROM queues")} | self.store.names
            )
        )

    @step
    def settings(self, key: str) -> QueueSettings:
        return self.store.settings(key)

    @step
    def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        version = self.store.settings(key).version
        if settings.version != version:
            raise SettingsConflict(f"version {settings.version} was read, {version} is in force")
        settings = settings.model_copy(update={"version": version + 1})
        self.store.run(_CONFIGURE, key=key, settings=settings.model_dump_json())
        return settings

    @step
    def ledger(self, key: str) -> Ledger:
        return Ledger(**self._row(key, Ledger.__struct_fields__))

    def _row(self, key: str, fields: Iterable[str]) -> dict[str, int]:
        rows = self.store.run("SELECT * FROM queues WHERE key = :key", key=key)
        return {name: rows[0][name] if rows else 0 for name in fields}

    @step
    def stats(self, key: str) -> QueueStats:
        oldest = self.store.run(
            "SELECT min(since) FROM entries WHERE state = 'waiting' AND key = :key", key=key
        )
        return QueueStats(
            key=key,
            ledger=Ledger(**self._row(key, Ledger.__struct_fields__)),
            oldest_waiting=oldest[0][0],
            subscribers=sum(key in consumer.keys for consumer in self.store.consumers.values()),
            **self._row(key, ("delivered", "redelivered", "retried", "lost")),
        )

    @step
    def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        return tuple(self._status(self.store.known(key, task_id)) for task_id in task_ids)

    def _status(self, entry: Row | None) -> TaskStatus | None:
        if entry is None:
            return None
        errors = [row["error"] for row in self.store.run(_FAILURES, n=entry["n"])]
        progress = entry["progress"]
        return TaskStatus(
            key=entry["key"],
            task_id=entry["id"],
            state=State(entry["state"]),
            attempt=entry["attempt"],
            losses=entry["losses"],
            updated_at=entry["since"],
            progress=progress and msgspec.json.decode(progress),
            error=(errors or [entry["reason"]])[-1],
        )

    @step
    def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        ttl = self.store.settings(key).result_ttl
        found = (self.store.known(key, task_id) for task_id in task_ids)
        return tuple(
            e["result"] if e and self.store.now() < e["since"] + ttl else None for e in found
        )

    @step
    def progress(self, delivery: Delivery, value: float | str) -> bool:
        value = value[: LIMITS.text] if isinstance(value, str) else value
        sql = "UPDATE entries SET progress = :progress WHERE key = :key AND id = :id AND receipt = :receipt RETURNING n"
        return bool(
            self.store.run(
                sql,
                key=delivery.task.key,
                id=delivery.task.id,
                receipt=delivery.receipt,
                progress=msgspec.json.encode(value),
            )
        )

    @step
    def cancel(self, key: str, task_id: str) -> bool:
        live = "key = :key AND id = :id AND state IN ('waiting', 'scheduled', 'in_flight')"
        return bool(self.store.end("cancelled", live, key=key, id=task_id))

    @step
    def purge(self, key: str) -> int:
        return len(
            self.store.end("cancelled", "key = :key AND state IN ('waiting', 'scheduled')", key=key)
        )

    @step
    def workers(self) -> tuple[WorkerInfo, ...]:
        held = {
            worker: n
            for worker, n in self.store.run(
                "SELECT worker, count(*) FROM entries WHERE state = 'in_flight' GROUP BY worker"
            )
        }
        told = {}
        for c in self.store.consumers.values():
            told.setdefault(c.worker, []).append(c)
        return tuple(
            WorkerInfo(
                worker_id=w,
                connections=len(cs),
                keys=tuple(sorted({k for c in cs for k in c.keys})),
                in_flight=held.get(w, 0),
                since=min(c.since for c in cs),
            )
            for w, cs in told.items()
        )

    @step
    def maintain(self) -> Maintained:
        store, forgotten = self.store, 0
        recovered = store.recover()
        promoted, expired = store.tidy(self._queues())
        for key in self._queues():
            s = store.settings(key)
            for bare, keep in (True, s.dedupe_window), (False, max(s.dedupe_window, s.result_ttl)):
                forgotten += len(store.run(_FORGET, key=key, bare=bare, before=store.now() - keep))
        return Maintained(
            promoted=promoted, expired=expired, forgotten=forgotten, recovered=recovered
        )
