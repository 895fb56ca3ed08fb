"""The operators' side."""

import json
from collections import defaultdict

import msgspec
from taskqueue_core.authoring import checked_progress
from taskqueue_core.capabilities import Maintained, QueueSettings
from taskqueue_core.errors import SettingsConflict
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

from taskqueue_sqlite.store import Part, Row, cut, pick, step, task_of
from taskqueue_sqlite.subscription import Subscription


class DeadLetters(Part):
    """What was given up."""

    @step
    def list(
        self, key: str, *, limit: int = 100, after: str | None = None
    ) -> tuple[DeadLetter, ...]:
        return tuple(
            pick(DeadLetter, entry, task=task_of(entry), history=self._history(entry))
            for entry in self.store.do("dead", key=key, after=after, limit=limit)
        )

    def _history(self, entry: Row) -> tuple[Failure, ...]:
        return tuple(Failure(**failure) for failure in self.store.do("failures", n=entry["n"]))

    @step
    def redrive(self, key: str, *task_ids: str) -> int:
        return self._each("redrive", key, task_ids)

    @step
    def discard(self, key: str, *task_ids: str) -> int:
        return self._each("discard", key, task_ids)

    def _each(self, verb: str, key: str, task_ids: tuple[str, ...]) -> int:
        dead = self.store.do("dead", key=key, after=None, limit=-1)
        chosen = [entry["n"] for entry in dead if not task_ids or entry["id"] in task_ids]
        return sum(len(self.store.do(verb, n=n)) for n in chosen)


class Control(Part):
    """Queues and their tasks."""

    @step
    def queues(self) -> tuple[str, ...]:
        return self._queues()

    def _queues(self) -> tuple[str, ...]:
        return tuple(sorted(self.store.names.union(q["key"] for q in self.store.do("queues"))))

    def _queue(self, key: str) -> Row:
        return next(iter(self.store.do("queue", key=key)), {"key": key, "settings": "{}"})

    @step
    def settings(self, key: str) -> QueueSettings:
        return QueueSettings.model_validate_json(self._queue(key)["settings"])

    @step
    def configure(self, key: str, settings: QueueSettings) -> QueueSettings:
        version = QueueSettings.model_validate_json(self._queue(key)["settings"]).version
        if settings.version != version:
            raise SettingsConflict(f"version {version} is in force, not {settings.version}")
        settings = settings.model_copy(update={"version": version + 1})
        self.store.do("configure", key=key, settings=settings.model_dump_json())
        return settings

    @step
    def ledger(self, key: str) -> Ledger:
        return pick(Ledger, self._queue(key))

    @step
    def stats(self, key: str) -> QueueStats:
        queue, open_ = self._queue(key), self.store.subscriptions.values()
        subscribers = sum(key in each.keys for each in open_)
        return pick(QueueStats, queue, ledger=pick(Ledger, queue), subscribers=subscribers)

    @step
    def statuses(self, key: str, *task_ids: str) -> tuple[TaskStatus | None, ...]:
        return tuple(self._status(key, task_id) for task_id in task_ids)

    def _status(self, key: str, task_id: str) -> TaskStatus | None:
        for entry in self.store.do("known", key=key, id=task_id):
            errors = [row["error"] for row in self.store.do("failures", n=entry["n"])]
            progress = entry["progress"] and msgspec.json.decode(entry["progress"])
            told = {"progress": progress, "error": [entry["reason"], *errors][-1]}
            return pick(TaskStatus, entry, state=State(entry["state"]), **told)
        return None

    @step
    def results(self, key: str, *task_ids: str) -> tuple[bytes | None, ...]:
        found = [self.store.do("known", key=key, id=task_id) for task_id in task_ids]
        return tuple(e[0]["result"] if e and e[0]["has_result"] else None for e in found)

    @step
    def progress(self, delivery: Delivery, value: float | str) -> bool:
        value = checked_progress(value)
        text = msgspec.json.encode(cut(value) if isinstance(value, str) else value)
        names = {"key": delivery.task.key, "id": delivery.task.id, "receipt": delivery.receipt}
        return bool(self.store.do("progress", progress=text, **names))

    @step
    def cancel(self, key: str, task_id: str) -> bool:
        return bool(self.store.do("cancel", key=key, id=task_id))

    @step
    def purge(self, key: str) -> int:
        return len(self.store.do("purge", key=key))

    @step
    def workers(self) -> tuple[WorkerInfo, ...]:
        held = {row["worker"]: row["held"] for row in self.store.do("held")}
        grouped = defaultdict[str, list[Subscription]](list)
        for each in self.store.subscriptions.values():
            grouped[each.worker].append(each)
        return tuple(
            WorkerInfo(
                worker_id=worker,
                connections=len(own),
                keys=tuple(sorted({key for each in own for key in each.keys})),
                in_flight=held.get(worker, 0),
                since=min(each.since for each in own),
            )
            for worker, own in grouped.items()
        )

    @step
    def maintain(self) -> Maintained:
        tidied, _ = self.store.tidy(json.dumps(self._queues()))
        return msgspec.structs.replace(tidied, forgotten=len(self.store.do("clean")))
