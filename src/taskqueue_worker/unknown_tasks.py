"""Tasks that this version of a worker cannot execute, but another version probably can: they are put off."""

from __future__ import annotations

import logging
from collections import OrderedDict

from taskqueue_core.application.task_function import SCHEMA_HEADER, TASK_HEADER
from taskqueue_core.retry import Outcome, Rejected, Snoozed
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.handlers import Handler

UNKNOWN_TASK = "unknown_task"
"""reason of a dead letter whose task no worker of its queue had, for an hour"""
DELAY = 30.0
PATIENCE = 3600.0
_REMEMBERED = 10_000
_log = logging.getLogger("taskqueue.worker")


class UnknownTasks:
    """Puts tasks off by `DELAY` seconds, without an attempt; after `PATIENCE` seconds it rejects them.

    The time of a task begins with its first delivery to this worker, by the store's clock. Only the latest tasks are
    remembered; the time of another one begins again.
    """

    def __init__(self) -> None:
        """Create an empty record."""
        self._since: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def without_handler(self, delivery: AnyDelivery) -> Outcome:
        """Return the outcome of a task whose queue has handlers, but none for the task."""
        task = delivery.task
        name = task.headers.get(TASK_HEADER, task.key)[:200]
        why = f"no worker has the task {name!r}"
        return self._outcome(delivery, Rejected(UNKNOWN_TASK, why), f"there is no task {name!r}")

    def with_invalid_payload(
        self, delivery: AnyDelivery, handler: Handler, outcome: Outcome
    ) -> Outcome:
        """Return ``outcome``; a snooze if the payload was written for other parameters than those of this version."""
        schema = delivery.task.headers.get(SCHEMA_HEADER)
        if schema is None or schema == handler.arguments.fingerprint:
            return outcome
        return self._outcome(delivery, outcome, "its payload is for another version of the task")

    def _outcome(self, delivery: AnyDelivery, end: Outcome, why: str) -> Outcome:
        task, key = delivery.task, (delivery.task.key, delivery.task.id)
        since, attempt = self._since.pop(key, (delivery.delivered_at, delivery.attempt))
        if delivery.attempt < attempt:  # the same id was published again
            since = delivery.delivered_at
        if delivery.delivered_at - since >= PATIENCE:
            return end
        self._since[key] = since, delivery.attempt
        if len(self._since) > _REMEMBERED:
            self._since.popitem(last=False)
        _log.warning("task %s of %s is put off by %g s: %s", task.id, task.key, DELAY, why)
        return Snoozed(DELAY)
