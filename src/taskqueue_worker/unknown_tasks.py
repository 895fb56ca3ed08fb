"""Tasks that this worker cannot execute, but another one, or a later version, probably can: they are put off."""

from __future__ import annotations

import logging
from collections import OrderedDict

from taskqueue_core.application.errors import Undecodable
from taskqueue_core.application.task_function import SCHEMA_HEADER, TASK_HEADER
from taskqueue_core.retry import Outcome, Rejected, Snoozed
from taskqueue_worker.batch_buffer import AnyDelivery
from taskqueue_worker.handlers import Handler
from taskqueue_worker.outcomes import outcome_of_error

UNKNOWN_TASK = "unknown_task"
"""reason of a dead letter whose task no worker of its queue had, for an hour"""
DELAY = 30.0
PATIENCE = 3600.0
UNDECODABLE_DELAY = 60.0
UNDECODABLE_SNOOZES = 10
_REMEMBERED = 10_000
_log = logging.getLogger("taskqueue.worker")


class UnknownTasks:
    """Puts tasks off by `DELAY` seconds, without an attempt; after `PATIENCE` seconds it rejects them.

    A task whose payload it cannot decode is put off `UNDECODABLE_SNOOZES` times, by `UNDECODABLE_DELAY` seconds.
    The time and the number begin with the first delivery of a task to this worker, by the store's clock. Only the
    latest tasks are remembered; those of another one begin again.
    """

    def __init__(self) -> None:
        """Create an empty record."""
        self._since: OrderedDict[tuple[str, str], tuple[float, int, int]] = OrderedDict()
        """by task, the time and the number of the first attempt here, and the number of the last one"""

    def without_handler(self, delivery: AnyDelivery) -> Outcome:
        """Return the outcome of a task whose queue has handlers, but none for the task."""
        task = delivery.task
        name = task.headers.get(TASK_HEADER, task.key)[:200]
        why = f"no worker has the task {name!r}"
        return self._for_an_hour(
            delivery, Rejected(UNKNOWN_TASK, why), f"there is no task {name!r}"
        )

    def unread(self, delivery: AnyDelivery, handler: Handler, error: Exception) -> Outcome:
        """Return the outcome of a task whose payload could not be read.

        It is a snooze if the payload cannot be decoded, or was written for other parameters than those of this version.
        """
        if isinstance(error, Undecodable):
            return self._undecodable(delivery, error)
        end = outcome_of_error(error, handler.encoding)
        schema = delivery.task.headers.get(SCHEMA_HEADER)
        if schema is None or schema == handler.arguments.fingerprint:
            return end
        return self._for_an_hour(delivery, end, "its payload is for another version of the task")

    def _for_an_hour(self, delivery: AnyDelivery, end: Outcome, why: str) -> Outcome:
        since, _ = self._first(delivery)
        if delivery.delivered_at - since >= PATIENCE:
            return self._ended(delivery, end)
        return self._put_off(delivery, DELAY, why)

    def _undecodable(self, delivery: AnyDelivery, error: Undecodable) -> Outcome:
        _, first = self._first(delivery)
        if delivery.attempt - first >= UNDECODABLE_SNOOZES:
            return self._ended(delivery, Rejected(error.code, str(error)))
        return self._put_off(delivery, UNDECODABLE_DELAY, f"its payload is undecodable: {error}")

    def _first(self, delivery: AnyDelivery) -> tuple[float, int]:
        """Return the time and the number of the first attempt of a task here."""
        task, new = delivery.task, (delivery.delivered_at, delivery.attempt, delivery.attempt)
        since, first, last = self._since.pop((task.key, task.id), new)
        if delivery.attempt < last:  # the same id was published again
            since, first, _ = new
        self._since[task.key, task.id] = since, first, delivery.attempt
        if len(self._since) > _REMEMBERED:
            self._since.popitem(last=False)
        return since, first

    def _ended(self, delivery: AnyDelivery, end: Outcome) -> Outcome:
        del self._since[delivery.task.key, delivery.task.id]
        return end

    def _put_off(self, delivery: AnyDelivery, seconds: float, why: str) -> Outcome:
        task = delivery.task
        _log.warning("task %s of %s is put off by %g s: %s", task.id, task.key, seconds, why)
        return Snoozed(seconds)
